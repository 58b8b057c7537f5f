//! Adapters that are merged for sampling.

use super::*;

#[test]
fn merging_wants_adapters_and_nothing_to_the_bit() {
    let folder = std::path::absolute("../tests/golden/tiny_model").unwrap();
    let model = |lora: &str| format!("model={{path: {}, chat: false{lora}}}", folder.display());
    let data = "pipeline.rlvr.data={addition: {digits: 2}}";
    let merge = "pipeline.rlvr.rollout.merge_adapters=true";
    let (plain, adapted) = (model(""), model(", lora: {rank: 2, dropout: 0.1}"));
    read(SMALL, &[&adapted, data, merge]).unwrap().resolve(&machine()).unwrap();
    let check = |sets: &[&str], message: &str, help: &str| {
        let error = invalid(SMALL, sets);
        assert_eq!(error.field, "pipeline.rlvr.rollout.merge_adapters", "{error}");
        assert!(error.message.contains(message) && error.help.contains(help), "{error}");
    };
    check(&[merge], "the model has no adapters", "`model.lora`");
    check(&[&plain, data, merge], "the model has no adapters", "leave it out");
    let adapted = model(", lora: {rank: 2}");
    let strict = "pipeline.rlvr.rollout.strict=true";
    check(&[&adapted, data, merge, strict], "merged weights round otherwise", "leave one of the two out");
}

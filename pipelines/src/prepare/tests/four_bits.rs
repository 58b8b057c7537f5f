//! Frozen weights in 4 bits.

use anyroll_config::FrozenWeights;

use super::*;

#[test]
fn frozen_weights_in_four_bits_want_plain_adapters_of_whole_layers() {
    let folder = std::path::absolute("../tests/golden/tiny_model").unwrap();
    let model = |lora: &str| format!("model={{path: {}, chat: false{lora}}}", folder.display());
    let (nf4, data) = ("strategy.frozen_weights=nf4", "pipeline.rlvr.data={addition: {digits: 2}}");
    let adapted = model(", lora: {rank: 2}");
    let run = read(SMALL, &[nf4, &adapted, data]).unwrap().resolve(&machine()).unwrap();
    assert_eq!(run.policy.strategy.frozen_weights, FrozenWeights::Nf4);
    let check = |sets: &[&str], message: &str| {
        let error = only_problem(resolve(&[&[nf4], sets].concat(), &machine()).unwrap_err());
        assert_eq!(error.field, "strategy.frozen_weights", "{error}");
        assert!(error.message.contains(message), "{error}");
    };
    check(&[], "set `model.lora`");
    check(&[&model(", lora: {rank: 2, dora: true}"), data], "`lora.dora`");
    check(&[&adapted, data, "devices=2", "strategy.tensor_parallel=2"], "`strategy.tensor_parallel`");
}

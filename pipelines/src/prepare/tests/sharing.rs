//! Prompts that are computed once per group.

use super::*;

#[test]
fn prompts_are_shared_unless_adapters_drop_values() {
    let model = std::path::absolute("../tests/golden/tiny_model").unwrap();
    let shared = |lora: &str, sets: &[&str]| {
        let model = format!(
            "model={{path: {}, chat: false, lora: {{rank: 2, targets: [q_proj], {lora}}}}}",
            model.display()
        );
        let data = "pipeline.rlvr.data={addition: {digits: 2}}";
        let config = read(SMALL, &[&[&*model, data], sets].concat())?.resolve(&machine())?.config;
        let PipelineConfig::Rlvr(rlvr) = &config.pipeline else { panic!("another pipeline") };
        Ok::<_, Error>(rlvr.share_prompts)
    };
    assert_eq!(shared("dropout: 0.0", &[]).unwrap(), Some(true));
    assert_eq!(shared("dropout: 0.0", &["pipeline.rlvr.share_prompts=false"]).unwrap(), Some(false));
    assert_eq!(shared("dropout: 0.1", &[]).unwrap(), Some(false));
    let error = shared("dropout: 0.1", &["pipeline.rlvr.share_prompts=true"]).unwrap_err().to_string();
    assert!(error.contains("pipeline.rlvr.share_prompts: adapters drop values"), "{error}");
}

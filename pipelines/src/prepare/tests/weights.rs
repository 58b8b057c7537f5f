//! Sampling with weights in 8 bits.

use anyroll_config::{OldLogprobs, PipelineConfig, RolloutCorrection, TruncateConfig};

use super::*;

const FP8: &str = "pipeline.rlvr.rollout.weights=fp8";

/// Source of the behaviour log-probs, and the correction, of a resolved run.
fn defaults(sets: &[&str]) -> (Option<OldLogprobs>, Option<RolloutCorrection>) {
    let run = read(SMALL, sets).unwrap().resolve(&machine()).unwrap();
    let PipelineConfig::Rlvr(rlvr) = run.config.pipeline else { panic!("another pipeline") };
    assert_eq!(rlvr.algorithm.old_logprobs, Some(rlvr.old_logprobs()));
    (rlvr.algorithm.old_logprobs, rlvr.algorithm.rollout_correction)
}

#[test]
fn the_difference_of_rounded_weights_is_corrected() {
    let given = |old_logprobs, correction| (Some(old_logprobs), Some(correction));
    let truncate = RolloutCorrection::Truncate(TruncateConfig::default());
    assert_eq!(defaults(&[]), given(OldLogprobs::Rollout, RolloutCorrection::None));
    assert_eq!(defaults(&[FP8]), given(OldLogprobs::Recompute, truncate));
    // Of sequences, whose loss has the whole difference by itself.
    let vespo = "pipeline.rlvr.algorithm.loss=vespo";
    assert_eq!(defaults(&[FP8, vespo]), given(OldLogprobs::Rollout, RolloutCorrection::None));
    let rollout = "pipeline.rlvr.algorithm.old_logprobs=rollout";
    assert_eq!(defaults(&[FP8, rollout]), given(OldLogprobs::Rollout, RolloutCorrection::None));
    let recompute = "pipeline.rlvr.algorithm.old_logprobs=recompute";
    assert_eq!(defaults(&[FP8, recompute]), given(OldLogprobs::Recompute, truncate));
    assert_eq!(defaults(&[recompute]), given(OldLogprobs::Recompute, RolloutCorrection::None));
}

#[test]
fn what_excludes_rounded_weights_is_refused() {
    let check = |sets: &[&str], field: &str, message: &str| {
        let error = invalid(SMALL, &[&[FP8], sets].concat());
        assert_eq!(error.field, format!("pipeline.rlvr.{field}"), "{error}");
        assert!(error.message.contains(message), "{error}");
    };
    check(&["pipeline.rlvr.rollout.strict=true"], "rollout.weights", "not rounded to 8 bits");
    let rounded = invalid(SMALL, &["pipeline.rlvr.rollout.fp8_activations=true"]);
    assert!(rounded.field.ends_with("fp8_activations") && rounded.help.contains("weights: fp8"), "{rounded}");
    let none = "pipeline.rlvr.algorithm.rollout_correction=none";
    check(&[none], "algorithm.rollout_correction", "nothing corrects the difference");
    let folder = std::path::absolute("../tests/golden/tiny_model").unwrap();
    let data = "pipeline.rlvr.data={addition: {digits: 2}}";
    let model = format!("model={{path: {}, chat: false, lora: {{rank: 2, dora: true}}}}", folder.display());
    check(&[&model, data], "rollout.weights", "`lora.dora`");
    let merge = "pipeline.rlvr.rollout.merge_adapters=true";
    read(SMALL, &[FP8, &model, data, merge]).unwrap().resolve(&machine()).unwrap();
    let published = ["qk_norm=true", "qkv_bias=false"];
    let experts = ["num_experts=4", "num_experts_per_tok=2", "moe_intermediate_size=32"];
    let experts = [&published[..], &experts].concat();
    let experts: Vec<String> = experts.iter().map(|field| format!("model.decoder.{field}")).collect();
    let experts: Vec<&str> = experts.iter().map(String::as_str).collect();
    for (sets, message) in
        [(&["model.decoder.intermediate_size=76"][..], "intermediate_size"), (&experts, "num_experts")]
    {
        let error = only_problem(resolve(&[&[FP8], sets].concat(), &machine()).unwrap_err());
        assert!(error.field == "pipeline.rlvr.rollout.weights" && error.message.contains(message), "{error}");
    }
}

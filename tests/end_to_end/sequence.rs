//! `strategy.sequence_parallel`: ranks that run their micro-batches together, each a slice of the rows.

use std::path::Path;

use super::offline::{self, SFT};
use super::{
    TWO_RANKS, anyroll, assert_same, assert_same_steps, fail, interrupt, lasting_metrics, resume, run_tiny,
    series, succeed, tiny,
};

const TOGETHER: &str = "strategy.sequence_parallel=2";

/// Three heads, which two ranks cannot share.
const THREE_HEADS: [&str; 3] =
    ["model.decoder.hidden_size=48", "model.decoder.heads=3", "model.decoder.kv_heads=1"];

/// A reference, a critic, several epochs and shared prompts.
pub(super) const FULL: [&str; 5] = [
    "pipeline.rlvr.algorithm.advantage={gae: {}}",
    "pipeline.rlvr.critic={optimizer: {adamw: {learning_rate: 1.0e-3}}}",
    "pipeline.rlvr.algorithm.kl_coef=0.05",
    "pipeline.rlvr.algorithm.old_logprobs=recompute",
    "pipeline.rlvr.epochs=2",
];

/// Asserts that the first steps agree up to rounding, which updates by AdamW multiply, and later steps through other samples.
#[track_caller]
pub(super) fn assert_near(alone: &Path, together: &Path) {
    assert_within(alone, together, &[1e-4, 1e-3]);
}

/// Asserts that metrics of the first steps differ by `most` at most, a number for each.
#[track_caller]
fn assert_within(alone: &Path, together: &Path, most: &[f64]) {
    const NAMES: [&str; 7] = [
        "eval/greedy",
        "reward/mean",
        "loss/policy",
        "entropy",
        "kl/reference",
        "grad_norm",
        "critic/vf_loss",
    ];
    for name in NAMES {
        // The second evaluation is after several steps.
        let most = if name == "eval/greedy" { &most[..1] } else { most };
        for ((alone, together), most) in series(alone, name).iter().zip(series(together, name)).zip(most) {
            assert!(
                (alone - together).abs() <= most * alone.abs().max(1.0),
                "{name}: {alone} and {together}"
            );
        }
    }
    let apart = series(together, "rollout/logprob_diff_max");
    assert!(!apart.is_empty() && apart.iter().all(|&difference| difference < 1e-4), "{apart:?}");
}

#[test]
fn rlvr_over_slices_is_that_of_whole_micro_batches() {
    let folder = tempfile::tempdir().unwrap();
    let run = |name: &str, sets: &[&str]| {
        let sets = [&FULL[..], &["pipeline.rlvr.steps=6"], sets].concat();
        run_tiny(&folder, name, TWO_RANKS, &sets)
    };
    let alone = run("alone", &[]);
    let together = run("together", &[TOGETHER]);
    assert_near(&alone, &together);
    let sharded = run("sharded", &[TOGETHER, "strategy.zero_stage=3", "strategy.recompute=full"]);
    assert_same_steps(&lasting_metrics(&together), &lasting_metrics(&sharded));
    // On some processors products of other shapes round otherwise, and AdamW makes whole updates of the smallest gradients.
    assert_within(&alone, &run("four", &[TOGETHER, "devices=4", "strategy.zero_stage=1"]), &[0.02, 0.02]);
}

#[test]
fn rlvr_over_slices_that_gather_keys_is_that_of_whole_micro_batches() {
    let folder = tempfile::tempdir().unwrap();
    let run = |name: &str, sets: &[&str]| {
        let sets = [&FULL[..], &THREE_HEADS, &["pipeline.rlvr.steps=6"], sets].concat();
        run_tiny(&folder, name, TWO_RANKS, &sets)
    };
    let together = run("together", &[TOGETHER]);
    assert_near(&run("alone", &[]), &together);
    let sharded = run("sharded", &[TOGETHER, "strategy.zero_stage=3", "strategy.recompute=full"]);
    assert_same_steps(&lasting_metrics(&together), &lasting_metrics(&sharded));
}

#[test]
fn supervised_training_over_slices_is_that_of_whole_micro_batches() {
    let folder = tempfile::tempdir().unwrap();
    let run = |name: &str, sets: &[&str]| offline::run(&folder, name, SFT, sets);
    let alone = run("alone", &["devices=2"]);
    offline::assert_near(&alone, &run("two", &["devices=2", TOGETHER]));
    let sharded = ["devices=4", "strategy.sequence_parallel=4", "strategy.zero_stage=3"];
    offline::assert_near(&alone, &run("four", &sharded));
}

#[test]
fn a_run_over_slices_goes_on_bitwise() {
    let folder = tempfile::tempdir().unwrap();
    let sets = [
        TOGETHER,
        "strategy.zero_stage=2",
        "pipeline.rlvr.steps=24",
        "pipeline.rlvr.checkpoint.every=12",
        "pipeline.rlvr.algorithm.kl_coef=0.01",
    ];
    let whole = run_tiny(&folder, "whole", TWO_RANKS, &sets);
    let cut = folder.path().join("cut");
    interrupt(tiny(TWO_RANKS, &cut, &sets), &cut, 5);
    succeed(resume(&cut));
    assert_same(&whole, &cut);
}

#[test]
fn ranks_that_cannot_share_a_micro_batch_are_refused() {
    let refused = |config: &str, sets: &[&str]| {
        let sets = sets.iter().flat_map(|&set| ["--set", set]);
        let error = fail(anyroll(["check", config].into_iter().chain(sets)));
        assert!(error.contains("strategy.sequence_parallel"), "{error}");
        error
    };
    let error = refused(TWO_RANKS, &["strategy.sequence_parallel=3"]);
    assert!(error.contains("2 ranks cannot be divided into groups of 3"), "{error}");
    let error = refused(TWO_RANKS, &[TOGETHER, "pipeline.rlvr.rollout.strict=true"]);
    assert!(error.contains("rollout.strict"), "{error}");
    let error = refused("configs/diffusion_flow_grpo_shapes_cpu.yaml", &["devices=2", TOGETHER]);
    assert!(error.contains("a model of images"), "{error}");
    refused(TWO_RANKS, &["strategy.sequence_parallel=0"]);
}

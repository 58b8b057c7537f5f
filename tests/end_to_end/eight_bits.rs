//! `rollout.weights: fp8`: sampling with the layers' matrices in 8 bits, training with the policy's.

use std::fs;

use serde_json::Value;

use super::{
    ONE_RANK, TWO_RANKS, anyroll, assert_same, assert_same_steps, asynchronous::assert_repeats,
    lasting_metrics, published_model, run_tiny, series, succeed,
};

const FP8: &str = "pipeline.rlvr.rollout.weights=fp8";
const ACTIVATIONS: &str = "pipeline.rlvr.rollout.fp8_activations=true";

/// Sharded weights are rounded as they are gathered, and devices of their own round what they get.
#[test]
fn rounded_weights_are_those_of_every_layout_and_repeat_bitwise() {
    let folder = tempfile::tempdir().unwrap();
    let run =
        |name: &str, config: &str, sets: &[&str]| run_tiny(&folder, name, config, &[&[FP8], sets].concat());
    let whole = run("whole", ONE_RANK, &[]);
    assert_repeats(&whole, &run("again", ONE_RANK, &[]));
    let devices = run("devices", ONE_RANK, &["roles.rollout={}"]);
    assert_same_steps(&lasting_metrics(&whole), &lasting_metrics(&devices));
    let ranks = run("ranks", TWO_RANKS, &["strategy.zero_stage=0"]);
    let sharded = run("sharded", TWO_RANKS, &["strategy.zero_stage=3"]);
    assert_same(&ranks, &sharded);
    let together = run("together", TWO_RANKS, &["pipeline.rlvr.rollout.tensor_parallel=2"]);
    for run in [&whole, &sharded, &together] {
        let apart = series(run, "rollout/logprob_diff_mean");
        assert!(apart.iter().all(|&apart| apart > 1e-4 && apart < 0.2), "{apart:?}");
        assert!(series(run, "rollout/weight_mean").iter().all(|&weight| weight > 0.5 && weight < 1.5));
    }
    let resolved = fs::read_to_string(whole.join("resolved.yaml")).unwrap();
    for line in ["weights: fp8\n", "old_logprobs: recompute\n", "truncate:\n"] {
        assert!(resolved.contains(line), "no {line} in\n{resolved}");
    }
}

/// The same of activations in 8 bits, which move log-probs further.
#[test]
fn rounded_activations_are_those_of_every_layout_and_repeat_bitwise() {
    let folder = tempfile::tempdir().unwrap();
    let run = |name: &str, config: &str, sets: &[&str]| {
        run_tiny(&folder, name, config, &[&[FP8, ACTIVATIONS], sets].concat())
    };
    let whole = run("whole", ONE_RANK, &[]);
    assert_repeats(&whole, &run("again", ONE_RANK, &[]));
    let devices = run("devices", ONE_RANK, &["roles.rollout={}"]);
    assert_same_steps(&lasting_metrics(&whole), &lasting_metrics(&devices));
    let sharded = run("sharded", TWO_RANKS, &["strategy.zero_stage=3"]);
    let weights = run_tiny(&folder, "weights", ONE_RANK, &[FP8]);
    let [both, sharded, weights] =
        [&whole, &sharded, &weights].map(|run| series(run, "rollout/logprob_diff_mean"));
    assert!(both.iter().sum::<f64>() > weights.iter().sum(), "{both:?}, {weights:?}");
    assert!(both.iter().chain(&sharded).all(|&apart| apart < 0.3), "{both:?}, {sharded:?}");
}

/// At stage 3 sampling gathers the weights, and at stage 0 it has rounded ones beside the policy's.
#[test]
fn the_plan_counts_the_bytes_of_rounded_weights() {
    const MATRICES: f64 = (8 * 64 * (4 * 64 + 3 * 176)) as f64; // elements in the layers
    let planned = |stage: &str, sets: &[&str]| {
        let stage = format!("strategy.zero_stage={stage}");
        let sets =
            [&[&*stage, "strategy.precision=bf16", "model.decoder.layers=8", "devices=2"], sets].concat();
        let sets = sets.iter().flat_map(|set| ["--set", set]);
        let report = succeed(anyroll(["plan", ONE_RANK, "--json"].into_iter().chain(sets))).stdout;
        let report: Value = serde_json::from_str(&report).unwrap();
        report["configured"]["plan"]["generate"]["buffers"].as_f64().unwrap() / MATRICES
    };
    // A whole layer in 16 bits is there while it is rounded.
    for (stage, policy, rounded) in [("3", 2.0, 1.0 + 2.0 / 8.0), ("0", 0.0, 1.0 + 2.0 / 8.0)] {
        let more = planned(stage, &[FP8]) - planned(stage, &[]);
        // Norms and scales, and the largest unit's padding.
        assert!((more - (rounded - policy)).abs() < 0.15, "stage {stage}: {more} bytes a value");
    }
}

#[test]
fn rounded_weights_and_activations_learn() {
    let folder = tempfile::tempdir().unwrap();
    let sets = [&super::learning::SHORT[..], &[FP8, ACTIVATIONS]].concat();
    let run = run_tiny(&folder, "learned", ONE_RANK, &sets);
    let pass_at_1 = series(&run, "eval/pass@1");
    assert!(pass_at_1[1] > pass_at_1[0] + 0.12, "held-out pass@1: {pass_at_1:?}");
}

/// Adapters stay as they are beside rounded matrices, or are merged before these are rounded.
#[test]
fn adapters_beside_rounded_matrices_and_in_them_are_sampled() {
    let folder = tempfile::tempdir().unwrap();
    let lora = "model.lora={rank: 4, targets: [v_proj, down_proj]}";
    let merge = "pipeline.rlvr.rollout.merge_adapters=true";
    for (name, sets) in [
        ("beside", &[FP8, lora][..]),
        ("merged", &[FP8, lora, merge]),
        ("sharded", &[FP8, lora, merge, "strategy.zero_stage=3", "devices=2"]),
        ("devices", &[FP8, lora, merge, "roles.rollout={}"]),
    ] {
        let (run, command) = published_model::run(&folder, name, sets);
        succeed(command);
        let apart = series(&run, "rollout/logprob_diff_mean");
        assert!(
            !apart.is_empty() && apart.iter().all(|&apart| apart > 0.0 && apart < 0.2),
            "{name}: {apart:?}"
        );
    }
}

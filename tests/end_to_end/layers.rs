//! `strategy.tensor_parallel`: ranks that hold every layer together, each some heads and columns.

use std::path::Path;

use tch::{Kind, Tensor};

use super::merged_adapters::{LORA, trained};
use super::offline::{self, SFT};
use super::sequence::{FULL, assert_near};
use super::{
    TWO_RANKS, anyroll, assert_same, assert_same_steps, fail, interrupt, lasting_metrics, resume, run_tiny,
    succeed, tiny,
};

const TOGETHER: &str = "strategy.tensor_parallel=2";

/// Asserts that the exports of two runs have the same tensors up to rounding.
#[track_caller]
pub(super) fn assert_exports_near(folder: &Path, runs: [&Path; 2]) {
    let [alone, together] = runs.map(|run| {
        let to = folder.join(format!("{}-export", run.file_name().unwrap().to_string_lossy()));
        succeed(anyroll(["export", run.to_str().unwrap(), "--to", to.to_str().unwrap(), "--dtype", "fp32"]));
        let mut tensors = Tensor::read_safetensors(to.join("model.safetensors")).unwrap();
        tensors.sort_by(|(a, _), (b, _)| a.cmp(b));
        tensors
    });
    assert_eq!(alone.len(), together.len());
    for ((name, alone), (other, together)) in alone.iter().zip(&together) {
        assert_eq!((name, alone.size()), (other, together.size()));
        let apart = (alone - together).abs().max().double_value(&[]);
        let range = alone.to_kind(Kind::Float).abs().max().double_value(&[]);
        assert!(apart <= 2e-3 * range.max(1.0), "{name}: {apart} of {range}");
    }
}

#[test]
fn rlvr_over_parts_of_layers_is_that_of_whole_ones() {
    let folder = tempfile::tempdir().unwrap();
    let run = |name: &str, sets: &[&str]| {
        // A second epoch multiplies the rounding of the first.
        let sets = [&FULL[..], &["pipeline.rlvr.epochs=1", "pipeline.rlvr.steps=6"], sets].concat();
        run_tiny(&folder, name, TWO_RANKS, &sets)
    };
    let alone = run("alone", &[]);
    let sets = [TOGETHER, "pipeline.rlvr.rollout.tensor_parallel=2", "strategy.keep_logits=true"];
    let together = run("together", &[&sets[..], &["strategy.zero_stage=1"]].concat());
    assert_near(&alone, &together);
    let again = run("again", &[&sets[..], &["strategy.zero_stage=3", "strategy.recompute=full"]].concat());
    assert_same_steps(&lasting_metrics(&together), &lasting_metrics(&again));
}

#[test]
fn supervised_training_over_parts_of_layers_is_that_of_whole_ones() {
    let folder = tempfile::tempdir().unwrap();
    let run = |name: &str, sets: &[&str]| offline::run(&folder, name, SFT, &[&["devices=2"], sets].concat());
    let alone = run("alone", &[]);
    let together = run("together", &[TOGETHER, "strategy.zero_stage=2"]);
    offline::assert_near(&alone, &together);
    let four = ["devices=4", TOGETHER, "strategy.sequence_parallel=2", "strategy.zero_stage=3"];
    offline::assert_near(&alone, &run("four", &four));
    assert_exports_near(folder.path(), [&alone, &together]);
}

#[test]
fn adapters_of_parts_of_layers_are_those_of_whole_ones() {
    let folder = tempfile::tempdir().unwrap();
    let run = |name: &str, sets: &[&str]| trained(&folder, name, &[&["devices=2", LORA], sets].concat());
    let alone = run("alone", &[]);
    assert_near(&alone, &run("together", &[TOGETHER]));
    assert_near(&alone, &run("merged", &[TOGETHER, "pipeline.rlvr.rollout.merge_adapters=true"]));
}

#[test]
fn a_run_over_parts_of_layers_goes_on_bitwise() {
    let folder = tempfile::tempdir().unwrap();
    let sets = [
        TOGETHER,
        "strategy.zero_stage=2",
        "pipeline.rlvr.rollout.tensor_parallel=2",
        "pipeline.rlvr.steps=16",
        "pipeline.rlvr.checkpoint.every=8",
        "pipeline.rlvr.algorithm.kl_coef=0.01",
    ];
    let whole = run_tiny(&folder, "whole", TWO_RANKS, &sets);
    let cut = folder.path().join("cut");
    interrupt(tiny(TWO_RANKS, &cut, &sets), &cut, 4);
    succeed(resume(&cut));
    assert_same(&whole, &cut);
}

#[test]
fn ranks_that_cannot_hold_layers_together_are_refused() {
    let refused = |config: &str, sets: &[&str], problem: &str| {
        let sets = sets.iter().flat_map(|&set| ["--set", set]);
        let error = fail(anyroll(["check", config].into_iter().chain(sets)));
        assert!(error.contains("strategy.tensor_parallel") && error.contains(problem), "{problem}: {error}");
    };
    let four = "devices=4";
    refused(TWO_RANKS, &["strategy.tensor_parallel=3"], "2 ranks cannot be divided into groups of 3");
    refused(TWO_RANKS, &["strategy.tensor_parallel=0"], "it is 0");
    refused(TWO_RANKS, &["devices=8", "strategy.tensor_parallel=8"], "num_attention_heads");
    refused(
        TWO_RANKS,
        &[TOGETHER, "strategy.sequence_parallel=2"],
        "2 ranks cannot be divided into groups of 4",
    );
    refused(TWO_RANKS, &[four, "strategy.tensor_parallel=4", "strategy.shard_group=2"], "shard_group");
    refused(TWO_RANKS, &[TOGETHER, "pipeline.rlvr.rollout.strict=true"], "rollout.strict");
    refused("configs/offline_ilql_sort_cpu.yaml", &["devices=2", TOGETHER], "ilql");
    refused("configs/diffusion_flow_grpo_shapes_cpu.yaml", &["devices=2", TOGETHER], "a model of images");
    let hosts = ["--hosts", "2", "--devices-per-host", "2", "--link", "100Gb/s", "--device", "H100"];
    let plan = ["plan", TWO_RANKS, "--set", TOGETHER, "--set", "strategy.precision=bf16"];
    let error = fail(anyroll([&plan[..], &hosts].concat()));
    assert!(error.contains("strategy.tensor_parallel"), "{error}");
}

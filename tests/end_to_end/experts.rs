//! `strategy.expert_parallel`: ranks among which the experts of every layer are spread.

use std::path::Path;

use tch::Tensor;

use super::layers::assert_exports_near;
use super::offline::{self, SFT};
use super::sequence::{FULL, assert_near};
use super::{
    TWO_RANKS, anyroll, assert_same, assert_same_steps, fail, interrupt, lasting_metrics, resume, run_tiny,
    series, succeed, tiny,
};

const SPREAD: &str = "strategy.expert_parallel=2";

/// A model with experts in the first of two layers.
const MIXTURE: [&str; 5] = [
    "model.decoder.qk_norm=true",
    "model.decoder.num_experts=4",
    "model.decoder.num_experts_per_tok=2",
    "model.decoder.moe_intermediate_size=40",
    "model.decoder.mlp_only_layers=[1]",
];

#[test]
fn rlvr_over_spread_experts_is_that_of_whole_layers() {
    let folder = tempfile::tempdir().unwrap();
    let run = |name: &str, sets: &[&str]| {
        // A second epoch multiplies the rounding of the first.
        let short = ["pipeline.rlvr.epochs=1", "pipeline.rlvr.steps=4"];
        run_tiny(&folder, name, TWO_RANKS, &[&MIXTURE[..], &FULL, &short, sets].concat())
    };
    let alone = run("alone", &[]);
    let spread = run("spread", &[SPREAD, "strategy.zero_stage=1"]);
    assert_near(&alone, &spread);
    for cost in ["perf/experts_sent_bytes", "time/experts_exchange_s"] {
        let of_steps = series(&spread, cost);
        assert!(of_steps.len() == 4 && of_steps.iter().all(|&cost| cost > 0.0), "{cost}: {of_steps:?}");
    }
    let again = run("again", &[SPREAD, "strategy.zero_stage=3", "strategy.recompute=full"]);
    assert_same_steps(&lasting_metrics(&spread), &lasting_metrics(&again));
}

/// Ranks that sample together with whole experts sample as one rank does, in a run whose training spreads them too.
#[test]
fn rollout_with_whole_experts_is_that_of_one_rank() {
    let folder = tempfile::tempdir().unwrap();
    let run = |name: &str, sets: &[&str]| {
        let short = ["pipeline.rlvr.epochs=1", "pipeline.rlvr.steps=4"];
        run_tiny(&folder, name, TWO_RANKS, &[&MIXTURE[..], &FULL, &short, sets].concat())
    };
    let together = ["pipeline.rlvr.rollout.tensor_parallel=2", "pipeline.rlvr.rollout.expert_parallel=true"];
    assert_near(&run("alone", &[]), &run("together", &together));
    let refused = |sets: &[&str], problem: &str| {
        let sets = sets.iter().flat_map(|&set| ["--set", set]);
        let error = fail(anyroll(["check", TWO_RANKS].into_iter().chain(sets)));
        assert!(error.contains("rollout.expert_parallel") && error.contains(problem), "{problem}: {error}");
    };
    refused(&together, "the model has no experts");
    refused(&[&MIXTURE[..], &together[1..]].concat(), "each rank samples by itself");
}

#[test]
fn supervised_training_over_spread_experts_is_exported_whole() {
    let folder = tempfile::tempdir().unwrap();
    let run = |name: &str, sets: &[&str]| {
        let sets = [&MIXTURE[..], &["pipeline.offline.steps=30"], sets].concat();
        offline::run(&folder, name, SFT, &sets)
    };
    let alone = run("alone", &["devices=2"]);
    let four = ["devices=4", "strategy.expert_parallel=4", "strategy.zero_stage=2"];
    let spread = run("spread", &four);
    assert_exports_near(folder.path(), [&alone, &spread]);
}

/// A mixture is trained from scratch and exported, and then has adapters on attention and on experts.
#[test]
fn adapters_of_experts_are_trained_spread_and_merged() {
    let folder = tempfile::tempdir().unwrap();
    let first = [&MIXTURE[..], &["pipeline.offline.steps=20"]].concat();
    let base = offline::run(&folder, "base", SFT, &first);
    let model = folder.path().join("model");
    let export = |run: &Path, to: &Path, options: &[&str]| {
        let to = ["export", run.to_str().unwrap(), "--to", to.to_str().unwrap()];
        succeed(anyroll(to.into_iter().chain(options.iter().copied())));
    };
    export(&base, &model, &["--dtype", "fp32"]);
    let lora = "{rank: 4, targets: [q_proj, '(gate|up|down)_proj']}";
    let adapted = |lora: &str| format!("model={{path: {}, chat: false, lora: {lora}}}", model.display());
    let run = |name: &str, sets: &[&str]| {
        let model = adapted(lora);
        let sets = [&[&model[..], "devices=2", "pipeline.offline.steps=20"], sets].concat();
        offline::run(&folder, name, SFT, &sets)
    };
    let alone = run("alone", &["strategy.zero_stage=0"]);
    let spread = run("spread", &[SPREAD, "strategy.zero_stage=3", "strategy.recompute=selective"]);
    assert_exports_near(folder.path(), [&alone, &spread]);
    let adapter = folder.path().join("adapter");
    export(&spread, &adapter, &["--adapter"]);
    let names = Tensor::read_safetensors(adapter.join("adapter_model.safetensors")).unwrap();
    let of_expert = "base_model.model.model.layers.0.mlp.experts.3.up_proj.lora_B.weight";
    assert!(names.iter().any(|(name, tensor)| name == of_expert && tensor.size() == [40, 4]), "{names:?}");
    let refused = |lora: &str, set: &str, problem: &str| {
        let sets = ["--set", &adapted(lora), "--set", "devices=2", "--set", set];
        let error = fail(anyroll(["check", SFT].into_iter().chain(sets)));
        assert!(error.contains(problem), "{problem}: {error}");
    };
    refused("{rank: 4, dropout: 0.1}", "seed=0", "adapters of experts are plain ones");
    refused(lora, "strategy.tensor_parallel=2", "adapters of experts, such as");
    refused("{rank: 4, rank_pattern: {'experts.0.up_proj': 2}}", "seed=0", "all experts have one shape");
}

#[test]
fn a_run_over_spread_experts_goes_on_bitwise() {
    let folder = tempfile::tempdir().unwrap();
    let sets = [
        SPREAD,
        "strategy.zero_stage=2",
        "pipeline.rlvr.rollout.tensor_parallel=2",
        "pipeline.rlvr.steps=16",
        "pipeline.rlvr.checkpoint.every=8",
        "pipeline.rlvr.algorithm.kl_coef=0.01",
    ];
    let sets = [&MIXTURE[..], &sets].concat();
    let whole = run_tiny(&folder, "whole", TWO_RANKS, &sets);
    let cut = folder.path().join("cut");
    interrupt(tiny(TWO_RANKS, &cut, &sets), &cut, 4);
    succeed(resume(&cut));
    assert_same(&whole, &cut);
}

#[test]
fn experts_that_ranks_cannot_spread_are_refused() {
    let refused = |config: &str, sets: &[&str], problem: &str| {
        let sets = sets.iter().flat_map(|&set| ["--set", set]);
        let error = fail(anyroll(["check", config].into_iter().chain(sets)));
        assert!(error.contains("strategy.expert_parallel") && error.contains(problem), "{problem}: {error}");
    };
    let mixture = |sets: &[&'static str], problem: &str| {
        refused(TWO_RANKS, &[&MIXTURE[..], sets].concat(), problem);
    };
    mixture(&["strategy.expert_parallel=3"], "2 ranks cannot be divided into groups of 3");
    mixture(&["strategy.expert_parallel=0"], "it is 0");
    mixture(&["devices=8", "strategy.expert_parallel=8"], "num_experts");
    mixture(&["devices=4", "strategy.expert_parallel=4", "strategy.shard_group=2"], "shard_group");
    mixture(&["devices=4", SPREAD, "strategy.tensor_parallel=2"], "strategy.tensor_parallel");
    refused(TWO_RANKS, &[SPREAD], "the model has no experts");
    refused("configs/offline_ilql_sort_cpu.yaml", &["devices=2", SPREAD], "ilql");
    refused("configs/diffusion_flow_grpo_shapes_cpu.yaml", &["devices=2", SPREAD], "a model of images");
    let hosts = ["--hosts", "2", "--devices-per-host", "2", "--link", "100Gb/s", "--device", "H100"];
    let sets = [&MIXTURE[..], &[SPREAD, "strategy.precision=bf16"]].concat();
    let sets = sets.into_iter().flat_map(|set| ["--set", set]);
    let error = fail(anyroll(["plan", TWO_RANKS].into_iter().chain(sets).chain(hosts)));
    assert!(error.contains("strategy.expert_parallel"), "{error}");
}

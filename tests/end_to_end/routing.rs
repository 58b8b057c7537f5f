//! Mixtures of experts in training: `rollout.replay_routing`, and metrics of the routers.

use std::path::PathBuf;

use tempfile::TempDir;

use super::asynchronous::{UNEVEN, assert_repeats};
use super::rollout_hosts::{hosts, with_hosts};
use super::sequence::assert_near;
use super::{
    ONE_RANK, TWO_RANKS, anyroll, assert_same, environments, fail, lasting_metrics, metrics, offline,
    run_tiny, series,
};

const REPLAY: &str = "pipeline.rlvr.rollout.replay_routing=true";
const MIXTURE: [&str; 4] = [
    "model.decoder.qk_norm=true",
    "model.decoder.num_experts=8",
    "model.decoder.num_experts_per_tok=2",
    "model.decoder.moe_intermediate_size=24",
];

/// With one mini-batch, all passes of a step are on the weights that sampled. There is no warm-up, whose steps multiply
/// differences of rounding through other choices.
const NO_WARMUP: [&str; 6] = [
    "model.decoder.max_length=24",
    "pipeline.rlvr.warmup.steps=0",
    "pipeline.rlvr.steps=5",
    "pipeline.rlvr.mini_batches=1",
    "pipeline.rlvr.rollout.max_new_tokens=8",
    "pipeline.rlvr.reward=[{regex: {pattern: '^.{0,4}$'}}]",
];

fn run(folder: &TempDir, name: &str, config: &str, sets: &[&str]) -> PathBuf {
    run_tiny(folder, name, config, &[&MIXTURE, sets].concat())
}

#[test]
fn replayed_choices_of_the_same_weights_change_nothing() {
    let folder = tempfile::tempdir().unwrap();
    let recompute = ["pipeline.rlvr.algorithm.old_logprobs=recompute"];
    let of = |name: &str, sets: &[&str]| {
        run(&folder, name, TWO_RANKS, &[&NO_WARMUP[..], &recompute, sets].concat())
    };
    let plain = of("plain", &[]);
    let replayed = of("replayed", &[REPLAY]);
    assert!(series(&plain, "rollout/routing_diff").is_empty());
    assert_eq!(series(&replayed, "rollout/routing_diff").len(), 5);
    assert_near(&plain, &replayed);
    for (metric, least, most) in [
        ("router/entropy", 0.01, 8_f64.ln()),
        ("router/load_max", 1.0, 8.0),
        ("router/idle_experts", 0.0, 31.0),
    ] {
        let values = series(&replayed, metric);
        assert!(
            values.len() == 5 && values.iter().all(|it| (least..=most).contains(it)),
            "{metric}: {values:?}"
        );
    }
    // However micro-batches are cut and run.
    for (name, sets) in [
        ("tokens", &["strategy.micro_batch_tokens=64", "pipeline.rlvr.balance_ranks=true"][..]),
        ("apart", &["pipeline.rlvr.share_prompts=false", "strategy.recompute=full", "strategy.zero_stage=3"]),
        ("slices", &["strategy.sequence_parallel=2"]),
        ("parts", &["strategy.tensor_parallel=2", "strategy.recompute=selective"]),
        ("together", &["pipeline.rlvr.rollout.tensor_parallel=2"]),
    ] {
        let other = of(name, &[sets, &[REPLAY]].concat());
        assert_near(&replayed, &other);
        let differing = series(&other, "rollout/routing_diff");
        assert!(differing.len() == 5 && differing[0] == 0.0, "{name}: {differing:?}");
        for metric in ["router/entropy", "router/load_max", "router/idle_experts"] {
            let [own, other] = [&replayed, &other].map(|run| series(run, metric)[0]);
            // Padding of slices does not count. A prompt counts each time that it is computed.
            let near = if ["apart", "tokens"].contains(&name) { 0.1 } else { 1e-4 };
            assert!((own - other).abs() <= near * own.max(1.0), "{name}: {metric} is {other}, not {own}");
        }
    }
}

#[test]
fn tokens_of_older_weights_keep_their_experts() {
    let folder = tempfile::tempdir().unwrap();
    let sets = [&UNEVEN[..], &["pipeline.rlvr.rollout.async={ahead: 2}", REPLAY]].concat();
    let whole = run(&folder, "whole", ONE_RANK, &sets);
    let differing = series(&whole, "rollout/routing_diff");
    assert!(differing[0] < 0.01 && differing.iter().any(|&share| share > 0.0), "{differing:?}");
    // The completions of a checkpoint have theirs.
    assert_repeats(&whole, &run(&folder, "again", ONE_RANK, &sets));
    // So have those of other devices and hosts.
    let own = [&sets[..], &["roles.rollout.devices=1"]].concat();
    let own = run(&folder, "own", ONE_RANK, &own);
    let elsewhere = hosts(1, 1);
    let elsewhere = [&MIXTURE[..], &sets, &[&elsewhere]].concat();
    assert_same(&own, &with_hosts(&folder, "elsewhere", ONE_RANK, 1, &elsewhere));
    assert!(series(&own, "rollout/routing_diff").iter().any(|&share| share > 0.0));
}

#[test]
fn every_turn_of_an_episode_keeps_its_experts() {
    let folder = tempfile::tempdir().unwrap();
    let steps = "pipeline.rlvr.steps=4";
    let of = |name: &str, sets: &[&str]| {
        environments::run(&folder, name, &[&MIXTURE[..], &[steps], sets].concat())
    };
    let (plain, replayed) = (of("plain", &[]), of("replayed", &[REPLAY]));
    assert_eq!(series(&plain, "reward/mean")[0], series(&replayed, "reward/mean")[0]);
    assert!(series(&replayed, "rollout/logprob_diff_max").iter().all(|&difference| difference < 1e-4));
    assert!(series(&replayed, "rollout/routing_diff")[0] < 0.01);
}

#[test]
fn the_balancing_loss_evens_the_load_out() {
    let folder = tempfile::tempdir().unwrap();
    let coef = "pipeline.rlvr.algorithm.router_aux_loss_coef=0.3";
    let of = |name: &str, sets: &[&str]| run(&folder, name, TWO_RANKS, &[&NO_WARMUP[..], sets].concat());
    let (plain, balanced) = (of("plain", &[]), of("balanced", &[coef]));
    assert!(series(&plain, "loss/router_balance").is_empty());
    let balance = series(&balanced, "loss/router_balance");
    // Two experts per token.
    assert!(balance.len() == 5 && balance.iter().all(|it| (1.9..3.0).contains(it)), "{balance:?}");
    assert!(balance[4] < balance[0], "{balance:?}");
    let [plain_norm, norm] = [&plain, &balanced].map(|run| series(run, "grad_norm")[0]);
    assert!(norm != plain_norm);
    // Each rank has the loss of its own micro-batches, whatever part of the weights it holds.
    for (name, sets) in [
        ("sharded", &["strategy.zero_stage=3", "strategy.recompute=full"]),
        ("parts", &["strategy.tensor_parallel=2", "strategy.recompute=selective"]),
    ] {
        let other = of(name, &[&sets[..], &[coef]].concat());
        assert_near(&balanced, &other);
        for (own, other) in balance.iter().zip(series(&other, "loss/router_balance")) {
            assert!((own - other).abs() < 1e-4, "{name}: {own} and {other}");
        }
    }
    let slices = of("slices", &["strategy.sequence_parallel=2", coef]);
    assert!(series(&slices, "loss/router_balance").iter().all(|it| (1.9..3.0).contains(it)));

    let of = |name: &str, coef: &str| {
        let coef = format!("pipeline.offline.router_aux_loss_coef={coef}");
        offline::run(&folder, name, offline::SFT, &[&MIXTURE[..], &[&coef]].concat())
    };
    let [plain, balanced] = [of("sft", "1e-9"), of("balanced sft", "1")]
        .map(|run| series(&run, "loss/router_balance").pop().unwrap());
    assert!(balanced < plain, "{balanced} and {plain}");
}

#[test]
fn a_model_without_experts_is_refused() {
    for (set, more, problem) in [
        ("pipeline.rlvr.algorithm.router_aux_loss_coef=0.1", &[][..], "the model has no layers with experts"),
        ("pipeline.rlvr.algorithm.router_aux_loss_coef=-1", &[], "out of range"),
        ("pipeline.rlvr.algorithm.router_aux_loss_coef=0.1", &["strategy.precision=fp16"], "is fp16"),
    ] {
        let sets = MIXTURE.iter().take(if problem.contains("no layers") { 0 } else { 4 }).copied();
        let sets = sets.chain(more.iter().copied()).chain([set]).flat_map(|set| ["--set", set]);
        let error = fail(anyroll(["check", ONE_RANK].into_iter().chain(sets)));
        assert!(error.contains("router_aux_loss_coef: ") && error.contains(problem), "{problem}: {error}");
    }
    let error = fail(anyroll(["check", ONE_RANK, "--set", REPLAY]));
    assert!(error.contains("pipeline.rlvr.rollout.replay_routing: "), "{error}");
    assert!(error.contains("the model has no layers with experts"), "{error}");
    let folder = tempfile::tempdir().unwrap();
    let dense = run_tiny(&folder, "dense", ONE_RANK, &["pipeline.rlvr.steps=3"]);
    assert!(!metrics(&dense).iter().any(|step| step.keys().any(|name| name.starts_with("router/"))));
    assert!(!lasting_metrics(&dense).is_empty());
}

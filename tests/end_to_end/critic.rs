//! PPO with a critic, and ReMax with its greedy completions.

use std::path::{Path, PathBuf};

use tempfile::TempDir;

use super::{
    ONE_RANK, assert_same, assert_same_steps, interrupt, last_checkpoint, lasting_metrics, resume, run_tiny,
    series, succeed, tiny,
};

const PPO: &str = "configs/ppo_critic_cpu.yaml";

/// A critic with another strategy than the policy's, which trains alone for the first two steps.
const CRITIC: [&str; 6] = [
    "pipeline.rlvr.group_size=2",
    "pipeline.rlvr.epochs=2",
    "pipeline.rlvr.critic.warmup_steps=2",
    "pipeline.rlvr.critic.value_clip=0.05",
    "roles.critic.strategy.micro_batch_size=3",
    "pipeline.rlvr.critic.optimizer.schedule.linear.warmup_steps=1",
];

fn run_ppo(folder: &TempDir, name: &str, sets: &[&str]) -> PathBuf {
    run_tiny(folder, name, PPO, &[&CRITIC[..], sets].concat())
}

/// Asserts that metrics are equal up to rounding.
#[track_caller]
fn assert_near(a: &Path, b: &Path, names: &[&str]) {
    for name in names {
        let (of_a, of_b) = (series(a, name), series(b, name));
        assert!(!of_a.is_empty() && of_a.len() == of_b.len(), "{name}");
        for (step, (a, b)) in of_a.iter().zip(&of_b).enumerate() {
            assert!((a - b).abs() <= 2e-5 * a.abs().max(1.0), "{name} of record {step}: {a} and {b}");
        }
    }
}

#[test]
fn any_number_of_ranks_trains_the_same_critic_and_policy() {
    const NAMES: [&str; 11] = [
        "reward/mean",
        "loss/policy",
        "grad_norm",
        "critic/vf_loss",
        "critic/vf_clipfrac",
        "critic/vf_explained_var",
        "critic/grad_norm",
        "critic/values/mean",
        "critic/returns/min",
        "critic/advantages/max",
        "eval/pass@1",
    ];
    let folder = tempfile::tempdir().unwrap();
    let mut one = PathBuf::new();
    for (ranks, size, warmup_size) in [(2, 4, 16), (4, 2, 8)] {
        // Both add the same micro-batches in the same order, since an optimizer amplifies rounding
        // differences with each step.
        let run = |ranks: usize| {
            let sets = [
                format!("devices={ranks}"),
                format!("strategy.micro_batch_size={size}"),
                format!("roles.critic.strategy.micro_batch_size={size}"),
                format!("pipeline.rlvr.warmup.micro_batch_size={warmup_size}"),
            ];
            run_ppo(&folder, &format!("{ranks}-{size}"), &sets.each_ref().map(|set| &**set))
        };
        one = run(1);
        assert_near(&one, &run(ranks), &NAMES);
    }
    let clipped = series(&one, "critic/vf_clipfrac");
    assert!(clipped.iter().any(|&share| share > 0.0), "the bound never binds: {clipped:?}");
    let advantages = series(&one, "critic/advantages/mean");
    assert!(advantages.iter().all(|mean| mean.abs() < 1e-6), "whitened over all ranks: {advantages:?}");
    // The critic trains alone for two steps: the policy stays, and has no loss.
    assert_eq!((series(&one, "critic/vf_loss").len(), series(&one, "loss/policy").len()), (12, 10));
}

/// A limit in tokens changes only the rounding of the first step's gradient, for all models that score or train, and no
/// stage changes a bit of it. Ranks of shorter completions make as many micro-batches as the others.
#[test]
fn micro_batches_by_tokens_have_the_same_gradient() {
    const NAMES: [&str; 5] = ["grad_norm", "loss/policy", "loss/kl", "critic/grad_norm", "critic/vf_loss"];
    let folder = tempfile::tempdir().unwrap();
    let shared = [
        "devices=2",
        "pipeline.rlvr.steps=3",
        "pipeline.rlvr.critic.warmup_steps=0",
        "pipeline.rlvr.algorithm.kl_coef=0.01",
        "pipeline.rlvr.algorithm.old_logprobs=recompute",
        // One optimizer step, which rounding of earlier ones does not reach.
        "pipeline.rlvr.epochs=1",
        "pipeline.rlvr.mini_batches=1",
    ];
    let run = |name: &str, own: &[&str]| run_ppo(&folder, name, &[&shared[..], own].concat());
    let by_size = run("size", &[]);
    let limits = ["strategy.micro_batch_tokens=20", "roles.critic.strategy.micro_batch_tokens=13"];
    let [zero0, zero3] = ["0", "3"].map(|stage| {
        let stages =
            [format!("strategy.zero_stage={stage}"), format!("roles.critic.strategy.zero_stage={stage}")];
        run(stage, &[&limits[..], &stages.each_ref().map(|it| &**it)].concat())
    });
    assert_same_steps(&lasting_metrics(&zero0), &lasting_metrics(&zero3));
    for name in NAMES {
        let [size, tokens] = [&by_size, &zero0].map(|run| series(run, name)[0]);
        assert!((size - tokens).abs() <= 1e-5 * size.abs().max(1e-2), "{name}: {size} and {tokens}");
    }
    let balances = series(&zero0, "perf/rank_balance");
    assert!(balances.iter().all(|share| (0.5..=1.0).contains(share)), "{balances:?}");
}

#[test]
fn what_leaves_the_device_and_the_stage_change_no_bit() {
    let folder = tempfile::tempdir().unwrap();
    let plain = run_ppo(&folder, "plain", &["devices=2", "strategy.offload.optimizer=none"]);
    let sets = ["roles.critic.strategy.zero_stage=3", "roles.critic.strategy.offload.params=between_steps"];
    let frugal = run_ppo(&folder, "frugal", &[&["devices=2"], &sets[..]].concat());
    assert_same_steps(&lasting_metrics(&plain), &lasting_metrics(&frugal));
    assert!(last_checkpoint(&plain) == last_checkpoint(&frugal), "the checkpoints differ");
    let least = |run| series(run, "perf/generate_allocated_bytes")[1];
    assert!(least(&frugal) < least(&plain), "{} of {} bytes", least(&frugal), least(&plain));
}

#[test]
fn both_models_go_on_bitwise() {
    let folder = tempfile::tempdir().unwrap();
    let sets = [
        &CRITIC[..],
        &["devices=2", "pipeline.rlvr.steps=60", "pipeline.rlvr.checkpoint.every=30"],
        &["pipeline.rlvr.algorithm.kl_coef=0.01", "pipeline.rlvr.algorithm.kl_in={reward: {adaptive: {}}}"],
    ]
    .concat();
    let whole = run_tiny(&folder, "whole", PPO, &sets);
    let run = folder.path().join("interrupted");
    interrupt(tiny(PPO, &run, &sets), &run, 10);
    succeed(resume(&run));
    assert_same(&whole, &run);
    let (_, files) = last_checkpoint(&run);
    assert!(files.keys().any(|name| name == "critic/rank_0001.bin"), "{:?}", files.keys());
}

/// Learns four digits, like the other algorithms.
#[test]
fn a_critic_teaches() {
    let folder = tempfile::tempdir().unwrap();
    let run = run_tiny(
        &folder,
        "run",
        PPO,
        &[
            "pipeline.rlvr.data.sort.digits=4",
            "pipeline.rlvr.rollout.max_new_tokens=5",
            "pipeline.rlvr.warmup.optimizer.schedule.constant.warmup_steps=10",
            "pipeline.rlvr.steps=40",
            "pipeline.rlvr.prompts_per_step=128",
            "pipeline.rlvr.group_size=1",
            "pipeline.rlvr.evaluation.every=40",
            "pipeline.rlvr.evaluation.prompts=200",
            "strategy.micro_batch_size=64",
        ],
    );
    let pass_at_1 = series(&run, "eval/pass@1");
    assert!(pass_at_1[1] > pass_at_1[0] + 0.12, "held-out pass@1 went from {pass_at_1:?}");
    let explained = series(&run, "critic/vf_explained_var");
    let last = explained[30..].iter().sum::<f64>() / 10.0;
    assert!(explained[0] < 0.01 && last > 0.03, "the critic explains {explained:?}");
}

#[test]
fn remax_is_the_same_on_any_number_of_ranks_and_samples_a_greedy_completion_a_prompt() {
    let folder = tempfile::tempdir().unwrap();
    let sets =
        ["pipeline.rlvr.algorithm.advantage=remax", "pipeline.rlvr.selection.mixed_groups={max_batches: 3}"];
    let [one, two] = ["1", "2"].map(|ranks| {
        let devices = format!("devices={ranks}");
        run_tiny(&folder, ranks, ONE_RANK, &[&[&*devices], &sets[..]].concat())
    });
    assert_near(&one, &two, &["reward/mean", "reward/greedy", "loss/policy", "grad_norm", "eval/pass@1"]);
    let greedy = series(&one, "reward/greedy");
    assert_eq!(greedy.len(), 12);
    assert!(greedy.iter().all(|reward| (reward * 8.0).fract() == 0.0), "eight prompts each: {greedy:?}");
}

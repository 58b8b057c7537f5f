//! Runs that must give the same numbers.

use std::path::Path;

use super::{
    ONE_RANK, TWO_RANKS, anyroll, assert_same, assert_same_steps, diffusion, last_checkpoint,
    lasting_metrics, offline, run_tiny, series, succeed,
};

/// A second model and several epochs per batch: every feature of a step.
const FULL_STEP: [&str; 3] = [
    "pipeline.rlvr.algorithm.kl_coef=0.05",
    "pipeline.rlvr.algorithm.entropy_coef=0.01",
    "pipeline.rlvr.epochs=2",
];

#[test]
fn a_seed_decides_every_bit() {
    let folder = tempfile::tempdir().unwrap();
    for (config, name) in [(ONE_RANK, "1"), (TWO_RANKS, "2")] {
        let run = |copy: &str| run_tiny(&folder, &format!("{name}-{copy}"), config, &FULL_STEP);
        assert_same(&run("a"), &run("b"));
    }
    let [first, other] = ["1-a", "other"].map(|name| folder.path().join(name));
    run_tiny(&folder, "other", ONE_RANK, &[&FULL_STEP[..], &["seed=1"]].concat());
    for name in ["warmup/loss", "loss/policy", "reward/mean", "eval/pass@1"] {
        assert_ne!(series(&first, name), series(&other, name), "{name}");
    }
}

#[test]
fn every_zero_stage_computes_the_same() {
    let folder = tempfile::tempdir().unwrap();
    let run = |stage: usize| {
        let sets = [&format!("strategy.zero_stage={stage}"), "pipeline.rlvr.steps=6"];
        run_tiny(&folder, &stage.to_string(), TWO_RANKS, &[&FULL_STEP[..], &sets].concat())
    };
    let whole = run(0);
    for stage in 1..=3 {
        let sharded = run(stage);
        assert_same_steps(&lasting_metrics(&whole), &lasting_metrics(&sharded));
        assert!(
            last_checkpoint(&whole) == last_checkpoint(&sharded),
            "the checkpoint of stage {stage} differs"
        );
        let held = [&whole, &sharded].map(|run| series(run, "perf/allocated_bytes")[0]);
        assert!(held[1] < held[0], "stage {stage} holds {held:?} bytes");
    }
}

#[test]
fn what_leaves_the_device_or_is_recomputed_changes_nothing() {
    let folder = tempfile::tempdir().unwrap();
    let run = |name: &str, sets: &[&str]| {
        let sets = [&FULL_STEP[..], &["pipeline.rlvr.steps=6", "strategy.zero_stage=1"], sets].concat();
        run_tiny(&folder, name, TWO_RANKS, &sets)
    };
    let plain = run("plain", &["strategy.offload.optimizer=none"]);
    let frugal =
        run("frugal", &["strategy.recompute=full", "roles.reference.strategy.offload.params=between_steps"]);
    assert_same_steps(&lasting_metrics(&plain), &lasting_metrics(&frugal));
    assert!(last_checkpoint(&plain) == last_checkpoint(&frugal), "the checkpoints differ");
    // Weights copied from the host for each block, for the reference as well.
    let streamed = run("streamed", &["strategy.offload={optimizer: cpu_step, params: cpu}"]);
    assert_same_steps(&lasting_metrics(&plain), &lasting_metrics(&streamed));
    assert!(last_checkpoint(&plain) == last_checkpoint(&streamed), "the checkpoints differ");
    let most = |run| series(run, "perf/allocated_bytes")[1];
    assert!(most(&streamed) < most(&plain), "{} of {} bytes", most(&streamed), most(&plain));
    let least = |run| series(run, "perf/generate_allocated_bytes")[1];
    assert!(least(&frugal) < least(&plain), "{} of {} bytes", least(&frugal), least(&plain));
}

#[test]
fn bf16_learns_what_fp32_learns() {
    let folder = tempfile::tempdir().unwrap();
    let run = |precision: &str| {
        let precision_set = format!("strategy.precision={precision}");
        run_tiny(&folder, precision, ONE_RANK, &[&precision_set, "pipeline.rlvr.steps=6"])
    };
    let [exact, rounded] = ["fp32", "bf16"].map(run);
    let [exact, rounded] = [exact, rounded].map(|run| series(&run, "warmup/loss")[0]);
    assert!((exact - rounded).abs() < 0.05 * exact, "warm-up losses {exact} and {rounded}");
}

/// In a run of each pipeline a norm of 0 turns clipping off: it acts like a large norm, not like a tiny one.
#[test]
fn a_norm_of_0_clips_nothing() {
    let folder = tempfile::tempdir().unwrap();
    let [refl, ..] = diffusion::METHODS;
    for pipeline in ["rlvr", "offline", "diffusion"] {
        let run = |norm: &str| {
            let name = &format!("{pipeline}-{norm}");
            let sets = [&*format!("pipeline.{pipeline}.optimizer.max_grad_norm={norm}")];
            match pipeline {
                "rlvr" => run_tiny(&folder, name, ONE_RANK, &sets),
                "offline" => offline::run(&folder, name, offline::SFT, &sets),
                _ => diffusion::run_tiny(&folder, name, refl.0, &[refl.1, &sets].concat()),
            }
        };
        let [free, wide, narrow] = ["0", "1e30", "1e-3"].map(run);
        assert_same_steps(&lasting_metrics(&free), &lasting_metrics(&wide));
        assert!(last_checkpoint(&free) == last_checkpoint(&wide), "{pipeline}: the checkpoints differ");
        let [free, narrow] = [&free, &narrow].map(|run| series(run, "grad_norm"));
        assert_ne!(free, narrow, "{pipeline}");
    }
}

/// The published configs, cut after 20 steps.
#[test]
fn one_rank_and_two_compute_the_same() {
    let folder = tempfile::tempdir().unwrap();
    let sets = ["pipeline.rlvr.steps=20", "pipeline.rlvr.evaluation.every=10"];
    let [one, two] = [ONE_RANK, TWO_RANKS].map(|config| {
        let run = folder.path().join(Path::new(config).file_stem().unwrap());
        let mut command = anyroll(["run", config]);
        for set in sets {
            command.args(["--set", set]);
        }
        command.arg("--output").arg(&run);
        succeed(command);
        run
    });
    let checked =
        ["warmup/loss", "reward/mean", "loss/policy", "entropy", "grad_norm", "eval/greedy", "eval/pass@1"];
    for name in checked {
        let [one, two] = [&one, &two].map(|run| series(run, name));
        assert!(!one.is_empty() && one.len() == two.len(), "{name}");
        for (step, (one, two)) in one.iter().zip(&two).enumerate() {
            assert!((one - two).abs() <= 1e-6, "{name} of record {step}: {one} and {two}");
        }
    }
    assert!(series(&one, "reward/mean").iter().any(|&reward| reward > 0.0), "nothing was learned");
}

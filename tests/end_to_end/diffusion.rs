//! Image models: every method learns, and gives the same numbers however it is held, stopped and resumed.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

use tempfile::TempDir;

use super::{
    assert_same, assert_same_steps, changed, fail, interrupt, last_checkpoint, lasting_metrics, resume,
    series, succeed,
};

const REFL: &str = "configs/diffusion_refl_shapes_cpu.yaml";
const FLOW_GRPO: &str = "configs/diffusion_flow_grpo_shapes_cpu.yaml";
const NFT: &str = "configs/diffusion_nft_shapes_cpu.yaml";

/// Changes that make a run of a published config take about a second.
const TINY: [&str; 12] = [
    "model.dit.hidden_size=16",
    "model.dit.intermediate_size=32",
    "strategy.micro_batch_size=4",
    "pipeline.diffusion.warmup.steps=20",
    "pipeline.diffusion.warmup.batch_size=8",
    "pipeline.diffusion.warmup.optimizer.schedule.cosine.warmup_steps=5",
    "pipeline.diffusion.sampler.steps=4",
    "pipeline.diffusion.steps=6",
    "pipeline.diffusion.prompts_per_step=4",
    "pipeline.diffusion.evaluation.every=2",
    "pipeline.diffusion.evaluation.images=32",
    "pipeline.diffusion.checkpoint.every=2",
];

/// Further changes of each method for the same size, with every feature of its step.
pub(super) const METHODS: [(&str, &[&str]); 3] = [
    (REFL, &["pipeline.diffusion.method.refl.mid_step=2", "pipeline.diffusion.prompts_per_step=8"]),
    (FLOW_GRPO, &["pipeline.diffusion.group_size=4", "pipeline.diffusion.method.flow_grpo.kl_coef=0.01"]),
    (
        NFT,
        &[
            "pipeline.diffusion.group_size=4",
            "pipeline.diffusion.method.diffusion_nft.timesteps=2",
            "pipeline.diffusion.method.diffusion_nft.kl_coef=0.01",
            "pipeline.diffusion.method.diffusion_nft.old_decay_rate=0.1",
        ],
    ),
];

pub(super) fn tiny(config: &str, run: &Path, sets: &[&str]) -> Command {
    changed(config, run, TINY.iter().chain(sets))
}

#[track_caller]
pub(super) fn run_tiny(folder: &TempDir, name: &str, config: &str, sets: &[&str]) -> PathBuf {
    let run = folder.path().join(name);
    succeed(tiny(config, &run, sets));
    run
}

#[test]
fn every_zero_stage_computes_the_same_images() {
    let folder = tempfile::tempdir().unwrap();
    for (method, (config, own)) in METHODS.into_iter().enumerate() {
        let run = |stage: usize, more: &[&str]| {
            let stage_set = format!("strategy.zero_stage={stage}");
            let sets = [own, &["devices=2", &stage_set, "pipeline.diffusion.steps=4"], more].concat();
            run_tiny(&folder, &format!("{method}-{stage}"), config, &sets)
        };
        let whole = run(0, &["strategy.offload.optimizer=none"]);
        for stage in 1..=3 {
            // Recomputation and offloading change nothing either.
            let more: &[&str] = if stage == 2 { &["strategy.recompute=full"] } else { &[] };
            let sharded = run(stage, more);
            assert_same_steps(&lasting_metrics(&whole), &lasting_metrics(&sharded));
            assert!(last_checkpoint(&whole) == last_checkpoint(&sharded), "{config}: stage {stage} differs");
        }
    }
}

#[test]
fn an_interrupted_run_of_images_goes_on_bitwise() {
    let folder = tempfile::tempdir().unwrap();
    for (method, (config, own)) in METHODS.into_iter().enumerate() {
        let sets = [own, &["pipeline.diffusion.steps=30"]].concat();
        let whole = run_tiny(&folder, &format!("{method}-whole"), config, &sets);
        let run = folder.path().join(format!("{method}-interrupted"));
        interrupt(tiny(config, &run, &sets), &run, 5);
        assert!(series(&run, "reward/mean").len() < 30, "it was not interrupted");
        succeed(resume(&run));
        assert_same(&whole, &run);
        for (a, b) in pictures(&whole).into_iter().zip(pictures(&run)) {
            assert!(fs::read(&a).unwrap() == fs::read(&b).unwrap(), "{} differs", b.display());
        }
        assert_eq!(pictures(&whole).len(), pictures(&run).len());
    }
}

#[test]
fn a_run_of_images_leaves_its_pictures_and_numbers() {
    let folder = tempfile::tempdir().unwrap();
    let run = folder.path().join("run");
    let ended = succeed(tiny(FLOW_GRPO, &run, METHODS[1].1));
    for part in ["held-out", "drift", "images/s"] {
        assert!(ended.stderr.contains(part), "no {part:?} at the end of {}", ended.stderr);
    }
    let pictures = pictures(&run);
    assert_eq!(pictures.len(), 4, "before, after two and four steps, and at the end");
    assert!(pictures.iter().all(|path| fs::read(path).unwrap().starts_with(b"\x89PNG")));
    let report = fs::read_to_string(run.join("report.html")).unwrap();
    assert_eq!(report.matches("\"png\":\"").count(), 3);
    assert_eq!(series(&run, "eval/drift")[0], 0.0);
    for name in ["eval/reward", "eval/brightness"] {
        assert_eq!(series(&run, name).len(), 4, "{name}");
    }
    for name in ["loss/kl", "ratio/mean", "grad_norm", "reward/dropped", "perf/denoising_steps_per_s"] {
        assert_eq!(series(&run, name).len(), 6, "{name}");
    }
    // Before the first update the trained policy is the one that sampled.
    assert!(series(&run, "rollout/logprob_diff_max").iter().all(|&diff| diff < 1e-4));
}

#[test]
fn every_method_and_sampler_runs() {
    let folder = tempfile::tempdir().unwrap();
    let check = |name: &str, config: &str, sets: &[&str]| {
        let run =
            run_tiny(&folder, name, config, &[METHODS[1].1, sets, &["pipeline.diffusion.steps=2"]].concat());
        assert!(series(&run, "grad_norm").iter().all(|&norm| norm > 0.0), "{name}");
    };
    let method = |yaml: &str| format!("pipeline.diffusion.method={yaml}");
    let guided = [
        "pipeline.diffusion.sampler.guidance=2.5",
        "pipeline.diffusion.sampler.shift=3",
        "pipeline.diffusion.sampler.spacing=diffusers",
        "pipeline.diffusion.warmup.class_dropout=0.2",
    ];
    check("guided", FLOW_GRPO, &guided);
    let run = |name: &str, config: &str, yaml: &str, more: &[&str]| {
        let set = method(yaml);
        let sets = [&[set.as_str()], more].concat();
        let run = folder.path().join(name);
        let base = ["pipeline.diffusion.steps=2", "pipeline.diffusion.group_size=4"];
        succeed(tiny(config, &run, &[&base[..], &sets].concat()));
        assert!(series(&run, "grad_norm").iter().all(|&norm| norm > 0.0), "{name}");
    };
    run("dance", FLOW_GRPO, "{dance_grpo: {eta: 0.5, timestep_fraction: 0.5}}", &[]);
    run("draft", REFL, "{draft_k: {k: 1}}", &guided);
    run("fixed", REFL, "{refl: {mid_step: 2, noise: fixed, kl_coef: 0.01, score_mean: 0.5}}", &guided);
}

#[test]
fn what_a_method_cannot_do_is_refused() {
    let folder = tempfile::tempdir().unwrap();
    let [refl, flow_grpo, nft] = METHODS;
    let check = |(config, own): (&str, &[&str]), set: &str, field: &str| {
        let error = fail(tiny(config, &folder.path().join("never"), &[own, &[set]].concat()));
        assert!(error.contains(field), "{error}");
    };
    check(refl, "pipeline.diffusion.reward=lit", "pipeline.diffusion.reward");
    check(refl, "pipeline.diffusion.reward=[{brightness: {}}, {lit: {}}]", "pipeline.diffusion.reward[1]");
    check(refl, "pipeline.diffusion.shuffle_rewards=true", "shuffle_rewards");
    check(flow_grpo, "pipeline.diffusion.group_size=1", "group_size");
    check(nft, "pipeline.diffusion.sampler.guidance=2", "guidance");
    check(nft, "model.dit.patch_size=3", "patch_size");
    check(nft, "pipeline.diffusion.method.diffusion_nft.timesteps=5", "timesteps");
}

fn pictures(run: &Path) -> Vec<PathBuf> {
    let mut paths: Vec<PathBuf> =
        fs::read_dir(run.join("pictures")).unwrap().map(|entry| entry.unwrap().path()).collect();
    paths.sort();
    paths
}

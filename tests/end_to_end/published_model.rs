//! RLVR on a published model's folder: a tiny random one, with its tokenizer and chat template.

use std::fmt::Write;
use std::fs;
use std::path::{Path, PathBuf};

use serde_json::Value;
use tempfile::TempDir;

use super::{anyroll, assert_same, fail, resume, series, succeed, whole_lines};

const CONFIG: &str = "configs/rlvr_math_qwen2.5_0.5b_cuda.yaml";

fn model() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../tests/golden/tiny_model")
}

/// The published config made small: on the CPU, with a reward that a random model earns now and then.
fn run(folder: &TempDir, name: &str, sets: &[&str]) -> (PathBuf, std::process::Command) {
    let data = folder.path().join("data.jsonl");
    let mut lines = String::new();
    for number in 0..400 {
        writeln!(lines, "{{\"prompt\": \"2 x {number}?\", \"answer\": {}}}", 2 * number).unwrap();
    }
    fs::write(&data, lines).unwrap();
    let run = folder.path().join(name);
    let mut command = anyroll(["run", CONFIG, "--output", run.to_str().unwrap()]);
    let paths = [
        format!("model.path={}", model().display()),
        format!("pipeline.rlvr.data.jsonl.path={}", data.display()),
    ];
    for set in paths.iter().map(String::as_str).chain(TINY).chain(sets.iter().copied()) {
        command.args(["--set", set]);
    }
    (run, command)
}

const TINY: [&str; 16] = [
    "backend=cpu",
    "devices=1",
    "threads=1",
    "strategy.precision=fp32",
    "strategy.collective_timeout_s=60",
    "pipeline.rlvr.reward=[{regex: {pattern: 'e'}}]",
    "pipeline.rlvr.steps=6",
    "pipeline.rlvr.prompts_per_step=8",
    "pipeline.rlvr.group_size=4",
    "pipeline.rlvr.rollout.max_new_tokens=12",
    "pipeline.rlvr.optimizer.adamw.learning_rate=1.0e-2",
    "pipeline.rlvr.optimizer.schedule={constant: {warmup_steps: 0}}",
    "pipeline.rlvr.evaluation.every=3",
    "pipeline.rlvr.evaluation.prompts=8",
    "pipeline.rlvr.evaluation.samples=2",
    "pipeline.rlvr.checkpoint.every=3",
];

#[test]
fn a_folder_trains_and_resumes_to_the_bit() {
    let folder = tempfile::tempdir().unwrap();
    let (whole, command) = run(&folder, "whole", &[]);
    succeed(command);
    assert_eq!(series(&whole, "reward/mean").len(), 6);
    assert!(series(&whole, "grad_norm").iter().any(|&norm| norm > 0.0), "nothing was learnt");
    assert!(series(&whole, "rollout/logprob_diff_max").iter().all(|&difference| difference < 1e-3));
    for line in whole_lines(&whole.join("samples.jsonl")) {
        let sample: Value = serde_json::from_str(&line).unwrap();
        assert!(!sample["completion"].as_str().unwrap().contains("<|im_end|>"), "{sample}");
    }

    let (part, command) = run(&folder, "part", &[]);
    succeed(command);
    fs::remove_dir_all(part.join("checkpoints/step_000006")).unwrap();
    succeed(resume(&part));
    assert_same(&whole, &part);
}

/// Each rank reads its own shard of the folder, so the losses say whether it was the right one.
#[test]
fn two_ranks_at_stage_3_start_from_the_same_weights() {
    let folder = tempfile::tempdir().unwrap();
    let first = |name: &str, sets: &[&str]| {
        let (run, command) = run(&folder, name, sets);
        succeed(command);
        (series(&run, "eval/greedy")[0], series(&run, "reward/mean")[0], series(&run, "grad_norm")[0])
    };
    let one = first("one", &["pipeline.rlvr.steps=1"]);
    let two = first("two", &["pipeline.rlvr.steps=1", "devices=2", "strategy.zero_stage=3"]);
    assert_eq!((one.0, one.1), (two.0, two.1), "sampled completions");
    assert!((one.2 - two.2).abs() < 1e-4 * one.2, "{} is not {}", one.2, two.2);
}

#[test]
fn a_folder_that_does_not_fit_is_refused_before_anything_starts() {
    let folder = tempfile::tempdir().unwrap();
    let check = |sets: &[&str], expected: &[&str]| {
        let (run, command) = run(&folder, "run", sets);
        let error = fail(command);
        assert!(expected.iter().all(|words| error.contains(words)), "{error} has not {expected:?}");
        assert!(!run.exists());
    };
    let none = format!("model.path={}", folder.path().join("none").display());
    check(&[&none], &["model.path", "cannot read", "none/config.json"]);
    let long = "pipeline.rlvr.rollout.max_new_tokens=2040";
    check(&[long], &["model.path", "the longest prompt is", "it exceeds 2048"]);
    check(&["model.decoder={hidden_size: 8}"], &["model.decoder"]);
}

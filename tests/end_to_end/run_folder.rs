//! Contents of a run's folder.

use std::fs;
use std::io::{self, Write};
use std::path::Path;
use std::process::Command;

use nix::sys::signal::{Signal, kill};
use serde_json::Value;

use super::{
    ONE_RANK, Process, TWO_RANKS, anyroll, assert_same, checkpoints, fail, metrics, processes_of, resume,
    run_tiny, succeed, tiny, wait_for_steps, whole_lines,
};

#[test]
fn a_run_leaves_all_of_it_in_its_folder() {
    let folder = tempfile::tempdir().unwrap();
    let run = folder.path().join("run");
    let ended = succeed(tiny(ONE_RANK, &run, &["name=a-tiny-run"]));
    for part in ["pass@1", run.to_str().unwrap(), "report.html"] {
        assert!(ended.stderr.contains(part), "no {part:?} at the end of {}", ended.stderr);
    }
    check_configs(&run);
    check_metrics(&run);
    check_samples(&run);
    check_report(&run);
    check_tensorboard(&run);
    assert_eq!(checkpoints(&run), ["step_000008", "step_000012"]);
}

/// A timeline in Chrome's format has the recorded steps, their phases and libtorch's operations, and changes no metric.
#[test]
fn a_profile_is_a_timeline_of_some_steps() {
    let folder = tempfile::tempdir().unwrap();
    let sets = ["pipeline.rlvr.steps=6"];
    let plain = run_tiny(&folder, "plain", TWO_RANKS, &sets);
    let run = folder.path().join("run");
    let mut command = tiny(TWO_RANKS, &run, &sets);
    command.args(["--profile", "2"]);
    let ended = succeed(command);
    assert!(ended.stderr.contains("profile/steps_3_to_4_rank_0.json"), "{}", ended.stderr);
    assert_same(&plain, &run);
    let files: Vec<_> = fs::read_dir(run.join("profile")).unwrap().map(|it| it.unwrap().path()).collect();
    assert_eq!(files.len(), 2, "a file for each rank: {files:?}");
    for file in files {
        let trace: Value = serde_json::from_slice(&fs::read(&file).unwrap()).unwrap();
        let events = trace["traceEvents"].as_array().unwrap();
        let count = |name: &str| events.iter().filter(|event| event["name"] == name).count();
        assert_eq!([2, 3, 4, 5].map(|step| count(&format!("step {step}"))), [0, 1, 1, 0], "{file:?}");
        for name in ["gather weights", "rollout", "score", "prepare", "update"] {
            assert_eq!(count(name), 2, "{name} in {file:?}");
        }
        for name in ["prefill", "forward 1", "backward 1", "optimizer", "aten::mm"] {
            assert!(count(name) > 0, "{name} in {file:?}");
        }
    }
    let mut again = resume(&run);
    again.args(["--profile", "1"]);
    assert!(succeed(again).stderr.contains("no step is left to record"));
}

#[test]
fn a_folder_that_holds_a_run_is_refused() {
    let folder = tempfile::tempdir().unwrap();
    let run = run_tiny(&folder, "run", ONE_RANK, &["pipeline.rlvr.steps=3"]);
    let before = whole_lines(&run.join("metrics.jsonl"));
    let error = fail(tiny(ONE_RANK, &run, &[]));
    assert!(error.contains(run.to_str().unwrap()) && error.contains("already"), "{error}");
    assert_eq!(whole_lines(&run.join("metrics.jsonl")), before);
}

fn check_configs(run: &Path) {
    let root = Path::new(env!("CARGO_MANIFEST_DIR")).parent().unwrap();
    let as_written = fs::read_to_string(root.join(ONE_RANK)).unwrap();
    assert_eq!(fs::read_to_string(run.join("config.yaml")).unwrap(), as_written);

    let path = run.join("resolved.yaml");
    let resolved = fs::read_to_string(&path).unwrap();
    assert!(resolved.contains("name: a-tiny-run") && resolved.contains("steps: 12"), "{resolved}");
    let checked = succeed(anyroll(["check", path.to_str().unwrap()])).stdout;
    assert!(checked.starts_with(&resolved), "{checked}\nis not\n{resolved}");
}

fn check_metrics(run: &Path) {
    let steps = metrics(run);
    let numbers: Vec<u64> = steps.iter().map(|step| step["step"].as_u64().unwrap()).collect();
    assert!(numbers.iter().copied().eq(0..=12), "{numbers:?}");
    let has = |step: &serde_json::Map<String, Value>, name: &str| step.get(name).is_some_and(Value::is_f64);
    for step in &steps[1..] {
        // The host has no device's memory to tell apart, but processes.
        let resident = step["perf/resident_bytes"].as_f64().unwrap();
        assert!((1e7..1e11).contains(&resident), "{resident}");
        assert!(step.keys().all(|name| !name.starts_with("perf/device_")), "{step:?}");
    }
    for (number, step) in steps.iter().enumerate() {
        for name in ["reward/mean", "loss/policy", "grad_norm", "time/step_s"] {
            assert_eq!(has(step, name), number > 0, "{name} of step {number}");
        }
        for name in ["eval/greedy", "eval/pass@1", "eval/pass@4", "time/eval_s"] {
            assert_eq!(has(step, name), number % 4 == 0, "{name} of step {number}");
        }
    }
    assert!(has(&steps[0], "warmup/loss"));
}

fn check_samples(run: &Path) {
    let lines = whole_lines(&run.join("samples.jsonl"));
    let samples: Vec<Value> = lines.iter().map(|line| serde_json::from_str(line).unwrap()).collect();
    let evaluations = |phase: &str| {
        let mut steps: Vec<u64> = samples
            .iter()
            .filter(|sample| sample["phase"] == phase)
            .map(|sample| sample["step"].as_u64().unwrap())
            .collect();
        steps.dedup();
        steps
    };
    let found = ["before", "eval", "after"].map(evaluations);
    assert_eq!(found, [vec![0], vec![4, 8], vec![12]]);
    for sample in &samples {
        let text = |name: &str| sample[name].as_str().unwrap();
        let mut digits: Vec<char> = text("prompt").trim_end_matches('>').chars().collect();
        digits.sort_unstable();
        assert_eq!(text("answer"), digits.iter().collect::<String>());
        let right = text("completion") == text("answer");
        assert!(right || sample["reward"] == 0.0, "{sample}");
    }
}

/// Checks that the report is a single file, which can be mailed or archived.
fn check_report(run: &Path) {
    let page = fs::read_to_string(run.join("report.html")).unwrap();
    assert!(page.contains("a-tiny-run") && page.contains("</html>"));
    // `watch` opens it in a browser, where nothing else is asked for.
    assert!(page.contains("default-src 'none'") && page.contains("connect-src 'none'"));
    let answer = whole_lines(&run.join("samples.jsonl"));
    let answer: Value = serde_json::from_str(answer.last().unwrap()).unwrap();
    assert!(page.contains(answer["answer"].as_str().unwrap()), "the report shows no sample");
}

/// Reads the events with TensorBoard itself, if it is installed.
fn check_tensorboard(run: &Path) {
    let found = Command::new("python3").args(["-c", "import tensorboard"]).output();
    if !found.is_ok_and(|output| output.status.success()) {
        // Not with eprintln, which the test harness would hide.
        let words = "SKIPPED: the TensorBoard events of a run were not read: python3 has no tensorboard\n";
        io::stderr().write_all(words.as_bytes()).unwrap();
        return;
    }
    let script = concat!(env!("CARGO_MANIFEST_DIR"), "/../tests/python/read_tensorboard.py");
    let mut command = Command::new("python3");
    command.arg(script).arg(run.join("tensorboard"));
    let read: Value = serde_json::from_str(&succeed(command).stdout).unwrap();
    for step in metrics(run) {
        for (name, value) in step.iter().filter(|(name, _)| *name != "step") {
            let points = read["scalars"][name].as_array().unwrap_or_else(|| panic!("no {name}"));
            let point = points.iter().find(|point| point[0] == step["step"]);
            let read = point.unwrap_or_else(|| panic!("no step {} of {name}", step["step"]))[1].as_f64();
            let written = value.as_f64().unwrap() as f32;
            assert_eq!(read, Some(f64::from(written)), "{name} of step {}", step["step"]);
        }
    }
}

#[test]
fn the_best_policy_is_kept_beside_the_last_ones() {
    let folder = tempfile::tempdir().unwrap();
    let sets = [
        "pipeline.rlvr.checkpoint.keep_best=true",
        "pipeline.rlvr.checkpoint.every=2",
        "pipeline.rlvr.checkpoint.keep_last=20",
        "pipeline.rlvr.evaluation.every=2",
    ];
    let run = run_tiny(&folder, "run", ONE_RANK, &sets);
    let scores: Vec<(u64, f64)> = metrics(&run)
        .iter()
        .filter_map(|step| Some((step["step"].as_u64()?, step.get("eval/greedy")?.as_f64()?)))
        .collect();
    assert!(scores.len() == 7, "{scores:?}");
    let best = scores.iter().map(|(_, score)| *score).fold(f64::MIN, f64::max);
    let first = scores.iter().find(|(_, score)| *score == best).unwrap().0;

    let manifest: Value = serde_json::from_slice(&fs::read(run.join("best/manifest.json")).unwrap()).unwrap();
    let extra = &manifest["extra"];
    assert_eq!((extra["best"].as_f64(), extra["steps"].as_u64()), (Some(best), Some(first)), "{scores:?}");
    if first > 0 {
        // The policy of exactly that step.
        let shard = |path: String| fs::read(run.join(path).join("rank_0000.bin")).unwrap();
        let kept = shard("best".into());
        assert!(kept == shard(format!("checkpoints/step_{first:06}")));
        let other = if first == 12 { 10 } else { 12 };
        assert!(kept != shard(format!("checkpoints/step_{other:06}")));
    }
    // It works like any other model.
    let path = run.join("best");
    let prompt = ["--prompt", "312>", "--temperature", "0", "--max-new-tokens", "4"];
    let command = anyroll(["generate", path.to_str().unwrap()].into_iter().chain(prompt));
    assert!(!succeed(command).stdout.is_empty());
    let to = folder.path().join("elsewhere");
    succeed(anyroll(["export", path.to_str().unwrap(), "--to", to.to_str().unwrap()]));
    assert!(to.join("model.safetensors").is_file());
}

#[test]
fn a_second_process_on_a_run_is_told_and_does_no_harm() {
    let folder = tempfile::tempdir().unwrap();
    let run = folder.path().join("run");
    let sets =
        ["pipeline.rlvr.steps=60", "pipeline.rlvr.checkpoint.every=5", "pipeline.rlvr.evaluation.every=60"];
    let whole = run_tiny(&folder, "whole", ONE_RANK, &sets);
    let process = Process::start(tiny(ONE_RANK, &run, &sets));
    wait_for_steps(&run, 10);
    // Stopped, so that it does not end before the other run has looked.
    let processes = processes_of(&run);
    let send = |signal| processes.iter().for_each(|&pid| kill(pid, signal).unwrap());
    send(Signal::SIGSTOP);
    assert!(metrics(&run).len() < 61, "it had ended already");
    let error = fail(resume(&run));
    assert!(error.contains(run.to_str().unwrap()) && error.contains("another process"), "{error}");
    send(Signal::SIGCONT);
    assert_eq!(process.finish().code, Some(0));
    assert_same(&whole, &run);
    // Its lock ended with it.
    succeed(resume(&run));
}

//! A rank that dies, stalls or fails ends the job within seconds, is named, and leaves no process behind.

use std::ffi::OsStr;
use std::fs;
use std::os::unix::ffi::OsStrExt;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::{Duration, Instant};

use nix::sys::signal::{Signal, kill};
use tempfile::TempDir;

use super::{
    Ended, ONE_RANK, Process, TWO_RANKS, anyroll, assert_nothing_left, assert_same, checkpoints, fail,
    finish, rank_of, resume, run_tiny, succeed, tiny, wait_for_steps, wait_until,
};

/// Maximum time from the failure to the end of the job.
const MOST: Duration = Duration::from_secs(10);

/// Starts a job of two ranks that does not end by itself, and waits until it is training.
fn start_endless(folder: &TempDir) -> (Process, PathBuf) {
    let run = folder.path().join("run");
    let sets = ["pipeline.rlvr.steps=1000000", "strategy.collective_timeout_s=2"];
    let process = Process::start(tiny(TWO_RANKS, &run, &sets));
    wait_for_steps(&run, 3);
    (process, run)
}

/// Sends a signal to rank 1, and waits for the end of the job.
fn signal_rank_1(signal: Signal) -> Ended {
    let folder = tempfile::tempdir().unwrap();
    let (process, run) = start_endless(&folder);
    kill(rank_of(&run, 1), signal).unwrap();
    let sent = Instant::now();
    let ended = process.finish();
    assert!(sent.elapsed() < MOST, "the job took {:?} to end: {ended:#?}", sent.elapsed());
    assert_nothing_left(&run);
    ended
}

#[test]
fn a_rank_that_is_killed_is_named() {
    let ended = signal_rank_1(Signal::SIGKILL);
    assert_eq!(ended.error(), "error: rank 1 was killed by signal 9 (SIGKILL)");
}

#[test]
fn a_rank_that_stalls_is_named_with_what_was_waited_for() {
    let ended = signal_rank_1(Signal::SIGSTOP);
    let error = ended.error();
    for words in ["rank 1 stalled", "rank 0 failed", "did not finish within 2s"] {
        assert!(error.contains(words), "no {words:?} in {error}");
    }
    // The flight recorder: an operation that completed, and one that never did.
    let report = &ended.stderr[ended.stderr.find(error).unwrap()..];
    assert!(report.contains(": done, enqueued") && report.contains(": started, enqueued"), "{report}");
}

#[test]
fn a_rank_that_fails_by_itself_is_named_with_its_reason() {
    let folder = tempfile::tempdir().unwrap();
    let run = run_tiny(&folder, "run", TWO_RANKS, &[]);
    fs::write(run.join("metrics.jsonl"), "{\"step\":0}\nnot a record\n").unwrap();
    // Rank 1 waits for rank 0 meanwhile, up to a minute.
    let ended = finish(resume(&run));
    let error = ended.error();
    assert!(
        error.starts_with("error: rank 0 failed: ") && error.contains("metrics.jsonl, line 2"),
        "{error}"
    );
    assert!(ended.took < 2 * MOST, "{:?}", ended.took);
    assert_nothing_left(&run);
}

/// The message names the failed step and a fix; the ranks agree.
#[test]
fn training_that_leads_nowhere_is_an_error() {
    let folder = tempfile::tempdir().unwrap();
    let rate = "optimizer.adamw.learning_rate=1e30";
    let check = |name: &str, sets: &[&str], words: &[&str]| {
        let run = folder.path().join(name);
        let ended = finish(tiny(TWO_RANKS, &run, sets));
        ended.error();
        assert!(words.iter().all(|word| ended.stderr.contains(word)), "{name}: {ended:#?}");
        run
    };
    let policy = format!("pipeline.rlvr.{rate}");
    let constant = "pipeline.rlvr.optimizer.schedule={constant: {}}";
    // Two updates per step: the first makes the weights too large, the second fails.
    let words =
        ["optimizer step 2: the gradient norm is NaN", "help: a lower `optimizer.adamw.learning_rate`"];
    check("fp32", &[&policy, constant], &words);
    // The very last update: no later one shows its effect.
    let last =
        ["pipeline.rlvr.steps=1", "pipeline.rlvr.mini_batches=1", "pipeline.rlvr.evaluation.prompts=4"];
    let words = ["of the trained weights are infinite or NaN", "help: a lower"];
    let too_far = "pipeline.rlvr.optimizer.adamw.learning_rate=1e39";
    check("last", &[&last[..], &[too_far, constant]].concat(), &words);
    // In fp16, steps are skipped as long as a smaller loss scale may help.
    let fp16 = ["strategy.precision=fp16", "pipeline.rlvr.steps=3", constant];
    let run = check("fp16", &[&fp16[..], &[&policy]].concat(), &words);
    assert!(run.join("report.html").exists(), "results so far are kept");
    // The same in a warm-up.
    let warm_up = format!("pipeline.rlvr.warmup.{rate}");
    let short = ["strategy.precision=fp16", "pipeline.rlvr.warmup.steps=6", &warm_up];
    let run = check("warm-up", &short, &words);
    assert!(!run.join("report.html").exists(), "nothing follows it");
}

#[test]
fn odd_folders_are_refused() {
    let folder = tempfile::tempdir().unwrap();
    let name = OsStr::from_bytes(b"caf\xe9");
    let mut command = anyroll(["run", ONE_RANK, "--output"]);
    command.arg(folder.path().join(name));
    let error = fail(command);
    assert!(error.contains("is not valid UTF-8: give another name as `--output`"), "{error}");
    assert!(!folder.path().join(name).exists());

    // Removed by the shell that stands in it.
    let removed = folder.path().join("removed");
    let script = format!("mkdir {0:?} && cd {0:?} && rmdir {0:?} && exec \"$@\"", removed.display());
    let mut shell = Command::new("sh");
    shell.args(["-c", &script, "sh", super::ANYROLL, "doctor"]);
    let error = fail(shell);
    assert!(error.contains("the current folder cannot be used"), "{error}");
}

#[test]
fn a_folder_that_cannot_be_made_is_told_before_any_rank_starts() {
    let folder = tempfile::tempdir().unwrap();
    let file = folder.path().join("file");
    fs::write(&file, "").unwrap();
    let check = |run: &Path| {
        let error = fail(tiny(ONE_RANK, run, &[]));
        assert!(error.contains(run.to_str().unwrap()) && !error.contains("rank"), "{error}");
    };
    check(&file);
    check(&file.join("run"));
}

/// A reward that hangs, with processes of its own, as long as the file HANG exists.
const HANGING: &str = r#"
import os, subprocess, time

def exact(completions, answer, finished):
    while os.path.exists("HANG"):
        for new in (False, True):
            started = subprocess.Popen(["sleep", "97"], start_new_session=new).pid
            with open("PIDS", "a") as file:
                print(os.getpid(), started, file=file)
        time.sleep(97)
    return [float(a == b and end) for a, b, end in zip(completions, answer, finished)]
"#;

/// A job of two ranks, whose reward hangs after some steps.
struct Hanging {
    folder: TempDir,
    process: Process,
    run: PathBuf,
}

impl Hanging {
    fn sets(folder: &TempDir) -> Vec<String> {
        let [rewards, hang, pids] = ["rewards.py", "hang", "pids"].map(|name| folder.path().join(name));
        let text = HANGING.replace("HANG", hang.to_str().unwrap()).replace("PIDS", pids.to_str().unwrap());
        fs::write(&rewards, text).unwrap();
        let fields = format!("path: \"{}\", function: exact, timeout_s: 90", rewards.display());
        let reward = format!("pipeline.rlvr.reward=[{{python: {{{fields}}}}}]");
        vec![reward, "pipeline.rlvr.steps=30".into(), "pipeline.rlvr.evaluation.every=100".into()]
    }

    fn start() -> Self {
        let folder = tempfile::tempdir().unwrap();
        let run = folder.path().join("run");
        let sets = Self::sets(&folder);
        let process =
            Process::start(tiny(TWO_RANKS, &run, &sets.iter().map(String::as_str).collect::<Vec<_>>()));
        wait_for_steps(&run, 3);
        fs::write(folder.path().join("hang"), "").unwrap();
        let hanging = Self { folder, process, run };
        wait_until("the reward hangs", || hanging.started().len() >= 4);
        hanging
    }

    /// Returns the workers, and what they have started.
    fn started(&self) -> Vec<String> {
        let pids = fs::read_to_string(self.folder.path().join("pids")).unwrap_or_default();
        pids.split_whitespace().map(str::to_owned).collect()
    }

    /// Waits for the end, after which nothing of the reward is left.
    fn finish(self, sent: Instant) -> (Ended, TempDir, PathBuf) {
        let started = self.started();
        let ended = self.process.finish();
        assert!(sent.elapsed() < MOST, "the job took {:?} to end: {ended:#?}", sent.elapsed());
        wait_until("all has ended", || started.iter().all(|pid| !Path::new("/proc").join(pid).exists()));
        assert_nothing_left(&self.run);
        (ended, self.folder, self.run)
    }
}

#[test]
fn a_signal_ends_a_run_whose_reward_hangs_and_it_goes_on() {
    for signal in [Signal::SIGINT, Signal::SIGTERM] {
        let hanging = Hanging::start();
        hanging.process.send(signal);
        let (ended, folder, run) = hanging.finish(Instant::now());
        assert_eq!(ended.code, Some(130), "{ended:#?}");
        assert_eq!(checkpoints(&run).len(), 1, "{ended:#?}");
        fs::remove_file(folder.path().join("hang")).unwrap();
        succeed(resume(&run));
        let sets = Hanging::sets(&folder);
        let whole =
            run_tiny(&folder, "whole", TWO_RANKS, &sets.iter().map(String::as_str).collect::<Vec<_>>());
        assert_same(&whole, &run);
    }
}

#[test]
fn a_rank_that_is_killed_takes_its_hanging_reward_along() {
    let hanging = Hanging::start();
    kill(rank_of(&hanging.run, 1), Signal::SIGKILL).unwrap();
    let (ended, ..) = hanging.finish(Instant::now());
    assert_eq!(ended.error(), "error: rank 1 was killed by signal 9 (SIGKILL)");
}

/// A run that fails before its first step does not occupy its folder; one with steps does.
#[test]
fn the_folder_of_a_run_without_a_step_is_used_again() {
    let folder = tempfile::tempdir().unwrap();
    let (run, file) = (folder.path().join("run"), folder.path().join("reward.py"));
    let reward = format!("pipeline.rlvr.reward=[{{python: {{path: {}, function: f}}}}]", file.display());
    let start = || tiny(ONE_RANK, &run, &[&reward, "pipeline.rlvr.steps=4"]);
    fs::write(&file, "def f(completions):\n    return [float(len(completions[7]))]\n").unwrap();
    let error = fail(start());
    assert!(error.contains("list index out of range"), "{error}");
    assert!(run.join("resolved.yaml").exists() && checkpoints(&run).is_empty());
    fs::write(&file, "def f(completions):\n    return [float(len(completions[0]))]\n").unwrap();
    succeed(start());
    let error = fail(start());
    assert!(error.contains("already holds a run"), "{error}");
}

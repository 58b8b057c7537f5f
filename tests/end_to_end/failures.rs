//! A rank that dies, stalls or fails ends the job within seconds, is named, and leaves no process behind.

use std::fs;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use nix::sys::signal::{Signal, kill};
use tempfile::TempDir;

use super::{
    Ended, ONE_RANK, Process, TWO_RANKS, assert_nothing_left, fail, finish, rank_of, resume, run_tiny, tiny,
    wait_for_steps,
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

//! A failed run that starts its ranks again, and a run that a launcher starts again.

use std::{fs, path::Path, process::Command};

use nix::sys::signal::{Signal, kill};

use super::{
    ONE_RANK, Process, TWO_RANKS, assert_nothing_left, assert_same, fail, finish, interrupt,
    other_launchers::{as_rank, free_port},
    rank_of, run_tiny, starts, succeed, tiny, wait_for_steps, wait_until,
};

fn with_restarts(mut command: Command, most: &str) -> Command {
    command.args(["--restarts", most]);
    command
}

fn again(config: &str, run: &Path, sets: &[&str]) -> Command {
    let mut command = tiny(config, run, sets);
    command.arg("--auto-resume");
    command
}

#[test]
fn a_run_whose_rank_is_killed_ends_with_the_metrics_of_one_that_was_not() {
    let folder = tempfile::tempdir().unwrap();
    let sets = ["pipeline.rlvr.steps=24", "strategy.zero_stage=3"];
    let whole = run_tiny(&folder, "whole", TWO_RANKS, &sets);
    let run = folder.path().join("run");
    let process = Process::start(with_restarts(tiny(TWO_RANKS, &run, &sets), "3"));
    // Before the first checkpoint, and after it.
    for (start, steps) in [(1, 2), (2, 7)] {
        wait_until("the ranks have started", || starts(&run) == start);
        wait_for_steps(&run, steps);
        kill(rank_of(&run, start % 2), Signal::SIGKILL).unwrap();
    }
    let ended = process.finish();
    assert_eq!(ended.code, Some(0), "{ended:#?}");
    for words in [
        "rank 1 was killed by signal 9 (SIGKILL); restart 1 of 3, from the beginning",
        "restart 2 of 3, from checkpoint step_000004",
    ] {
        assert!(ended.stderr.contains(words), "no {words:?} in {ended:#?}");
    }
    assert_eq!(starts(&run), 3);
    assert_same(&whole, &run);
    assert_nothing_left(&run);
}

#[test]
fn a_failure_that_comes_again_ends_the_run() {
    let folder = tempfile::tempdir().unwrap();
    let run = folder.path().join("run");
    let sets = [
        "pipeline.rlvr.optimizer.adamw.learning_rate=1e30",
        "pipeline.rlvr.optimizer.schedule={constant: {}}",
    ];
    let ended = finish(with_restarts(tiny(TWO_RANKS, &run, &sets), "5"));
    assert!(ended.error().contains("the gradient norm is NaN"), "{ended:#?}");
    assert!(ended.stderr.contains("no restart: the ranks failed in the same way before, "), "{ended:#?}");
    assert_eq!(starts(&run), 2);
}

#[test]
fn restarts_have_an_end() {
    let folder = tempfile::tempdir().unwrap();
    let (run, file) = (folder.path().join("run"), folder.path().join("reward.py"));
    fs::write(&file, "import time\ndef f(completions):\n    raise ValueError(str(time.time_ns()))\n")
        .unwrap();
    let reward = format!("pipeline.rlvr.reward=[{{python: {{path: {}, function: f}}}}]", file.display());
    let ended = finish(with_restarts(tiny(ONE_RANK, &run, &[&reward]), "2"));
    assert!(ended.error().contains("ValueError"), "{ended:#?}");
    assert!(
        ended.stderr.contains("restart 2 of 2") && ended.stderr.contains("no restart: 2 were made"),
        "{ended:#?}"
    );
}

#[test]
fn ctrl_c_ends_a_restarted_run() {
    let folder = tempfile::tempdir().unwrap();
    let run = folder.path().join("run");
    let process = Process::start(with_restarts(tiny(TWO_RANKS, &run, &["pipeline.rlvr.steps=1000000"]), "1"));
    wait_for_steps(&run, 5);
    kill(rank_of(&run, 1), Signal::SIGKILL).unwrap();
    wait_until("the ranks have started again", || starts(&run) == 2);
    wait_for_steps(&run, 8);
    process.send(Signal::SIGINT);
    let ended = process.finish();
    assert_eq!(ended.code, Some(130), "{ended:#?}");
    assert_nothing_left(&run);
}

#[test]
fn one_command_begins_a_run_and_continues_it() {
    let folder = tempfile::tempdir().unwrap();
    let whole = run_tiny(&folder, "whole", TWO_RANKS, &[]);
    let run = folder.path().join("run");
    interrupt(again(TWO_RANKS, &run, &[]), &run, 5);
    let error = fail(again(TWO_RANKS, &run, &["seed=1"]));
    assert!(error.contains("holds a run with `seed: 0` where this one has `seed: 1`"), "{error}");
    succeed(again(TWO_RANKS, &run, &[]));
    assert_same(&whole, &run);
    // A job that is started once more has nothing to do.
    let before = fs::read(run.join("metrics.jsonl")).unwrap();
    succeed(again(TWO_RANKS, &run, &[]));
    assert_eq!(fs::read(run.join("metrics.jsonl")).unwrap(), before);
}

#[test]
fn another_launcher_starts_a_run_again() {
    let folder = tempfile::tempdir().unwrap();
    let sets = ["pipeline.rlvr.steps=16", "strategy.collective_timeout_s=5"];
    let whole = run_tiny(&folder, "whole", TWO_RANKS, &sets);
    let run = folder.path().join("run");
    let start = || {
        let port = free_port();
        [0, 1].map(|rank| Process::start(as_rank(again(TWO_RANKS, &run, &sets), rank, port)))
    };
    let ranks = start();
    wait_for_steps(&run, 6);
    ranks[1].send(Signal::SIGKILL);
    for ended in ranks.map(Process::finish) {
        assert_ne!(ended.code, Some(0), "{ended:#?}");
    }
    for ended in start().map(Process::finish) {
        assert_eq!(ended.code, Some(0), "{ended:#?}");
    }
    assert_same(&whole, &run);

    let error = fail(with_restarts(as_rank(tiny(TWO_RANKS, &run, &[]), 0, free_port()), "1"));
    assert!(error.contains("--restarts is for ranks that anyroll starts"), "{error}");
}

//! Supervisors of several hosts, which agree on attempts.

use std::path::Path;
use std::process::Command;
use std::time::{Duration, Instant};

use nix::sys::signal::{Signal, kill};

use super::super::{
    Ended, Process, TWO_RANKS, assert_nothing_left, assert_same, checkpoints, fail, processes_of, rank_of,
    run_tiny, starts, tiny, wait_for_steps, wait_until,
};
use super::{ENDLESS, Network};

/// Most time from a failure to the end of the job, apart from waits that the job is asked for.
const MOST: Duration = Duration::from_secs(30);

/// A supervisor of hosts of one rank each, two unless `more` has their number.
pub(super) fn command(host: &str, run: &Path, sets: &[&str], more: &[&str]) -> Command {
    let mut command = tiny(TWO_RANKS, run, &[&["devices=1"], sets].concat());
    command.args(["--node-rank", index_of(host), "--master-addr", "10.77.0.1"]).args(more);
    if !more.contains(&"--nnodes") {
        command.args(["--nnodes", "2"]);
    }
    command
}

fn index_of(host: &str) -> &'static str {
    match host {
        "a" => "0",
        "b" => "1",
        _ => "2",
    }
}

pub(super) fn supervisor(network: &Network, host: &str, run: &Path, sets: &[&str], more: &[&str]) -> Process {
    Process::start(network.on(host, &command(host, run, sets, more)))
}

fn both(network: &Network, run: &Path, sets: &[&str], more: &[&str]) -> [Process; 2] {
    ["a", "b"].map(|host| supervisor(network, host, run, sets, more))
}

#[track_caller]
pub(super) fn assert_words(ended: &Ended, words: &[&str]) {
    for words in words {
        assert!(ended.stderr.contains(words), "no {words:?} in {ended:#?}");
    }
}

/// A rank is killed, then a supervisor, which is started again: as a host that crashed.
#[test]
fn all_hosts_start_again_after_a_failure_on_one() {
    let Some(network) = Network::of(&["a", "b"]) else { return };
    let folder = tempfile::tempdir().unwrap();
    let sets = ["pipeline.rlvr.steps=40", "strategy.zero_stage=3"];
    let whole = run_tiny(&folder, "whole", TWO_RANKS, &sets);
    let run = folder.path().join("run");
    let more = ["--restarts", "3", "--auto-resume"];
    let [a, b] = both(&network, &run, &sets, &more);
    wait_for_steps(&run, 6);
    kill(rank_of(&run, 1), Signal::SIGKILL).unwrap();
    wait_until("the ranks have started again", || starts(&run) == 2);
    wait_for_steps(&run, 12);
    b.send(Signal::SIGKILL);
    drop(b);
    let b = supervisor(&network, "b", &run, &sets, &more);
    let [a, b] = [a, b].map(Process::finish);
    assert_eq!((a.code, b.code), (Some(0), Some(0)), "{a:#?} {b:#?}");
    assert_words(
        &a,
        &[
            "host 1 (b): rank 1 was killed by signal 9 (SIGKILL); restart 1 of 3, from checkpoint step_",
            "host 1 (b): it is gone: its connection was closed; restart 2 of 3, from checkpoint step_",
        ],
    );
    assert_eq!(starts(&run), 3);
    assert_same(&whole, &run);
    assert_nothing_left(&run);
}

#[test]
fn a_failure_that_comes_again_ends_the_run_on_all_hosts() {
    let Some(network) = Network::of(&["a", "b"]) else { return };
    let folder = tempfile::tempdir().unwrap();
    let run = folder.path().join("run");
    let sets = [
        "pipeline.rlvr.optimizer.adamw.learning_rate=1e30",
        "pipeline.rlvr.optimizer.schedule={constant: {}}",
    ];
    let [a, b] = both(&network, &run, &sets, &["--restarts", "5"]).map(Process::finish);
    for ended in [&a, &b] {
        assert!(
            ended.error().contains("the gradient norm is NaN") && ended.error().contains("): rank "),
            "{ended:#?}"
        );
    }
    assert_words(&a, &["no restart: the ranks failed in the same way before, "]);
    assert_eq!(starts(&run), 2);
}

#[test]
fn a_host_that_is_gone_ends_the_run_by_its_name() {
    let Some(network) = Network::of(&["a", "b"]) else { return };
    let folder = tempfile::tempdir().unwrap();
    for (gone, words) in [
        ("b", "host 1 (b) did not come within 3s"),
        ("a", "host 0 was not found at 10.77.0.1:29500 within 3s"),
    ] {
        let run = folder.path().join(gone);
        let [a, b] = both(&network, &run, &ENDLESS, &["--restarts", "3", "--join-timeout", "3"]);
        wait_for_steps(&run, 2);
        let (gone, left) = if gone == "a" { (a, b) } else { (b, a) };
        gone.send(Signal::SIGKILL);
        let killed = Instant::now();
        let ended = left.finish();
        assert!(killed.elapsed() < MOST, "it took {:?}", killed.elapsed());
        assert!(ended.error().contains(words), "{ended:#?}");
        drop(gone);
        assert_nothing_left(&run);
    }
}

#[test]
fn a_signal_on_one_host_saves_and_ends_all() {
    let Some(network) = Network::of(&["a", "b"]) else { return };
    let folder = tempfile::tempdir().unwrap();
    let run = folder.path().join("run");
    let sets = [&ENDLESS[..], &["pipeline.rlvr.checkpoint.every=1000000"]].concat();
    let [a, b] = both(&network, &run, &sets, &[]);
    wait_for_steps(&run, 3);
    b.send(Signal::SIGTERM);
    for ended in [a, b].map(Process::finish) {
        assert_eq!(ended.code, Some(130), "{ended:#?}");
    }
    assert_eq!(checkpoints(&run).len(), 1);
    assert_nothing_left(&run);
}

#[test]
fn hosts_that_do_not_fit_are_refused() {
    let Some(network) = Network::of(&["a", "b"]) else { return };
    let folder = tempfile::tempdir().unwrap();
    let run = folder.path().join("run");
    let waiting = supervisor(&network, "a", &run, &[], &["--master-port", "29501"]);
    let check = |sets: &[&str], more: &[&str], words: &str| {
        let ended =
            supervisor(&network, "b", &run, sets, &[&["--master-port", "29501"], more].concat()).finish();
        let words = format!("host 0 at 10.77.0.1:29501 refuses this host: its {words}");
        assert!(ended.error().contains(&words), "no {words:?} in {ended:#?}");
    };
    check(&[], &["--nnodes", "4"], "--nnodes is 4, and that of host 0 is 2");
    check(&["devices=2"], &[], "number of ranks, from `devices`, is 2, and that of host 0 is 1");
    assert!(processes_of(&run).len() == 1);
    waiting.send(Signal::SIGINT);
    assert_eq!(waiting.finish().code, Some(130));

    let error = fail(command("b", &run, &[], &["--nnodes", "1"]));
    assert!(error.contains("--node-rank is 1, must be below --nnodes, which is 1"), "{error}");
    let mut launched = command("b", &run, &[], &[]);
    launched.env("RANK", "0");
    assert!(fail(launched).contains("--nnodes is for hosts on which anyroll starts the ranks"));
}

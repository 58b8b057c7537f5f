//! Rollout on other hosts: engines that come and go, in processes that a trainer reaches over the network.

use std::net::TcpListener;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::atomic::{AtomicU16, Ordering};
use std::time::Duration;

use nix::sys::signal::Signal;
use tempfile::TempDir;

use super::{
    ONE_RANK, Process, TINY, TWO_RANKS, anyroll, assert_nothing_left, assert_same, asynchronous::UNEVEN,
    fail, finish, interrupt, metrics, processes_of, published_model, resume, run_tiny, series, succeed, tiny,
    wait_for_steps, wait_until,
};

const AHEAD: &str = "pipeline.rlvr.rollout.async.ahead=1";
const ENDLESS: &str = "pipeline.rlvr.steps=1000000";

/// Returns a port that is free now. It is below those that systems assign, so that no other test gets it meanwhile.
fn free_port() -> u16 {
    static TRIED: AtomicU16 = AtomicU16::new(0);
    let first = 20_000 + (std::process::id() % 100) as u16 * 100;
    let mut ports = std::iter::repeat_with(|| first + TRIED.fetch_add(1, Ordering::Relaxed) % 100);
    ports.find(|port| TcpListener::bind(("0.0.0.0", *port)).is_ok()).expect("ports without end")
}

/// Returns the `--set` of `hosts` rollout hosts with so many devices each, and the port of rank 0 for them.
pub(super) fn hosts(devices: usize, hosts: usize) -> String {
    let port = free_port();
    format!("roles.rollout={{devices: {devices}, hosts: {{min: {hosts}, port: {port}, join_timeout_s: 60}}}}")
}

/// Returns a rollout host of a tiny run with the same changes, whose trainer is on `host`.
pub(super) fn rollout_host(config: &str, host: &str, sets: &[&str]) -> Command {
    let mut command = anyroll(["rollout", config, "--trainer", host, "--join-timeout", "60"]);
    for set in TINY.iter().chain(sets) {
        command.args(["--set", set]);
    }
    command
}

/// Trains with `hosts` rollout hosts, which end well with the run.
pub(super) fn with_hosts(folder: &TempDir, name: &str, config: &str, hosts: usize, sets: &[&str]) -> PathBuf {
    let start = |_| Process::start(rollout_host(config, "127.0.0.1", sets));
    let started: Vec<Process> = (0..hosts).map(start).collect();
    let run = run_tiny(folder, name, config, sets);
    for host in started {
        let ended = host.finish();
        assert_eq!(ended.code, Some(0), "{ended:#?}");
    }
    run
}

/// The last number of engines that sampled for rank 0.
pub(super) fn engines(run: &Path) -> Option<f64> {
    series(run, "perf/rollout_engines").last().copied()
}

#[test]
fn engines_elsewhere_sample_the_same() {
    let folder = tempfile::tempdir().unwrap();
    let ahead = [&UNEVEN[..], &["pipeline.rlvr.rollout.async={ahead: 2}"]].concat();
    let model = published_model::model();
    let merges = [
        &*format!("model={{path: {}, lora: {{rank: 4, targets: [v_proj, down_proj]}}}}", model.display()),
        "pipeline.rlvr.rollout={merge_adapters: true, max_new_tokens: 8, batch_size: 10}",
        "pipeline.rlvr.reward=[{regex: {pattern: '^.{0,14}$'}}]",
        "strategy.zero_stage=3",
    ];
    for (config, devices, on_hosts, sets) in [
        (ONE_RANK, 2, 2, &ahead[..]),
        (ONE_RANK, 1, 1, &["pipeline.rlvr.algorithm.advantage=remax", "strategy.precision=bf16"]),
        (TWO_RANKS, 2, 1, &merges),
    ] {
        let own = format!("roles.rollout.devices={devices}");
        let own = run_tiny(&folder, &format!("own {config} {devices}"), config, &[sets, &[&own]].concat());
        let elsewhere = hosts(devices / on_hosts, on_hosts);
        let sets = [sets, &[&elsewhere]].concat();
        let elsewhere = with_hosts(&folder, &format!("{config} {devices}"), config, on_hosts, &sets);
        assert_same(&own, &elsewhere);
        assert!(series(&elsewhere, "time/weights_s").iter().all(|&seconds| seconds > 0.0));
        assert_nothing_left(&elsewhere);
    }
}

#[test]
fn engines_come_and_go_and_the_run_goes_on() {
    let folder = tempfile::tempdir().unwrap();
    let run = folder.path().join("run");
    let elsewhere = hosts(1, 1);
    let sets = [AHEAD, ENDLESS, &elsewhere];
    let start = || Process::start(rollout_host(ONE_RANK, "127.0.0.1", &sets));
    let process = Process::start(tiny(ONE_RANK, &run, &sets));
    let first = start();
    wait_for_steps(&run, 3);
    assert_eq!(engines(&run), Some(1.0));
    // One that joins later is used.
    let second = start();
    wait_until("two engines sample", || engines(&run) == Some(2.0));
    // What a killed one has not sampled is sampled by the other, and by the next one once there is none.
    first.send(Signal::SIGKILL);
    wait_until("one engine samples", || engines(&run) == Some(1.0));
    second.send(Signal::SIGKILL);
    let steps = metrics(&run).len();
    let third = start();
    wait_for_steps(&run, steps + 20);
    // Ctrl-C on a rollout host ends that alone.
    let fourth = start();
    wait_until("two engines sample", || engines(&run) == Some(2.0));
    fourth.send(Signal::SIGINT);
    assert_eq!(fourth.finish().code, Some(130));
    let steps = metrics(&run).len();
    wait_for_steps(&run, steps + 20);
    process.send(Signal::SIGINT);
    let (ended, third) = (process.finish(), third.finish());
    assert_eq!((ended.code, third.code), (Some(130), Some(0)), "{ended:#?} {third:#?}");
    assert!(ended.stderr.contains("samples no more: "), "{ended:#?}");
    let staleness = series(&run, "staleness/max");
    assert!(staleness.iter().all(|&steps| steps <= 1.0), "{staleness:?}");
    assert_nothing_left(&run);
}

#[test]
fn what_engines_elsewhere_have_begun_outlasts_an_interruption() {
    let folder = tempfile::tempdir().unwrap();
    let steps = ["pipeline.rlvr.rollout.async={ahead: 2}", "pipeline.rlvr.steps=60"];
    let sets = [&UNEVEN[..], &steps].concat();
    let whole = run_tiny(&folder, "whole", ONE_RANK, &[&sets[..], &["roles.rollout={}"]].concat());
    let run = folder.path().join("interrupted");
    let elsewhere = hosts(1, 1);
    let sets = [&sets[..], &[&*elsewhere]].concat();
    let host = Process::start(rollout_host(ONE_RANK, "127.0.0.1", &sets));
    interrupt(tiny(ONE_RANK, &run, &sets), &run, 10);
    assert_eq!(host.finish().code, Some(0));
    let resolved = run.join("resolved.yaml");
    let host = Process::start(anyroll(["rollout", resolved.to_str().unwrap(), "--trainer", "localhost"]));
    succeed(resume(&run));
    assert_eq!(host.finish().code, Some(0));
    assert_same(&whole, &run);
}

#[test]
fn engines_of_a_trainer_that_is_killed_end_or_wait_for_the_next_one() {
    let folder = tempfile::tempdir().unwrap();
    let run = folder.path().join("run");
    let elsewhere = hosts(1, 2);
    let sets = [AHEAD, ENDLESS, &elsewhere];
    let ends = Process::start(rollout_host(TWO_RANKS, "127.0.0.1", &sets));
    let mut waits = rollout_host(TWO_RANKS, "127.0.0.1", &sets);
    waits.args(["--restarts", "1"]);
    let waits = Process::start(waits);
    let process = Process::start(tiny(TWO_RANKS, &run, &sets));
    wait_for_steps(&run, 2);
    process.send(Signal::SIGKILL);
    let ended = ends.finish_within(Duration::from_secs(20));
    assert!(ended.error().contains("the trainer at 127.0.0.1:"), "{ended:#?}");
    // Its ports are given back.
    wait_until("the ranks have ended", || processes_of(&run).is_empty());
    let sets = [AHEAD, &elsewhere];
    let again = Process::start(rollout_host(TWO_RANKS, "127.0.0.1", &sets));
    run_tiny(&folder, "next", TWO_RANKS, &sets);
    assert_eq!((again.finish().code, waits.finish().code), (Some(0), Some(0)));
}

#[test]
fn rollout_hosts_that_do_not_fit_are_refused() {
    let folder = tempfile::tempdir().unwrap();
    let run = folder.path().join("run");
    // Each rank has an engine.
    let too_few = fail(tiny(TWO_RANKS, &run, &[&hosts(1, 1)]));
    assert!(too_few.contains("roles.rollout.hosts.min: the 1 hosts have 1 devices"), "{too_few}");
    let none = fail(rollout_host(ONE_RANK, "127.0.0.1", &["roles.rollout={}"]));
    assert!(none.contains("roles.rollout: its devices are those of the trainer's host"), "{none}");
    let port = fail(tiny(ONE_RANK, &run, &["roles.rollout={hosts: {port: 0}}"]));
    assert!(port.contains("roles.rollout.hosts.port: port 0 is none"), "{port}");
    // No trainer, and one of another config.
    let elsewhere = hosts(1, 1);
    let mut lonely = anyroll(["rollout", ONE_RANK, "--trainer", "127.0.0.1", "--join-timeout", "1"]);
    lonely.args(["--set", &elsewhere]);
    let lonely = finish(lonely);
    assert!(lonely.error().contains("no trainer was found at 127.0.0.1:"), "{lonely:#?}");
    let short = elsewhere.replace("join_timeout_s: 60", "join_timeout_s: 4");
    let process = Process::start(tiny(ONE_RANK, &run, &[&short]));
    let other = [&*short, "pipeline.rlvr.rollout.temperature=0.5"];
    let other = finish(rollout_host(ONE_RANK, "127.0.0.1", &other));
    assert!(other.error().contains("its `pipeline.rlvr.rollout` is {\"temperature\":0.5"), "{other:#?}");
    // A run that waits for engines ends on Ctrl-C.
    let waits = folder.path().join("waits");
    let waiting = Process::start(tiny(ONE_RANK, &waits, &[&hosts(1, 1)]));
    wait_for_steps(&waits, 0);
    waiting.send(Signal::SIGINT);
    assert_eq!(waiting.finish_within(Duration::from_secs(30)).code, Some(130));
    // It was the only one, and the run waits no longer than it may.
    let ended = process.finish_within(Duration::from_secs(60));
    let words =
        "this rank has 0 of 1 engines of rollout hosts, and waited for 4s: start `anyroll rollout CONFIG";
    assert!(ended.error().contains(words), "{ended:#?}");
}

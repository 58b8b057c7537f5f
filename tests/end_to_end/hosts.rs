//! Several hosts on one machine: runs across them, links that fail, and hosts that vanish.

mod elastic;
mod faults;
mod network;
mod random;
mod restarts;
mod rollout;
mod storage;

use std::iter;
use std::process::Command;
use std::time::{Duration, Instant};

use super::{Ended, Process, TWO_RANKS, assert_same, run_tiny, tiny};
use network::Network;

/// Changes of a run that soon makes steps and does not end by itself.
const ENDLESS: [&str; 2] = ["pipeline.rlvr.warmup.steps=5", "pipeline.rlvr.steps=1000000"];

/// Starts a job as another launcher does: on each host as many ranks as it has devices, which meet at `master`.
fn start_ranks(
    network: &Network,
    hosts: &[&str],
    (per_host, master): (usize, &str),
    rank: &Command,
) -> Vec<Process> {
    let places = hosts.iter().flat_map(|host| iter::repeat_n(host, per_host).zip(0..));
    let start = |(index, (host, local_rank)): (usize, (&&str, usize))| {
        let mut command = network.on(host, rank);
        command.env("RANK", index.to_string()).env("LOCAL_RANK", local_rank.to_string());
        command.env("WORLD_SIZE", (hosts.len() * per_host).to_string());
        command.env("MASTER_ADDR", master).env("MASTER_PORT", "29500");
        Process::start(command)
    };
    places.enumerate().map(start).collect()
}

#[test]
fn two_hosts_train_as_one() {
    let Some(network) = Network::of(&["a", "b"]) else { return };
    let folder = tempfile::tempdir().unwrap();
    // Stages differ in no bit, so that all have one reference.
    let steps = "pipeline.rlvr.steps=8";
    let one = run_tiny(&folder, "one", TWO_RANKS, &[steps, "devices=4"]);
    // By address, and by a name that is loopback on the host that it names.
    for (stage, master) in [("0", "10.77.0.1"), ("1", "a"), ("2", "10.77.0.1"), ("3", "a")] {
        let run = folder.path().join(stage);
        let stage = format!("strategy.zero_stage={stage}");
        let rank = tiny(TWO_RANKS, &run, &[steps, &stage, "devices=2"]);
        for ended in start_ranks(&network, &["a", "b"], (2, master), &rank).into_iter().map(Process::finish) {
            assert_eq!(ended.code, Some(0), "{ended:#?}");
        }
        assert_same(&one, &run);
    }
}

/// Each host holds a replica, as pairs of one host do.
#[test]
fn hosts_hold_replicas() {
    let Some(network) = Network::of(&["a", "b"]) else { return };
    let folder = tempfile::tempdir().unwrap();
    let sets = ["pipeline.rlvr.steps=8", "strategy.zero_stage=3"];
    let one =
        run_tiny(&folder, "one", TWO_RANKS, &[&sets[..], &["devices=4", "strategy.shard_group=2"]].concat());
    let run = folder.path().join("two");
    let rank = tiny(TWO_RANKS, &run, &[&sets[..], &["devices=2", "strategy.shard_group=host"]].concat());
    for ended in start_ranks(&network, &["a", "b"], (2, "a"), &rank).into_iter().map(Process::finish) {
        assert_eq!(ended.code, Some(0), "{ended:#?}");
    }
    assert_same(&one, &run);
}

#[test]
fn ranks_that_cannot_reach_one_another_end_in_time_and_say_why() {
    let Some(network) = Network::of(&["a", "b"]) else { return };
    let folder = tempfile::tempdir().unwrap();
    let sets = ["devices=1", "strategy.collective_timeout_s=10"];
    let mut rank = tiny(TWO_RANKS, &folder.path().join("run"), &sets);
    rank.env("GLOO_SOCKET_IFNAME", "lo");
    let started = Instant::now();
    let ranks = start_ranks(&network, &["a", "b"], (1, "10.77.0.1"), &rank);
    let ended: Vec<Ended> = ranks.into_iter().map(Process::finish).collect();
    assert!(started.elapsed() < Duration::from_secs(60), "it took {:?}", started.elapsed());
    let told = "It offers them the interface lo (GLOO_SOCKET_IFNAME)";
    let remedy = "set GLOO_SOCKET_IFNAME to the interface of their network";
    for ended in &ended {
        assert_eq!(ended.code, Some(1), "{ended:#?}");
        assert!(ended.stderr.contains(told) && ended.stderr.contains(remedy), "{ended:#?}");
    }
}

//! Faults at random, with a seed.

use std::env;
use std::io::{self, Write as _};
use std::path::Path;
use std::thread;
use std::time::{Duration, Instant};

use nix::sys::signal::{Signal, kill};

use super::super::{TWO_RANKS, assert_nothing_left, assert_same, metrics, rank_of, run_tiny, wait_within};
use super::Network;
use super::restarts::supervisor;

/// Most time from a fault to the next steps: those of a deadline, a lost host and a start on a busy machine.
const MOST: Duration = Duration::from_secs(180);
/// Number of faults, and the seed.
const FAULTS: &str = "ANYROLL_HOST_FAULTS";
const SEED: &str = "ANYROLL_HOST_SEED";

/// Ranks are killed and stopped, supervisors are killed and started again, and links are cut for a while.
///
/// Takes minutes, and runs when it is asked to: `ANYROLL_HOST_FAULTS=20`.
#[test]
fn faults_at_random_lose_nothing() {
    let number = |name: &str| env::var(name).ok().and_then(|value| value.parse::<u64>().ok());
    let Some(faults) = number(FAULTS) else { return };
    let Some(network) = Network::of(&["a", "b"]) else { return };
    let mut draws = Draws(number(SEED).unwrap_or(0));
    let folder = tempfile::tempdir().unwrap();
    let steps = format!("pipeline.rlvr.steps={}", 15 * faults + 20);
    let sets = [&steps, "strategy.collective_timeout_s=5", "pipeline.rlvr.evaluation.every=100"];
    let whole = run_tiny(&folder, "whole", TWO_RANKS, &[&sets[..], &["devices=4"]].concat());
    let run = folder.path().join("run");
    let start = |host: &str| {
        let sets = [&sets[..], &["devices=2"]].concat();
        supervisor(&network, host, &run, &sets, &["--restarts", "1000", "--auto-resume"])
    };
    let mut hosts = ["a", "b"].map(|host| Some(start(host)));
    for fault in 0..faults {
        let before = last_step(&run);
        let more = 1 + draws.below(12);
        wait_within(MOST, "steps are made", || last_step(&run) >= before + more);
        let began = Instant::now();
        let index = draws.below(2) as usize;
        let (host, rank) = (["a", "b"][index], draws.below(4) as usize);
        let told = match draws.below(4) {
            0 => {
                let _ = kill(rank_of(&run, rank), Signal::SIGKILL);
                format!("rank {rank} is killed")
            }
            1 => {
                let _ = kill(rank_of(&run, rank), Signal::SIGSTOP);
                format!("rank {rank} is stopped")
            }
            2 => {
                drop(hosts[index].take()); // kills it
                hosts[index] = Some(start(host));
                format!("the supervisor of {host} is killed, and starts again")
            }
            _ => {
                let time = Duration::from_millis(500 + draws.below(15_000));
                network.cut(host);
                thread::sleep(time);
                network.restore(host);
                format!("the link of {host} is cut for {time:?}")
            }
        };
        wait_within(MOST, &told, || last_step(&run) > before + more);
        let line = format!(
            "fault {fault} after step {}: {told}; {:?} to the next step\n",
            before + more,
            began.elapsed()
        );
        io::stderr().write_all(line.as_bytes()).unwrap();
    }
    for ended in hosts.into_iter().flatten().map(|host| host.finish_within(MOST)) {
        assert_eq!(ended.code, Some(0), "{ended:#?}");
    }
    assert_same(&whole, &run);
    assert_nothing_left(&run);
}

fn last_step(run: &Path) -> u64 {
    if !run.join("metrics.jsonl").exists() {
        return 0;
    }
    metrics(run).last().and_then(|step| step["step"].as_u64()).unwrap_or(0)
}

/// Splitmix64.
struct Draws(u64);

impl Draws {
    fn below(&mut self, end: u64) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut draw = self.0;
        draw = (draw ^ (draw >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        draw = (draw ^ (draw >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        (draw ^ (draw >> 31)) % end
    }
}

//! Hosts without a shared folder, whose checkpoints are in a store.

use std::path::{Path, PathBuf};

use nix::sys::signal::{Signal, kill};
use tempfile::TempDir;

use super::super::{
    Process, TWO_RANKS, assert_nothing_left, assert_same, checkpoints, rank_of, run_tiny, starts,
    wait_for_steps, wait_until,
};
use super::{Network, restarts::supervisor};

const MORE: [&str; 3] = ["--restarts", "3", "--auto-resume"];

/// Hosts with a folder each, and a store that no run writes to as a folder.
struct Apart {
    network: Network,
    folder: TempDir,
    sets: Vec<String>,
}

impl Apart {
    fn of(stage: &str) -> Option<Self> {
        let network = Network::of(&["a", "b"])?;
        let folder = tempfile::tempdir().unwrap();
        let storage = format!("pipeline.rlvr.checkpoint.storage=file://{}/store", folder.path().display());
        let stage = format!("strategy.zero_stage={stage}");
        // A frozen model is in the store, too.
        let sets = ["pipeline.rlvr.steps=24", "pipeline.rlvr.algorithm.kl_coef=0.05"].map(str::to_owned);
        Some(Self { network, folder, sets: sets.into_iter().chain([stage, storage]).collect() })
    }

    fn path(&self, name: &str) -> PathBuf {
        self.folder.path().join(name)
    }

    fn start(&self, host: &str, run: &Path) -> Process {
        let sets: Vec<&str> = self.sets.iter().map(String::as_str).collect();
        supervisor(&self.network, host, run, &sets, &MORE)
    }

    /// The metrics of a run that had one folder and no failure.
    fn check(&self, a: Process, b: Process) {
        for ended in [a, b].map(Process::finish) {
            assert_eq!(ended.code, Some(0), "{ended:#?}");
        }
        let sets: Vec<&str> = self.sets[..3].iter().map(String::as_str).collect();
        let whole = run_tiny(&self.folder, "whole", TWO_RANKS, &sets);
        let store = self.path("store");
        assert_same(&whole, &store);
        assert_eq!(checkpoints(&store), ["step_000020", "step_000024"]);
    }
}

/// A rank fails, then a host, which another one takes the place of.
#[test]
fn another_host_continues_from_the_store() {
    let Some(apart) = Apart::of("3") else { return };
    let (run, b) = (apart.path("a"), apart.path("b"));
    let (on_a, on_b) = (apart.start("a", &run), apart.start("b", &b));
    wait_for_steps(&run, 6);
    kill(rank_of(&b, 1), Signal::SIGKILL).unwrap();
    wait_until("the ranks have started again", || starts(&run) == 2);
    wait_for_steps(&run, 13);
    on_b.send(Signal::SIGKILL);
    drop(on_b);
    let other = apart.path("other b");
    let on_b = apart.start("b", &other);
    apart.check(on_a, on_b);
    assert_eq!(starts(&run), 3);
    for run in [&run, &b, &other] {
        assert_nothing_left(run);
        let kept = checkpoints(run);
        assert!(kept.len() <= 3, "{kept:?}");
    }
}

/// Nothing is left of rank 0's folder.
#[test]
fn another_host_0_continues_from_the_store() {
    let Some(apart) = Apart::of("0") else { return };
    let (run, b) = (apart.path("a"), apart.path("b"));
    let (on_a, on_b) = (apart.start("a", &run), apart.start("b", &b));
    wait_for_steps(&run, 10);
    on_a.send(Signal::SIGKILL);
    drop(on_a);
    let other = apart.path("other a");
    apart.check(apart.start("a", &other), on_b);
    assert_eq!(starts(&other), 2, "the records of the first start came from the store");
}

//! The rules of [`Collective`] and of [`CollectiveGroup`] above it, checked by every rank of a job in step.
//!
//! The ranks agree about each case over the store, which does not depend on what is under test. Cases run on a
//! group that is split off the world; after a failure the next case gets a fresh one, so that one fault does not
//! fail all that follow.

mod data;
mod failures;
mod member;
mod order;
mod split;

use std::{
    sync::Arc,
    time::{Duration, Instant},
};

use anyroll_backends::{
    Collective, CollectiveGroup, DType, Device, Reduction, Rendezvous, Result, Store, connect_with,
    faults::Delayed,
};

use crate::{Outcome, Status, host::leaves_no_memory, runner::Case};
use member::Member;

/// Longest delay of work in the second round.
const DELAY: Duration = Duration::from_millis(1);

/// One rank's connections to the others.
#[derive(Clone, Debug)]
pub struct Peers {
    /// This rank's device.
    pub device: Arc<dyn Device>,
    /// The communicator of all ranks, which is under test.
    pub world: Arc<dyn Collective>,
    /// The store through which the ranks agree. Its time-out bounds the suite: a case may take half, a collective a quarter.
    pub store: Arc<Store>,
}

impl Peers {
    /// Connects this rank with the others. Blocks until all are there.
    pub fn connect(device: Arc<dyn Device>, rendezvous: &Rendezvous, reduction: Reduction) -> Result<Self> {
        let world = connect_with(reduction, &*device, rendezvous)?;
        Ok(Self { device, world, store: Arc::new(Store::connect(rendezvous)?) })
    }
}

/// Checks what a collective computes, in which order it runs and how it splits: as it is, and again with work that
/// starts late at random. Every rank calls it with the same `filter`, once for a store, and gets the merged
/// outcomes: a case failed if it failed on one rank. Only cases whose name contains `filter`.
pub fn collective_suite(peers: &Peers, filter: Option<&str>) -> Vec<Outcome> {
    let group = format!("collective, world size {}", peers.world.world_size());
    let mut outcomes = Round::new(peers, "plain").run(&group, || all(&DType::ALL), filter);
    for seed in 1..=2 {
        // Ranks are late at different moments.
        let seed_here = seed * 1000 + peers.world.rank() as u64;
        let device = Delayed::wrap(peers.device.clone(), seed_here, DELAY);
        let delayed = Peers { device, ..peers.clone() };
        let group = format!("{group}, delayed by seed {seed}");
        let round = Round::new(&delayed, &format!("delayed {seed}"));
        outcomes.extend(round.run(&group, || all(&[DType::Bf16]), filter));
    }
    outcomes
}

/// Checks what happens when a rank does not come or a communicator is aborted: errors in time, nobody hangs, and a
/// new group works. Called like [`collective_suite`]. The world stays whole; groups that fail are split off it.
pub fn failure_suite(peers: &Peers, filter: Option<&str>) -> Vec<Outcome> {
    let group = format!("failures, world size {}", peers.world.world_size());
    Round::new(peers, "failures").run(&group, failures::cases, filter)
}

fn all(dtypes: &[DType]) -> Vec<Case<Member>> {
    let mut cases = data::cases(dtypes);
    cases.extend(order::cases());
    cases.extend(split::cases());
    cases
}

/// One pass over a list of cases, in step with the other ranks.
struct Round<'a> {
    peers: &'a Peers,
    /// Keeps the keys of this pass apart from those of others.
    name: String,
}

impl<'a> Round<'a> {
    fn new(peers: &'a Peers, name: &str) -> Self {
        Self { peers, name: name.into() }
    }

    /// Runs the cases that match, until the ranks can agree no more; that is the last outcome's failure then.
    fn run(
        &self,
        group: &str,
        cases: impl FnOnce() -> Vec<Case<Member>>,
        filter: Option<&str>,
    ) -> Vec<Outcome> {
        let mut outcomes = Vec::new();
        let start = Instant::now();
        // For the round and not for each case: a communicator may keep what it worked with until it goes.
        let verdict = leaves_no_memory(&self.peers.device, || {
            self.run_cases(group, cases, filter, &mut outcomes);
            Ok(())
        });
        if !outcomes.is_empty() {
            let status = self.merge(&format!("conformance/{}/memory", self.name), verdict.into());
            let status = status.unwrap_or_else(|error| Status::Failed(error.to_string()));
            let name = "memory: all that the cases took is back".into();
            let elapsed_s = start.elapsed().as_secs_f64();
            outcomes.push(Outcome { group: group.into(), name, status, elapsed_s });
        }
        self.leave();
        outcomes
    }

    fn run_cases(
        &self,
        group: &str,
        cases: impl FnOnce() -> Vec<Case<Member>>,
        filter: Option<&str>,
        outcomes: &mut Vec<Outcome>,
    ) {
        let mut communicator = None;
        let cases = cases().into_iter().filter(|case| case.name.contains(filter.unwrap_or_default()));
        for (number, case) in cases.enumerate() {
            match self.step(number, case, group, &mut communicator) {
                Ok(outcome) => outcomes.push(outcome),
                Err(error) => {
                    let status = Status::Failed(error.to_string());
                    let name = "the ranks go on together".into();
                    outcomes.push(Outcome { group: group.into(), name, status, elapsed_s: 0.0 });
                    break;
                }
            }
        }
    }

    /// Rank 0 serves the store, so it leaves last. An error here can no longer change a verdict.
    fn leave(&self) {
        let store = &self.peers.store;
        let key = |rank: usize| format!("conformance/{}/left/{rank}", self.name);
        let _ = match self.peers.world.rank() {
            0 => (1..self.peers.world.world_size()).try_for_each(|rank| store.get(&key(rank)).map(drop)),
            rank => store.set(&key(rank), b"left"),
        };
    }

    /// Runs one case on all ranks and merges the verdicts.
    fn step(
        &self,
        number: usize,
        case: Case<Member>,
        group: &str,
        communicator: &mut Option<CollectiveGroup>,
    ) -> Result<Outcome> {
        let timeout = self.peers.store.rendezvous().timeout;
        let under_test = match communicator.take() {
            Some(ready) => ready,
            None => self.fresh_group(timeout / 4)?,
        };
        let prefix = format!("conformance/{}/{number}", self.name);
        let member = Member::new(self.peers, under_test.clone(), &prefix)?;
        let mut outcome = case.run(group, member, timeout / 2);
        outcome.status = self.merge(&prefix, outcome.status)?;
        if matches!(outcome.status, Status::Failed(_)) {
            // The ranks may be at different places in it: free whoever waits, and do not use it again.
            under_test.abort();
        } else {
            *communicator = Some(under_test);
        }
        Ok(outcome)
    }

    fn fresh_group(&self, timeout: Duration) -> Result<CollectiveGroup> {
        let comm = self.peers.world.split(Some(0), self.peers.world.rank() as i32)?;
        let comm = comm.expect("a rank with a color is a member");
        CollectiveGroup::new("conformance", comm, &self.peers.device, timeout)
    }

    /// The verdict of all ranks: every failure, else the first skip.
    fn merge(&self, prefix: &str, mine: Status) -> Result<Status> {
        let store = &self.peers.store;
        let (rank, world_size) = (self.peers.world.rank(), self.peers.world.world_size());
        store.set(&format!("{prefix}/verdict/{rank}"), encode(mine).as_bytes())?;
        let (mut failures, mut skips) = (Vec::new(), Vec::new());
        for rank in 0..world_size {
            match decode(&store.get(&format!("{prefix}/verdict/{rank}"))?) {
                Status::Passed => {}
                Status::Failed(reason) => failures.push(format!("rank {rank}: {reason}")),
                Status::Skipped(reason) => skips.push(reason),
            }
        }
        Ok(match (failures.is_empty(), skips.into_iter().next()) {
            (false, _) => Status::Failed(failures.join("\n")),
            (true, Some(reason)) => Status::Skipped(reason),
            (true, None) => Status::Passed,
        })
    }
}

/// A status as a value of the store, which holds 8 KiB: a longer reason loses its end.
fn encode(status: Status) -> String {
    const LIMIT: usize = 2000; // characters, of which JSON may need several bytes for some
    let cut = |reason: String| reason.chars().take(LIMIT).collect();
    let status = match status {
        Status::Passed => Status::Passed,
        Status::Failed(reason) => Status::Failed(cut(reason)),
        Status::Skipped(reason) => Status::Skipped(cut(reason)),
    };
    serde_json::to_string(&status).expect("a status is JSON")
}

fn decode(value: &[u8]) -> Status {
    serde_json::from_slice(value)
        .unwrap_or_else(|error| Status::Failed(format!("an unreadable verdict: {error}")))
}

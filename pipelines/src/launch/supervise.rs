//! Supervision of a job's ranks, and the outcome of the job.
//!
//! A single loop owns the children and polls each, so that no signal is ever sent to a process id that was
//! reused.

use std::os::unix::process::ExitStatusExt;
use std::path::{Path, PathBuf};
use std::process::{Child, ExitStatus};
use std::thread;
use std::time::{Duration, Instant};

use nix::sys::signal::{Signal, kill, killpg};
use nix::unistd::Pid;

use super::child::{FailureKind, read_failure};
use super::orders::{News, Order, Orders};
use super::{Error, Outcome, POLL_INTERVAL, failure_file};

/// Wait for the ranks' own reports after a failure, before one is blamed.
pub(super) const BLAME_TIMEOUT: Duration = Duration::from_secs(2);
/// Time from SIGTERM to SIGKILL, and from SIGKILL to giving up on a process stuck in the kernel.
pub(super) const END_TIMEOUT: Duration = Duration::from_secs(2);
/// Time from the end of rank 0, which writes the report and ends last, to that of the others.
pub(super) const LINGER_TIMEOUT: Duration = Duration::from_secs(60);
/// Time from an interrupt to the end of a rank that saves a checkpoint.
const SAVE_TIMEOUT: Duration = Duration::from_secs(600);

/// The ranks of a job on this host, in order.
pub(super) struct Job {
    /// Number of the first one in the whole job.
    first_rank: usize,
    ranks: Vec<RankProcess>,
    failures: PathBuf,
}

/// End of this host's ranks.
pub(super) enum End {
    /// All ended as they should.
    Done(Outcome),
    /// One failed, and the others were ended.
    Failed(Blame),
    /// Another host's order ended them.
    Ordered,
}

struct RankProcess {
    child: Child,
    ended: Option<Ended>,
}

#[derive(Clone, Copy)]
struct Ended {
    status: ExitStatus,
    at: Instant,
}

/// A rank's failure, with the likelihood that it caused the others: a smaller value is likelier.
pub(super) struct Blame {
    pub(super) likelihood: u8,
    at: Instant,
    pub(super) error: Error,
}

/// Only a failure of this rank explains it.
pub(super) const CERTAIN: u8 = 0;
/// It gave no reason.
const UNEXPLAINED: u8 = 1;
/// It did not fail itself, and others waited for it.
pub(super) const STALLED: u8 = 2;
/// Its report blames another rank.
pub(super) const CONSEQUENCE: u8 = 3;

impl Blame {
    /// Only this error explains the failure.
    pub(super) fn certain(error: Error) -> Self {
        Self { likelihood: CERTAIN, at: Instant::now(), error }
    }
}

impl Job {
    /// Creates a job without ranks, the first of which is `first_rank`. Their failure reports are files in `failures`.
    pub(super) fn new(first_rank: usize, failures: &Path) -> Self {
        Self { first_rank, ranks: Vec::new(), failures: failures.to_owned() }
    }

    /// Adds the next rank.
    pub(super) fn add(&mut self, child: Child) {
        self.ranks.push(RankProcess { child, ended: None });
    }

    /// Waits until every rank has ended; ends all ranks if one fails or `orders` say so.
    pub(super) fn supervise(&mut self, orders: &mut impl Orders) -> End {
        let mut interrupted: Option<Instant> = None;
        loop {
            while let Some(order) = orders.next() {
                match order {
                    Order::Signal(signal) | Order::Interrupt(signal) if interrupted.is_none() => {
                        interrupted = Some(Instant::now());
                        self.forward(signal);
                        orders.tell(News::Interrupted(signal));
                    }
                    Order::Interrupt(_) => {}
                    Order::Signal(_) | Order::Kill => {
                        interrupted.get_or_insert_with(Instant::now);
                        self.send_groups(Signal::SIGKILL);
                        orders.tell(News::Killed);
                    }
                    Order::End => {
                        self.end();
                        return End::Ordered;
                    }
                }
            }
            if interrupted.is_some_and(|since| since.elapsed() > SAVE_TIMEOUT) {
                self.send_groups(Signal::SIGKILL);
            }
            self.poll();
            if self.ranks.iter().any(|rank| rank.has_failed(interrupted.is_some())) {
                let blame = self.blame(interrupted.is_some());
                return self.fail(blame, orders);
            }
            if self.all_ended() {
                let finished = self.ranks.iter().all(RankProcess::has_finished);
                return End::Done(if finished { Outcome::Finished } else { Outcome::Interrupted });
            }
            if let Some(rank) = self.lingering() {
                let seconds = LINGER_TIMEOUT.as_secs();
                let reason = format!("it had not ended {seconds} s after rank {} did", self.first_rank);
                return self.fail(Blame::certain(Error::Failed { rank, reason }), orders);
            }
            thread::sleep(POLL_INTERVAL);
        }
    }

    /// Ends every rank: SIGTERM, then SIGKILL.
    pub(super) fn end(&mut self) {
        for signal in [Signal::SIGTERM, Signal::SIGKILL] {
            self.send_groups(signal);
            self.poll_until(END_TIMEOUT, Self::all_ended);
        }
    }

    /// Tells the other hosts of a failure, then ends all ranks.
    pub(super) fn fail(&mut self, blame: Blame, orders: &mut impl Orders) -> End {
        orders.tell(News::Failed(&blame));
        self.end();
        End::Failed(blame)
    }

    /// Finds the rank to blame. A killed rank is known at once. If a rank failed by itself, collectives of the others may
    /// fail first, so reports are awaited.
    fn blame(&mut self, interrupted: bool) -> Blame {
        self.poll_until(BLAME_TIMEOUT, |job| {
            job.all_ended() || job.blames(interrupted).any(|blame| blame.likelihood == CERTAIN)
        });
        let blame = self.blames(interrupted).min_by_key(|blame| (blame.likelihood, blame.at));
        let blame = blame.expect("a rank has failed");
        if blame.likelihood == CONSEQUENCE { self.stalled(blame) } else { blame }
    }

    /// Blame when all failed ranks blame another: a rank still running waits for nobody, so the others waited for it.
    fn stalled(&self, blame: Blame) -> Blame {
        match (blame, self.ranks.iter().position(|rank| rank.ended.is_none())) {
            (Blame { at, error: Error::Failed { rank: waiting, reason }, .. }, Some(index)) => {
                let rank = self.first_rank + index;
                Blame { likelihood: STALLED, at, error: Error::Stalled { rank, waiting, reason } }
            }
            (blame, _) => blame,
        }
    }

    fn blames(&self, interrupted: bool) -> impl Iterator<Item = Blame> {
        let failed =
            self.ranks.iter().enumerate().filter(move |(_, process)| process.has_failed(interrupted));
        failed.filter_map(|(index, process)| {
            let ended = process.ended?;
            let (likelihood, error) = self.explain(self.first_rank + index, ended.status);
            Some(Blame { likelihood, at: ended.at, error })
        })
    }

    fn explain(&self, rank: usize, status: ExitStatus) -> (u8, Error) {
        if let Some(signal) = status.signal() {
            let name = Signal::try_from(signal).map_or("unknown", Signal::as_str);
            return (CERTAIN, Error::Killed { rank, signal, name });
        }
        match read_failure(&failure_file(&self.failures, rank)) {
            Some((FailureKind::Own, reason)) => (CERTAIN, Error::Failed { rank, reason }),
            Some((FailureKind::Peer, reason)) => (CONSEQUENCE, Error::Failed { rank, reason }),
            None => {
                let code = status.code().unwrap_or(-1);
                let reason = format!("it ended with exit code {code} and gave no reason; see its output");
                (UNEXPLAINED, Error::Failed { rank, reason })
            }
        }
    }

    fn poll(&mut self) {
        for rank in &mut self.ranks {
            if rank.ended.is_none()
                && let Ok(Some(status)) = rank.child.try_wait()
            {
                rank.ended = Some(Ended { status, at: Instant::now() });
            }
        }
    }

    fn poll_until(&mut self, timeout: Duration, done: impl Fn(&Self) -> bool) {
        let deadline = Instant::now() + timeout;
        loop {
            self.poll();
            if done(self) || Instant::now() >= deadline {
                return;
            }
            thread::sleep(POLL_INTERVAL);
        }
    }

    fn all_ended(&self) -> bool {
        self.ranks.iter().all(|rank| rank.ended.is_some())
    }

    fn lingering(&self) -> Option<usize> {
        let first = self.ranks.first()?.ended?;
        if first.at.elapsed() < LINGER_TIMEOUT {
            return None;
        }
        Some(self.first_rank + self.ranks.iter().position(|rank| rank.ended.is_none())?)
    }

    /// Signals the ranks only; their child processes are theirs to end after saving.
    fn forward(&self, signal: i32) {
        let signal = Signal::try_from(signal).unwrap_or(Signal::SIGTERM);
        for pid in self.running() {
            // Fails only for a process that is just ending.
            let _ = kill(pid, signal);
        }
    }

    /// Signals the ranks and the child processes in their groups. Others end with their rank.
    fn send_groups(&self, signal: Signal) {
        for pid in self.running() {
            let _ = killpg(pid, signal);
        }
    }

    fn running(&self) -> impl Iterator<Item = Pid> {
        let running = self.ranks.iter().filter(|rank| rank.ended.is_none());
        running.map(|rank| Pid::from_raw(rank.child.id().cast_signed()))
    }
}

impl RankProcess {
    fn has_finished(&self) -> bool {
        self.ended.is_some_and(|ended| ended.status.success())
    }

    /// A rank that was asked to end may report it by its exit code, or die of the signal.
    fn has_failed(&self, interrupted: bool) -> bool {
        let Some(Ended { status, .. }) = self.ended else { return false };
        let asked = [Signal::SIGINT, Signal::SIGTERM, Signal::SIGHUP, Signal::SIGKILL].map(|s| s as i32);
        let by_request = match (status.code(), status.signal()) {
            (Some(code), _) => asked.contains(&(code - 128)),
            (None, Some(signal)) => asked.contains(&signal),
            (None, None) => false,
        };
        let ended_well = status.success() || (interrupted && by_request);
        !ended_well
    }
}

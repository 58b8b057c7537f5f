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
use super::{Error, Interrupts, Outcome, POLL_INTERVAL, failure_file};

/// Wait for the ranks' own reports after a failure, before one is blamed.
const BLAME_TIMEOUT: Duration = Duration::from_secs(2);
/// Time from SIGTERM to SIGKILL, and from SIGKILL to giving up on a process stuck in the kernel.
const END_TIMEOUT: Duration = Duration::from_secs(2);
/// Time from the end of rank 0, which writes the report and ends last, to that of the others. On another host it is the
/// first rank's.
const LINGER_TIMEOUT: Duration = Duration::from_secs(60);
/// Time from an interrupt to the end of a rank that saves a checkpoint.
const SAVE_TIMEOUT: Duration = Duration::from_secs(600);

/// The ranks of a job on this host, in order.
pub(super) struct Job {
    first_rank: usize,
    ranks: Vec<RankProcess>,
    failures: PathBuf,
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
struct Blame {
    likelihood: u8,
    at: Instant,
    error: Error,
}

/// Only a failure of this rank explains it.
const CERTAIN: u8 = 0;
/// It gave no reason.
const UNEXPLAINED: u8 = 1;
/// Its report blames another rank.
const CONSEQUENCE: u8 = 2;

impl Job {
    /// Creates a job without ranks, of which `first_rank` will be the first. Failure reports are files in `failures`.
    pub(super) fn new(first_rank: usize, failures: &Path) -> Self {
        Self { first_rank, ranks: Vec::new(), failures: failures.to_owned() }
    }

    /// Adds the next rank.
    pub(super) fn add(&mut self, child: Child) {
        self.ranks.push(RankProcess { child, ended: None });
    }

    /// Waits until every rank has ended; ends all ranks if one fails.
    pub(super) fn supervise(&mut self, interrupts: &mut Interrupts) -> Result<Outcome, Error> {
        let mut interrupted: Option<Instant> = None;
        loop {
            for signal in interrupts.pending() {
                match interrupted {
                    None => {
                        interrupted = Some(Instant::now());
                        self.forward(signal);
                    }
                    Some(_) => self.send_groups(Signal::SIGKILL),
                }
            }
            if interrupted.is_some_and(|since| since.elapsed() > SAVE_TIMEOUT) {
                self.send_groups(Signal::SIGKILL);
            }
            self.poll();
            if self.ranks.iter().any(|rank| rank.has_failed(interrupted.is_some())) {
                return Err(self.fail(interrupted.is_some()));
            }
            if self.all_ended() {
                let finished = self.ranks.iter().all(RankProcess::has_finished);
                return Ok(if finished { Outcome::Finished } else { Outcome::Interrupted });
            }
            if let Some(rank) = self.lingering() {
                self.end();
                let seconds = LINGER_TIMEOUT.as_secs();
                let reason = format!("it had not ended {seconds} s after rank {} did", self.first_rank);
                return Err(Error::Failed { rank, reason });
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

    /// Finds the rank to blame, then ends the others. A killed rank is known at once. If a rank failed by
    /// itself, collectives of the others may fail first, so reports are awaited.
    fn fail(&mut self, interrupted: bool) -> Error {
        self.poll_until(BLAME_TIMEOUT, |job| {
            job.all_ended() || job.blames(interrupted).any(|blame| blame.likelihood == CERTAIN)
        });
        let blame = self.blames(interrupted).min_by_key(|blame| (blame.likelihood, blame.at));
        let blame = blame.expect("a rank has failed");
        let error = if blame.likelihood == CONSEQUENCE { self.stalled(blame.error) } else { blame.error };
        self.end();
        error
    }

    /// Error when all failed ranks blame another: a rank still running waits for nobody, so the others waited
    /// for it.
    fn stalled(&self, error: Error) -> Error {
        match (error, self.first_running()) {
            (Error::Failed { rank: waiting, reason }, Some(rank)) => Error::Stalled { rank, waiting, reason },
            (error, _) => error,
        }
    }

    fn blames(&self, interrupted: bool) -> impl Iterator<Item = Blame> {
        let failed =
            self.ranks.iter().enumerate().filter(move |(_, process)| process.has_failed(interrupted));
        failed.filter_map(|(rank, process)| {
            let ended = process.ended?;
            let (likelihood, error) = self.explain(self.first_rank + rank, ended.status);
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
        self.first_running()
    }

    fn first_running(&self) -> Option<usize> {
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

//! Errors of a job's ranks, on one host or on several.

use std::io;
use std::path::PathBuf;
use std::time::Duration;

use anyroll_config::error_chain::one_line;

use crate::link::Lost;

/// A failed job. The first line of the message names the rank to blame.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// A rank ended with an error; `reason` is the chain that it reported.
    #[error("rank {rank} failed: {reason}")]
    Failed {
        /// The first rank that failed by itself, as far as known.
        rank: usize,
        /// Its error with all causes.
        reason: String,
    },
    /// A rank was killed from outside, or crashed.
    #[error("rank {rank} was killed by signal {signal} ({name})")]
    Killed {
        /// The rank.
        rank: usize,
        /// The signal's number.
        signal: i32,
        /// The signal's name.
        name: &'static str,
    },
    /// A rank kept the others waiting, without failing itself.
    #[error("rank {rank} stalled: it was still running after rank {waiting} failed: {reason}")]
    Stalled {
        /// The rank that the others waited for.
        rank: usize,
        /// The first rank that gave up.
        waiting: usize,
        /// Its error with all causes.
        reason: String,
    },
    /// A rank's program could not be started.
    #[error("rank {rank} failed: cannot start {}", program.display())]
    Start {
        /// The rank.
        rank: usize,
        /// The program.
        program: PathBuf,
        /// Cause.
        source: io::Error,
    },
    /// A failure on one of several hosts.
    #[error("host {host} ({name}): {reason}")]
    OnHost {
        /// The host's index.
        host: usize,
        /// Its name.
        name: String,
        /// The error of its supervisor, or of the rank to blame.
        reason: String,
        /// See [`Error::cause`].
        cause: String,
    },
    /// The supervisor of another host does not answer any more.
    #[error("host {host} ({name}) is gone: {problem}")]
    Gone {
        /// The host's index.
        host: usize,
        /// Its name, or the address at which it was.
        name: String,
        /// Sign of its end.
        problem: Lost,
    },
    /// Some hosts have not come.
    #[error(
        "{absent} did not come within {waited:?}: is `anyroll run` started there, with this `--master-addr`?"
    )]
    Absent {
        /// Their indices, or their names as far as they have been here.
        absent: String,
        /// Time for which they were waited for.
        waited: Duration,
    },
    /// Host 0 was not found.
    #[error(
        "host 0 was not found at {address} within {waited:?}: is `anyroll run --node-rank 0` started there?"
    )]
    NoLeader {
        /// Its address and port.
        address: String,
        /// Time for which it was waited for.
        waited: Duration,
        /// Failure of the last attempt.
        source: io::Error,
    },
    /// Host 0 does not take this host.
    #[error("host 0 at {address} refuses this host: {reason}")]
    Refused {
        /// Its address and port.
        address: String,
        /// Its reason.
        reason: String,
    },
    /// The end of the job, as host 0 told it.
    #[error("{0}")]
    Told(String),
    /// The port for the other hosts cannot be used.
    #[error("cannot listen to the other hosts at port {port}: choose another `--master-port` on all hosts")]
    Listen {
        /// The port.
        port: u16,
        /// Cause.
        source: io::Error,
    },
    /// The parent could not prepare the job.
    #[error("cannot {action} to start the ranks")]
    Prepare {
        /// The attempted action.
        action: &'static str,
        /// Cause.
        source: io::Error,
    },
}

impl Error {
    /// Text that is equal for failures of the same kind, whichever rank has them: all may fail alike, and any of them first.
    pub fn cause(&self) -> String {
        match self {
            Self::Failed { reason, .. } | Self::Stalled { reason, .. } => reason.clone(),
            Self::Killed { signal, .. } => format!("signal {signal}"),
            Self::OnHost { cause, .. } => cause.clone(),
            other => one_line(other),
        }
    }

    /// True if another start would fail in the same way, whatever is left of the job.
    pub fn is_final(&self) -> bool {
        matches!(self, Self::Absent { .. } | Self::Listen { .. })
    }
}

//! The ranks of a job on one host: starting, watching and ending them.
//!
//! The process that the user starts is the parent. It opens no device, and starts one child per rank with the
//! environment that torchrun would set. Rank 0 has the terminal; the output of the others is printed with a
//! prefix. No process is ever left: a failed rank ends the others within seconds, Ctrl-C ends all after they
//! have saved, and orphaned children kill themselves.
//!
//! A child's `main` calls [`watch_parent`] first, then [`Rank::from_env`], and [`report_failure`] before it
//! exits with an error.

mod child;
mod interrupts;
mod rank;
mod supervise;

use std::ffi::OsString;
use std::io::{self, BufRead, BufReader, Read, Write};
use std::net::TcpListener;
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::thread::{self, JoinHandle};
use std::time::{Duration, Instant};

use anyroll_backends::Listener;
use command_fds::{CommandFdExt, FdMapping};

pub use child::{FailureKind, is_launched, report_failure, watch_parent};
pub use interrupts::Interrupts;
pub use rank::{Rank, RankError};

/// Interval between polls of ranks and signals.
const POLL_INTERVAL: Duration = Duration::from_millis(10);

/// Wait for the output of ranks that have ended. A background process of a rank may keep the pipe open.
const DRAIN_TIMEOUT: Duration = Duration::from_secs(1);

/// Ranks share the cores, and spinning threads would take them from each other.
const WAIT_POLICY: &str = "OMP_WAIT_POLICY";

/// Processes to start.
#[derive(Clone, Debug)]
pub struct LaunchPlan {
    /// Program of every rank, usually `std::env::current_exe()`.
    pub program: PathBuf,
    /// Its arguments, the same for all ranks.
    pub args: Vec<OsString>,
    /// Number of ranks on this host.
    pub world_size: usize,
    /// CPU threads of each rank's math, given as `OMP_NUM_THREADS`.
    pub threads: usize,
    /// Additional environment variables of every rank.
    pub env: Vec<(OsString, OsString)>,
    /// Place of these ranks among those of several hosts; `None`: they are all.
    pub place: Option<HostPlace>,
}

/// Place of a host's ranks in a job on several hosts.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct HostPlace {
    /// The first rank of this host.
    pub first_rank: usize,
    /// Number of ranks on all hosts.
    pub world_size: usize,
    /// The host of rank 0.
    pub master_addr: String,
    /// Port of the ranks' rendezvous there.
    pub master_port: u16,
}

/// End of a job that did not fail.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Outcome {
    /// Every rank ended with exit code 0.
    Finished,
    /// The user interrupted the job before it was finished.
    Interrupted,
}

impl Outcome {
    /// Exit code of the parent: 130 after an interrupt, as in shells.
    pub fn exit_code(self) -> u8 {
        match self {
            Self::Finished => 0,
            Self::Interrupted => 130,
        }
    }
}

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
    /// The parent could not prepare the job.
    #[error("cannot {action} to start the ranks")]
    Prepare {
        /// The attempted action.
        action: &'static str,
        /// Cause.
        source: io::Error,
    },
}

/// Starts the ranks of `plan` and waits until these have ended. `interrupts` are caught before the first rank starts, so
/// that no signal is missed.
///
/// Each has `RANK`, `WORLD_SIZE`, `LOCAL_RANK`, `MASTER_ADDR` and `MASTER_PORT` (of this host and already bound for rank 0,
/// unless the plan has a place among several hosts), `OMP_NUM_THREADS` and, unless the user has set it,
/// `OMP_WAIT_POLICY=passive`.
///
/// If a rank fails, the others are ended within 6 seconds, and the error is that of the rank to blame.
/// Ctrl-C, SIGTERM and SIGHUP are forwarded to every rank, which then save a checkpoint; a second signal
/// kills them.
pub fn launch(plan: &LaunchPlan, interrupts: &mut Interrupts) -> Result<Outcome, Error> {
    let prepare = |action| move |source| Error::Prepare { action, source };
    let failures = tempfile::tempdir().map_err(prepare("make a temporary folder"))?;
    let (listener, place) = match &plan.place {
        Some(place) => (Listener::default(), place.clone()),
        None => {
            let (listener, master_port) = Listener::bind().map_err(prepare("bind a port"))?;
            let (world_size, master_addr) = (plan.world_size, "127.0.0.1".to_owned());
            (listener, HostPlace { first_rank: 0, world_size, master_addr, master_port })
        }
    };

    let mut job = supervise::Job::new(place.first_rank, failures.path());
    let mut output = Vec::new();
    for local_rank in 0..plan.world_size {
        let rank = place.first_rank + local_rank;
        // The first rank alone gets the socket: peers that connect learn of its death.
        match start(plan, &place, local_rank, listener.take(), failures.path()) {
            Ok(mut child) => {
                output.extend(print_output(rank, &mut child));
                job.add(child);
            }
            Err(source) => {
                job.end();
                return Err(Error::Start { rank, program: plan.program.clone(), source });
            }
        }
    }
    let outcome = job.supervise(interrupts);
    drain(output);
    outcome
}

/// File in which rank `rank` reports its failure.
fn failure_file(folder: &Path, rank: usize) -> PathBuf {
    folder.join(format!("rank-{rank}.json"))
}

/// Starts a rank of this host, which inherits `socket`, the one that listens at the rendezvous.
fn start(
    plan: &LaunchPlan,
    place: &HostPlace,
    local_rank: usize,
    socket: Option<TcpListener>,
    failures: &Path,
) -> io::Result<Child> {
    let rank = place.first_rank + local_rank;
    let mut command = Command::new(&plan.program);
    command
        .args(&plan.args)
        .envs(plan.env.iter().map(|(name, value)| (name, value)))
        .envs(anyroll_backends::rank_environment())
        .env("RANK", rank.to_string())
        .env("LOCAL_RANK", local_rank.to_string())
        .env("WORLD_SIZE", place.world_size.to_string())
        .env("MASTER_ADDR", &place.master_addr)
        .env("MASTER_PORT", place.master_port.to_string())
        .env("OMP_NUM_THREADS", plan.threads.to_string())
        .env(child::FAILURE_FILE, failure_file(failures, rank))
        // Closes when the parent ends; `watch_parent` reads it.
        .stdin(Stdio::piped())
        // A separate process group: Ctrl-C on the terminal reaches the parent only, which forwards it once,
        // and a rank can be killed with its child processes.
        .process_group(0);
    if let Some(socket) = socket {
        let mapping = FdMapping { parent_fd: socket.into(), child_fd: child::FIRST_SOCKET };
        command.env(child::SOCKETS, "1").fd_mappings(vec![mapping]).map_err(io::Error::other)?;
    }
    if std::env::var_os(WAIT_POLICY).is_none() {
        command.env(WAIT_POLICY, "passive");
    }
    if rank > 0 {
        command.stdout(Stdio::piped()).stderr(Stdio::piped());
    }
    command.spawn()
}

fn print_output(rank: usize, child: &mut Child) -> Vec<JoinHandle<()>> {
    let stdout = child.stdout.take().map(|pipe| thread::spawn(move || prefix(rank, pipe, io::stdout)));
    let stderr = child.stderr.take().map(|pipe| thread::spawn(move || prefix(rank, pipe, io::stderr)));
    stdout.into_iter().chain(stderr).collect()
}

/// Copies lines until the pipe ends. Each line is written at once, so that ranks do not mix within a line.
fn prefix<W: Write>(rank: usize, pipe: impl Read, out: impl Fn() -> W) {
    let mut pipe = BufReader::new(pipe);
    let mut line = Vec::new();
    loop {
        line.clear();
        line.extend_from_slice(format!("[rank {rank}] ").as_bytes());
        match pipe.read_until(b'\n', &mut line) {
            Ok(0) | Err(_) => return,
            Ok(_) if line.last() != Some(&b'\n') => line.push(b'\n'),
            Ok(_) => {}
        }
        // If the terminal is gone, the pipe is still read so that the rank does not block.
        let _ = out().write_all(&line);
    }
}

fn drain(output: Vec<JoinHandle<()>>) {
    let deadline = Instant::now() + DRAIN_TIMEOUT;
    while !output.iter().all(JoinHandle::is_finished) && Instant::now() < deadline {
        thread::sleep(Duration::from_millis(5));
    }
}

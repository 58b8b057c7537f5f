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
mod error;
mod hosts;
mod interrupts;
mod orders;
mod rank;
mod supervise;

use std::ffi::OsString;
use std::io::{self, BufRead, BufReader, Read, Write};
use std::net::{IpAddr, Ipv4Addr};
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::thread::{self, JoinHandle};
use std::time::{Duration, Instant};

use anyroll_backends::Listener;
use command_fds::{CommandFdExt, FdMapping};
use serde::{Deserialize, Serialize};

pub use child::{FailureKind, is_launched, report_failure, watch_parent};
pub use error::Error;
pub use hosts::{Hosts, Leader, follow, host_name};
pub use interrupts::Interrupts;
pub use rank::{Rank, RankError};

use orders::{News, Orders};
use supervise::{Blame, End, Job};

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
    pub local_ranks: usize,
    /// CPU threads of each rank's math, given as `OMP_NUM_THREADS`.
    pub threads: usize,
    /// Additional environment variables of every rank.
    pub env: Vec<(OsString, OsString)>,
}

/// End of a job that did not fail.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Deserialize, Serialize)]
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

/// This host's part of a job.
struct Part {
    /// The first rank of this host.
    first_rank: usize,
    /// Number of ranks on all hosts.
    world_size: usize,
    /// The host of rank 0, and the port of the ranks' rendezvous there.
    master_addr: String,
    master_port: u16,
    /// The socket that listens at that port; empty on other hosts.
    listener: Listener,
}

/// Starts the ranks of `plan`, which are the whole job, and waits until all have ended. `interrupts` are caught before the
/// first rank starts, so that no signal is missed.
///
/// Each has `RANK`, `WORLD_SIZE`, `LOCAL_RANK`, `MASTER_ADDR` (this host), `MASTER_PORT` (already bound for rank 0),
/// `OMP_NUM_THREADS` and, unless the user has set it, `OMP_WAIT_POLICY=passive`.
///
/// If a rank fails, the others are ended within 6 seconds, and the error is that of the rank to blame.
/// Ctrl-C, SIGTERM and SIGHUP are forwarded to every rank, which then save a checkpoint; a second signal
/// kills them.
pub fn launch(plan: &LaunchPlan, interrupts: &mut Interrupts) -> Result<Outcome, Error> {
    let address = Ipv4Addr::LOCALHOST;
    let (listener, master_port) = bind(address.into())?;
    let (world_size, master_addr) = (plan.local_ranks, address.to_string());
    let part = Part { first_rank: 0, world_size, master_addr, master_port, listener };
    match run(plan, &part, interrupts) {
        End::Done(outcome) => Ok(outcome),
        End::Failed(blame) => Err(blame.error),
        End::Ordered => unreachable!("there is no other host"),
    }
}

/// A socket for the ranks' rendezvous, and its port.
fn bind(address: IpAddr) -> Result<(Listener, u16), Error> {
    Listener::bind(address).map_err(|source| Error::Prepare { action: "bind a port", source })
}

/// Runs this host's part of a job to its end.
fn run(plan: &LaunchPlan, part: &Part, orders: &mut impl Orders) -> End {
    let failures = match tempfile::tempdir() {
        Ok(failures) => failures,
        Err(source) => {
            let blame = Blame::certain(Error::Prepare { action: "make a temporary folder", source });
            orders.tell(News::Failed(&blame));
            return End::Failed(blame);
        }
    };
    let mut job = Job::new(part.first_rank, failures.path());
    let mut output = Vec::new();
    for local_rank in 0..plan.local_ranks {
        match start(plan, part, local_rank, failures.path()) {
            Ok(mut child) => {
                output.extend(print_output(part.first_rank + local_rank, &mut child));
                job.add(child);
            }
            Err(source) => {
                let (rank, program) = (part.first_rank + local_rank, plan.program.clone());
                return job.fail(Blame::certain(Error::Start { rank, program, source }), orders);
            }
        }
    }
    let end = job.supervise(orders);
    drain(output);
    end
}

/// File in which rank `rank` reports its failure.
fn failure_file(folder: &Path, rank: usize) -> PathBuf {
    folder.join(format!("rank-{rank}.json"))
}

/// Starts a rank of this host. Rank 0 inherits the socket of the rendezvous; it alone, so that peers that connect learn of
/// its death.
fn start(plan: &LaunchPlan, part: &Part, local_rank: usize, failures: &Path) -> io::Result<Child> {
    let rank = part.first_rank + local_rank;
    let mut command = Command::new(&plan.program);
    command
        .args(&plan.args)
        .envs(plan.env.iter().map(|(name, value)| (name, value)))
        .envs(anyroll_backends::rank_environment())
        .env("RANK", rank.to_string())
        .env("LOCAL_RANK", local_rank.to_string())
        .env("WORLD_SIZE", part.world_size.to_string())
        .env("MASTER_ADDR", &part.master_addr)
        .env("MASTER_PORT", part.master_port.to_string())
        .env("OMP_NUM_THREADS", plan.threads.to_string())
        .env(child::FAILURE_FILE, failure_file(failures, rank))
        // Closes when the parent ends; `watch_parent` reads it.
        .stdin(Stdio::piped())
        // A separate process group: Ctrl-C on the terminal reaches the parent only, which forwards it once,
        // and a rank can be killed with its child processes.
        .process_group(0);
    if let Some(socket) = part.listener.take() {
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

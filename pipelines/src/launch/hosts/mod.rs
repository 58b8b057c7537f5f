//! A job on several hosts, each with a supervisor that starts the ranks of its host.
//!
//! The supervisor of host 0 leads: it listens at a port, waits until all hosts have come, and starts attempts. An attempt
//! has a number and a rendezvous of its own. The others follow: they start their ranks when told to, and tell how these
//! ended. A failure anywhere ends the ranks everywhere, and the leader decides if there is another attempt. An elastic job
//! goes on without hosts that do not come back. A host that is there and has no place in an attempt waits for the next one.
//!
//! A supervisor hears from the other side of its [`Link`](crate::link::Link) every second. One that is silent is given up, so that
//! every wait for another host has an end. c10d's store is not used here, since many of its calls have none.

mod follower;
mod leader;

use std::fs;
use std::io;
use std::net::{SocketAddr, ToSocketAddrs};
use std::path::PathBuf;
use std::time::Duration;

use anyroll_backends::Listener;
use anyroll_config::error_chain::one_line;
use serde::{Deserialize, Serialize};

use super::supervise::Blame;
use super::{Outcome, Part};

pub use follower::follow;
pub use leader::Leader;

/// Hosts of a job, and the place of this one among them.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Hosts {
    /// Number of hosts.
    pub nnodes: usize,
    /// Index of this host.
    pub node_rank: usize,
    /// Address of host 0.
    pub master_addr: String,
    /// Port at which its supervisor listens.
    pub master_port: u16,
    /// Wait for all hosts, at the start and after one is lost.
    pub join_timeout: Duration,
}

impl Hosts {
    fn address(&self) -> String {
        format!("{}:{}", self.master_addr, self.master_port)
    }

    fn resolve(&self) -> io::Result<Vec<SocketAddr>> {
        Ok((self.master_addr.as_str(), self.master_port).to_socket_addrs()?.collect())
    }

    /// This host's part of an attempt, whose ranks meet at a port of host 0.
    fn part(&self, seat: Seat, local_ranks: usize, master_port: u16, listener: Listener) -> Part {
        Part {
            first_rank: seat.index * local_ranks,
            world_size: seat.hosts * local_ranks,
            master_addr: self.master_addr.clone(),
            master_port,
            listener,
        }
    }
}

/// Place of a host among those of an attempt.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Deserialize, Serialize)]
struct Seat {
    /// From 0. That of host 0 is 0.
    index: usize,
    /// Number of hosts, which is below that of the job after some were lost.
    hosts: usize,
}

/// First words of a follower.
#[derive(Clone, Debug, PartialEq, Eq, Deserialize, Serialize)]
struct Hello {
    version: String,
    nnodes: usize,
    node_rank: usize,
    local_ranks: usize,
    name: String,
}

impl Hello {
    fn of(hosts: &Hosts, local_ranks: usize) -> Self {
        let version = env!("CARGO_PKG_VERSION").to_owned();
        Self { version, nnodes: hosts.nnodes, node_rank: hosts.node_rank, local_ranks, name: host_name() }
    }
}

/// Words of one supervisor to another.
#[derive(Clone, Debug, PartialEq, Eq, Deserialize, Serialize)]
enum Message {
    /// A follower has come.
    Hello(Hello),
    /// The leader does not take a follower.
    Refused(String),
    /// The leader starts an attempt.
    Start {
        /// Its number, from 1.
        attempt: u32,
        /// Port of the ranks' rendezvous.
        port: u16,
        /// The follower's place among the hosts of the attempt.
        seat: Seat,
        /// Folder of the run to continue; `None`: the ranks begin one.
        resume: Option<PathBuf>,
    },
    /// The sender's ranks are interrupted.
    Interrupt(i32),
    /// The sender's ranks are killed by their user.
    Kill,
    /// A follower's ranks fail.
    Failed(Report),
    /// The leader ends the attempt.
    End,
    /// A follower's ranks have ended; `None` after a failure.
    Ended(Option<Outcome>),
    /// The leader ends the job. The error is in words.
    Over(Result<Outcome, String>),
}

impl crate::link::Message for Message {}

/// A failure of a host's ranks.
#[derive(Clone, Debug, PartialEq, Eq, Deserialize, Serialize)]
struct Report {
    likelihood: u8,
    reason: String,
    cause: String,
}

impl Report {
    fn of(blame: &Blame) -> Self {
        let error = &blame.error;
        Self { likelihood: blame.likelihood, reason: one_line(error), cause: error.cause() }
    }
}

/// This host's name, for people.
pub fn host_name() -> String {
    let name = fs::read_to_string("/proc/sys/kernel/hostname").unwrap_or_default();
    name.trim().to_owned()
}

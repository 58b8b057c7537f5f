//! [`Collective`]: what a communication library supplies. What strategies use is [`crate::CollectiveGroup`].

mod address;
pub(crate) mod communicator;
mod group;
mod host_copies;
pub(crate) mod in_rank_order;
mod links;
mod notice;
pub(crate) mod rendezvous;
pub(crate) mod sockets;

use std::{fmt, sync::Arc};

use crate::{Buffer, DType, Error, Result, Stream};
pub use group::{CollectiveGroup, Work};
pub use rendezvous::{Listener, Rendezvous, Store};
pub use sockets::connect_through_host;

/// The operation that combines elements of several ranks.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ReduceOp {
    /// Sum; integers wrap.
    Sum,
    /// Sum over world size; floats only.
    Avg,
    /// Smallest.
    Min,
    /// Largest.
    Max,
}

impl ReduceOp {
    /// Every reduction.
    pub const ALL: [Self; 4] = [Self::Sum, Self::Avg, Self::Min, Self::Max];

    /// Returns an error for the average of integers, which has no meaning.
    pub fn check(self, dtype: DType) -> Result<()> {
        if self == Self::Avg && !dtype.is_float() {
            return Err(Error::NoReduction { op: "avg", dtype });
        }
        Ok(())
    }
}

/// The order in which elements of several ranks are summed.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Reduction {
    /// In rank order, floats in fp32, rounded once: the same bits on every rank, machine and backend.
    #[default]
    Ordered,
    /// In the communication library's own order: faster for all-reduce, and equal within rounding. A backend that only
    /// sums in rank order does that.
    Library,
}

/// One transfer of a batch.
#[derive(Clone, Debug)]
pub enum P2p {
    /// Sends the whole buffer to a rank.
    Send {
        /// The source.
        buffer: Buffer,
        /// The other rank.
        to: usize,
    },
    /// Receives the whole buffer from a rank.
    Recv {
        /// The destination.
        buffer: Buffer,
        /// The other rank.
        from: usize,
    },
}

impl P2p {
    /// The buffer that is transferred.
    pub fn buffer(&self) -> &Buffer {
        match self {
            Self::Send { buffer, .. } | Self::Recv { buffer, .. } => buffer,
        }
    }
}

/// One communicator.
///
/// # What callers may rely on
/// - Every rank calls the same operations with the same lengths in the same order, on one stream at a time.
///   Operations enqueue on `stream` and return; they run in stream order.
/// - [`Collective::check`] returns errors that happen later. From then on every call is an error: a communicator does not
///   recover. The streams continue: an event recorded after a failed operation completes, so a waiter calls `check` before
///   it uses the result.
/// - `all_reduce` gives every rank the same bits. If [`Collective::sums_in_rank_order`], it and `reduce_scatter` sum floats
///   in fp32, in rank order, and round once. Otherwise sums are equal within rounding.
/// - An operation of no elements does nothing.
/// - Buffers live until the operation is done; [`crate::Work`] keeps them.
pub trait Collective: Send + Sync + fmt::Debug {
    /// This process's number in the communicator.
    fn rank(&self) -> usize;
    /// Number of ranks.
    fn world_size(&self) -> usize;
    /// Returns true if sums of floats are exact in the sense above: the same bits on every machine.
    fn sums_in_rank_order(&self) -> bool;
    /// Copies `root`'s `buffer` to every rank's.
    fn broadcast(&self, buffer: &Buffer, root: usize, stream: &Stream) -> Result<()>;
    /// Replaces every rank's `buffer` by the reduction of all.
    fn all_reduce(&self, buffer: &Buffer, op: ReduceOp, stream: &Stream) -> Result<()>;
    /// Writes every rank's `input` to `output`, in rank order: `output.len() == input.len() * world_size`. `input` may be
    /// this rank's own slice of `output`.
    fn all_gather(&self, output: &Buffer, input: &Buffer, stream: &Stream) -> Result<()>;
    /// Writes this rank's slice of the reduction to `output`: `input.len() == output.len() * world_size`. `output` may
    /// be this rank's own slice of `input`.
    fn reduce_scatter(&self, output: &Buffer, input: &Buffer, op: ReduceOp, stream: &Stream) -> Result<()>;
    /// Sends slice `i` of `input` to rank `i`, and writes the slice from rank `i` to slice `i` of `output`. The lengths are
    /// equal.
    fn all_to_all(&self, output: &Buffer, input: &Buffer, stream: &Stream) -> Result<()>;
    /// Makes all transfers at once, so that two ranks may send to each other. Between two ranks, transfers of one direction
    /// match in order.
    fn batch(&self, transfers: &[P2p], stream: &Stream) -> Result<()>;
    /// Completes once every rank has reached it.
    fn barrier(&self, stream: &Stream) -> Result<()>;
    /// Returns a communicator of the ranks with the same color, ordered by `key`, then by rank; `None` for a rank without a
    /// color. Every rank of `self` calls it. Blocks the host.
    fn split(&self, color: Option<u32>, key: i32) -> Result<Option<Arc<dyn Collective>>>;
    /// Takes the name of each rank's host, for messages.
    fn name_hosts(&self, _names: &[String]) {}
    /// Returns true if operations may be part of a recording of their stream ([`crate::Graph`]).
    fn is_recordable(&self) -> bool {
        false
    }
    /// The rank that the operation in flight waits for, in words, if the library tells it.
    fn waits_for(&self) -> Option<String> {
        None
    }
    /// Returns the error that ended this communicator, if one has.
    fn check(&self) -> Result<()>;
    /// Ends the communicator: pending and later operations fail, and nothing on this rank waits for them.
    /// If other ranks could take the end for a result, the rank sends them `why` first, and they give up as well.
    fn abort(&self, why: &str);
}

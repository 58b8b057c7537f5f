//! [`Collective`]: what a communication library supplies. What strategies use is [`crate::CollectiveGroup`].

pub(crate) mod communicator;
pub(crate) mod gloo;
pub(crate) mod group;
mod host_copies;
pub(crate) mod in_rank_order;
mod notice;
pub(crate) mod rendezvous;

use std::{fmt, sync::Arc};

use crate::{Buffer, DType, Error, Result, Stream};

/// How elements of several ranks become one.
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

    /// An error for a pair that has no meaning: the average of integers.
    pub fn check(self, dtype: DType) -> Result<()> {
        if self == Self::Avg && !dtype.is_float() {
            return Err(Error::NoReduction { op: "avg", dtype });
        }
        Ok(())
    }
}

/// Who adds up what several ranks send.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Reduction {
    /// In rank order, floats in fp32, rounded once: the same bits on every rank, machine and backend.
    #[default]
    Ordered,
    /// As the communication library likes best: faster for all-reduce, and within rounding. A backend whose only
    /// way is the ordered one takes that.
    Library,
}

/// One transfer of a batch.
#[derive(Clone, Debug)]
pub enum P2p {
    /// Sends the whole buffer to a rank.
    Send {
        /// What.
        buffer: Buffer,
        /// To whom; not the rank itself.
        to: usize,
    },
    /// Receives the whole buffer from a rank.
    Recv {
        /// Where to.
        buffer: Buffer,
        /// From whom; not the rank itself.
        from: usize,
    },
}

impl P2p {
    /// What is transferred.
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
/// - Errors that happen later come out of [`Collective::check`], and from then on every call is an error: a
///   communicator does not recover. After a failure the streams go on: an event recorded behind a failed
///   operation completes, so whoever waits must look at `check` before it uses the result.
/// - `all_reduce` gives every rank the same bits, and where [`Collective::sums_in_rank_order`] says so, it and
///   `reduce_scatter` sum floats in fp32, in rank order, and round once. Elsewhere sums are within rounding.
/// - An operation of no elements does nothing.
/// - Buffers must live until the operation is done; [`crate::Work`] sees to it.
pub trait Collective: Send + Sync + fmt::Debug {
    /// This process's number in the communicator.
    fn rank(&self) -> usize;
    /// How many there are.
    fn world_size(&self) -> usize;
    /// Whether sums of floats are exact in the sense above: the same bits on every machine.
    fn sums_in_rank_order(&self) -> bool;
    /// Everybody's `buffer` becomes `root`'s.
    fn broadcast(&self, buffer: &Buffer, root: usize, stream: &Stream) -> Result<()>;
    /// Everybody's `buffer` becomes the reduction of all.
    fn all_reduce(&self, buffer: &Buffer, op: ReduceOp, stream: &Stream) -> Result<()>;
    /// `output` is everybody's `input` in rank order: `output.len() == input.len() * world_size`. `input` may be
    /// this rank's own slice of `output`.
    fn all_gather(&self, output: &Buffer, input: &Buffer, stream: &Stream) -> Result<()>;
    /// `output` is this rank's slice of the reduction: `input.len() == output.len() * world_size`. `output` may
    /// be this rank's own slice of `input`.
    fn reduce_scatter(&self, output: &Buffer, input: &Buffer, op: ReduceOp, stream: &Stream) -> Result<()>;
    /// Slice `i` of `input` goes to rank `i`, whose slice `rank` of `output` it becomes. Equal lengths.
    fn all_to_all(&self, output: &Buffer, input: &Buffer, stream: &Stream) -> Result<()>;
    /// All transfers at once, so that two ranks may send to each other. Between two ranks, transfers of one
    /// direction match in order.
    fn batch(&self, transfers: &[P2p], stream: &Stream) -> Result<()>;
    /// Done once every rank has got here.
    fn barrier(&self, stream: &Stream) -> Result<()>;
    /// A communicator of the ranks with the same color, ordered by `key`, then by rank; `None` for a rank
    /// without a color. Every rank of `self` calls; blocks the host.
    fn split(&self, color: Option<u32>, key: i32) -> Result<Option<Arc<dyn Collective>>>;
    /// The error that ended this communicator, if one has.
    fn check(&self) -> Result<()>;
    /// Ends the communicator: pending and later operations fail, and nobody on this rank waits for them.
    /// Where a rank that ends its part leaves others with what looks like a result, it tells them `why` first, and they
    /// give up as well.
    fn abort(&self, why: &str);
}

//! Reductions in rank order, out of operations of a library's that only move elements.

use super::communicator::Workspace;
use crate::{Buffer, Collective, ReduceOp, Result, Stream};

/// Up to this many bytes of all ranks, each rank gathers and reduces everything: for small buffers, one transfer instead of
/// two matters most.
const SMALL_BYTES: usize = 2 << 20;

/// A communicator that moves elements, and reduces what has arrived. No buffer is empty.
pub(crate) trait InRankOrder: Collective {
    /// Everybody's `output` becomes all `input`s, in rank order.
    fn gather(&self, output: &Buffer, input: &Buffer, stream: &Stream) -> Result<()>;

    /// Slice r of `output` becomes this rank's slice of rank r's `input`.
    fn exchange(&self, output: &Buffer, input: &Buffer, stream: &Stream) -> Result<()>;

    /// `output` becomes the reduction of `received`, which holds as many slices of its length as there are ranks.
    fn reduce(&self, output: &Buffer, received: &Buffer, op: ReduceOp, stream: &Stream) -> Result<()>;

    /// Memory for the slices that arrive.
    fn workspace(&self) -> &Workspace;

    /// Everybody's `buffer` becomes the reduction of all, each rank computing all of it.
    fn reduce_everywhere(&self, buffer: &Buffer, op: ReduceOp, stream: &Stream) -> Result<()> {
        let received = self.workspace().take(buffer.len_bytes() * self.world_size(), stream)?;
        let received = received.cast(buffer.dtype());
        self.gather(&received, buffer, stream)?;
        self.reduce(buffer, &received, op, stream)
    }

    /// Writes this rank's slice of the reduction of all ranks' `input` to `output`.
    fn reduce_slice(&self, output: &Buffer, input: &Buffer, op: ReduceOp, stream: &Stream) -> Result<()> {
        let received = self.workspace().take(input.len_bytes(), stream)?.cast(input.dtype());
        self.exchange(&received, input, stream)?;
        self.reduce(output, &received, op, stream)
    }

    /// Everybody's `buffer` becomes the reduction of all.
    fn reduce_all(&self, buffer: &Buffer, op: ReduceOp, stream: &Stream) -> Result<()> {
        if buffer.len_bytes() * self.world_size() <= SMALL_BYTES {
            return self.reduce_everywhere(buffer, op, stream);
        }
        // Each rank reduces one slice, then everybody gets every slice. Equal slices leave a rest of less than
        // an element a rank.
        let slice = buffer.len() / self.world_size();
        let whole = buffer.slice(0..slice * self.world_size());
        let mine = whole.slice(self.rank() * slice..(self.rank() + 1) * slice);
        self.reduce_slice(&mine, &whole, op, stream)?;
        self.gather(&whole, &mine, stream)?;
        let rest = buffer.slice(whole.len()..buffer.len());
        if rest.is_empty() { Ok(()) } else { self.reduce_everywhere(&rest, op, stream) }
    }
}

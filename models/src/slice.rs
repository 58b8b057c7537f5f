//! The part of a rank in a batch that several ranks run together: a [`Slice`] of its rows.
//!
//! All blocks but attention work row by row. Attention needs all rows of a sequence. Where ranks can share the heads, its
//! inputs travel from this rank's rows with all heads to all rows with this rank's heads, and its output travels back
//! (DeepSpeed-Ulysses, Jacobs et al. 2023). Elsewhere keys and values of all rows come to each rank (Llama 3, Dubey et al.
//! 2024). Ranks take turns: they run the batch of the first, then of the second.

use std::{cell::OnceCell, fmt, ops::Range, sync::Arc};

use anyroll_backends::ops::Packing;
use tch::{Device, Kind, Tensor};

use crate::Result;

/// Ranks that run the same passes together. Each calls the same operations with the same shapes in the same order.
pub trait Peers: fmt::Debug + Send + Sync {
    /// This rank's number among them.
    fn rank(&self) -> usize;

    /// Number of ranks.
    fn count(&self) -> usize;

    /// Sends part `i` of `parts` `[ranks, ...]` to rank `i`. Returns the parts received, in rank order.
    ///
    /// # Errors
    /// A failure of the device or of another rank.
    fn all_to_all(&self, parts: &Tensor) -> Result<Tensor>;

    /// Sends the first `sent[0]` rows of `rows` `[R, ...]` to rank 0, those behind them to rank 1 and so on. Returns the rows
    /// received, `received[i]` of rank `i`, in rank order. A number may be 0; ranks know each other's. Frees `rows` early.
    ///
    /// # Errors
    /// A failure of the device or of another rank.
    fn all_to_all_rows(&self, rows: Tensor, sent: &[usize], received: &[usize]) -> Result<Tensor>;

    /// Returns the tensors of all ranks, stacked in rank order: `[ranks, ...]`.
    ///
    /// # Errors
    /// A failure of the device or of another rank.
    fn all_gather(&self, own: &Tensor) -> Result<Tensor>;

    /// Replaces `x` by the sum over all ranks: the same bits on each.
    ///
    /// # Errors
    /// A failure of the device or of another rank.
    fn sum_(&self, x: &mut Tensor) -> Result<()>;

    /// Returns true if exchanges can be part of a recorded step.
    fn are_recorded(&self) -> bool;

    /// Returns memory for exchanges in recorded steps, of up to `elements` elements of each rank, of the type and on the
    /// device of `like`.
    ///
    /// # Errors
    /// The device's error (out of memory).
    fn room(&self, elements: i64, like: &Tensor) -> Result<Arc<dyn Room>>;
}

/// Memory in which ranks exchange their parts in recorded steps. All exchanges are on libtorch's stream, and a recorded step
/// has an even number.
pub trait Room: fmt::Debug + Send + Sync {
    /// Returns the memory of this rank's part in the next exchange, which is to be written before.
    ///
    /// # Errors
    /// libtorch's.
    fn own(&self, size: &[i64]) -> Result<Tensor>;

    /// Writes the sum of all ranks' parts to `sum`, or adds it, rounded, to `sum`: the same bits on each rank.
    ///
    /// # Errors
    /// A failure of the device or of another rank.
    fn sum_into(&self, sum: &mut Tensor, is_added: bool) -> Result<()>;

    /// Joins the parts `[rows, width]` of all ranks, of each the first `count` columns, until `joined` `[rows, columns]` is full.
    ///
    /// # Errors
    /// A failure of the device or of another rank.
    fn join_into(&self, joined: &mut Tensor, widths: [i64; 2]) -> Result<()>;

    /// Bounds the time of the recorded steps that run now.
    ///
    /// # Errors
    /// A failure of the device or of another rank.
    fn watch(&self) -> Result<()>;

    /// Returns the failure that ended the exchanges, if one has: what was read before is then no result. Waits for the
    /// device.
    ///
    /// # Errors
    /// The failure itself.
    fn check(&self) -> Result<()>;
}

/// Joins parts `[ranks, rows, width]`, of each the first `count` columns, until `joined` `[rows, columns]` is full.
///
/// # Errors
/// libtorch's.
pub fn join_columns(parts: &Tensor, count: i64, joined: &mut Tensor) -> Result<()> {
    let columns = joined.size()[1];
    for (rank, start) in (0..).zip((0..columns).step_by(count as usize)) {
        let count = count.min(columns - start);
        let part = parts.f_select(0, rank)?.f_narrow(1, 0, count)?;
        joined.f_narrow(1, start, count)?.f_copy_(&part)?;
    }
    Ok(())
}

/// Returns the first of `count` ranks whose others do not exist: for a model whose part is planned and not run.
pub fn absent(count: usize) -> Arc<dyn Peers> {
    Arc::new(Absent { count })
}

#[derive(Debug)]
struct Absent {
    count: usize,
}

impl Peers for Absent {
    fn rank(&self) -> usize {
        0
    }

    fn count(&self) -> usize {
        self.count
    }

    fn all_to_all(&self, _: &Tensor) -> Result<Tensor> {
        unreachable!("a planned model is not run")
    }

    fn all_to_all_rows(&self, _: Tensor, _: &[usize], _: &[usize]) -> Result<Tensor> {
        unreachable!("a planned model is not run")
    }

    fn all_gather(&self, _: &Tensor) -> Result<Tensor> {
        unreachable!("a planned model is not run")
    }

    fn sum_(&self, _: &mut Tensor) -> Result<()> {
        unreachable!("a planned model is not run")
    }

    fn are_recorded(&self) -> bool {
        false
    }

    fn room(&self, _: i64, _: &Tensor) -> Result<Arc<dyn Room>> {
        unreachable!("a planned model is not run")
    }
}

/// The ranks that run their batches together.
#[derive(Clone, Debug)]
pub struct Sharers {
    /// All of them: each runs the batches of all.
    pub all: Arc<dyn Peers>,
    /// Ranks that each take a slice of the rows; `None` if this rank runs all rows.
    pub rows: Option<Arc<dyn Peers>>,
}

/// A batch's place among those that several ranks run together.
#[derive(Debug)]
pub(crate) struct Turn {
    pub(crate) peers: Arc<dyn Peers>,
    /// The rank whose batch it is.
    pub(crate) owner: usize,
    /// Number of the batch's targets.
    pub(crate) targets: i64,
}

impl Turn {
    /// Returns fp32 numbers of all targets, `[M]` each, which only the batch's rank has.
    pub(crate) fn of_owner<const N: usize>(
        &self,
        of_all: Option<[Tensor; N]>,
        device: Device,
    ) -> Result<Tensor> {
        let sent = match of_all {
            Some(of_all) => Tensor::f_stack(&of_all, 1)?,
            None => Tensor::f_zeros([self.targets, N as i64], (Kind::Float, device))?,
        };
        Ok(self.peers.all_gather(&sent)?.f_select(0, self.owner as i64)?)
    }
}

/// Division of a batch's rows among ranks, in equal numbers, with padding after the last row.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Division {
    ranks: usize,
    /// Number of rows of a piece, of which a rank has one or two.
    piece: usize,
    /// True if a rank has a piece and the one that is as far from the end: attention of a long sequence is then as much on
    /// each rank. False if it has one piece.
    pub(crate) is_mirrored: bool,
}

impl Division {
    pub(crate) fn new(rows: usize, ranks: usize, is_mirrored: bool) -> Division {
        let pieces = if is_mirrored { 2 * ranks } else { ranks };
        Division { ranks, piece: rows.div_ceil(pieces), is_mirrored }
    }

    /// Returns the pieces of a rank.
    pub(crate) fn pieces(self, rank: usize) -> Vec<Range<usize>> {
        let piece = |index: usize| index * self.piece..(index + 1) * self.piece;
        match self.is_mirrored {
            true => vec![piece(rank), piece(2 * self.ranks - 1 - rank)],
            false => vec![piece(rank)],
        }
    }

    /// Returns the number of a rank's rows.
    pub(crate) fn own(self) -> usize {
        if self.is_mirrored { 2 * self.piece } else { self.piece }
    }

    /// Returns the rank of a row, and the row's number there.
    pub(crate) fn place(self, row: usize) -> (usize, usize) {
        let (index, within) = (row / self.piece, row % self.piece);
        match index < self.ranks {
            true => (index, within),
            false => (2 * self.ranks - 1 - index, self.piece + within),
        }
    }
}

/// This rank's part of a batch by a [`Division`]. Its batch has the tokens and targets of these rows, and the packing of all.
#[derive(Debug)]
pub(crate) struct Slice {
    pub(crate) peers: Arc<dyn Peers>,
    pub(crate) division: Division,
    /// This rank's rows before the padding, of the whole batch's.
    pub(crate) pieces: Vec<Range<i64>>,
    /// Place of each of this rank's rows in its sequences: int64 `[n]`.
    pub(crate) positions: Tensor,
    /// Indices of this rank's targets among all: int64 `[m]`.
    pub(crate) own_targets: Tensor,
    /// Place of each target of the batch in the padded targets of all ranks, one after the other: int64 `[M]`.
    pub(crate) places: Tensor,
    /// Number of targets to which every rank's are padded.
    pub(crate) padded_targets: i64,
    /// Made when it is first asked for.
    pub(crate) seen: OnceCell<Seen>,
}

/// Keys that a slice's rows see.
#[derive(Debug)]
pub(crate) struct Seen {
    /// The sequences up to each piece's last row, whose queries are the piece's rows.
    pub(crate) packing: Packing,
    /// The rows of the keys, among those of the whole batch.
    pub(crate) rows: Range<i64>,
}

impl Slice {
    /// Returns what this rank's rows see of the batch, whose packing is `whole`.
    pub(crate) fn seen(&self, whole: &Packing) -> Result<&Seen> {
        if self.seen.get().is_none() {
            let (packing, rows) = whole.of_queries(&self.pieces)?;
            self.seen.set(Seen { packing, rows }).expect("nobody else is here");
        }
        Ok(self.seen.get().expect("just made"))
    }

    /// Returns the number of this rank's rows before the padding.
    pub(crate) fn real_rows(&self) -> i64 {
        self.pieces.iter().map(|piece| piece.end - piece.start).sum()
    }

    /// Returns the number of ranks.
    pub(crate) fn ranks(&self) -> i64 {
        self.peers.count() as i64
    }

    /// Returns the number of this rank's rows.
    pub(crate) fn rows(&self) -> i64 {
        self.positions.size()[0]
    }

    /// Joins fp32 numbers of each rank's targets, `[m]` each, to those of the whole batch, `[M]` each.
    pub(crate) fn join<const N: usize>(&self, of_own: [&Tensor; N]) -> Result<[Tensor; N]> {
        let own = padded(&Tensor::f_stack(&of_own, 1)?, self.padded_targets)?;
        columns(&self.peers.all_gather(&own)?.f_flatten(0, 1)?.f_index_select(0, &self.places)?)
    }
}

/// Splits `[M, N]` into N dense columns.
pub(crate) fn columns<const N: usize>(rows: &Tensor) -> Result<[Tensor; N]> {
    let columns = rows.f_tr()?.f_contiguous()?.f_unbind(0)?;
    Ok(columns.try_into().expect("one column for each"))
}

/// Returns `x` with zeros after its rows, `rows` in all.
pub(crate) fn padded(x: &Tensor, rows: i64) -> Result<Tensor> {
    let mut size = x.size();
    size[0] = rows - size[0];
    if size[0] == 0 {
        return Ok(x.f_contiguous()?);
    }
    Ok(Tensor::f_cat(&[x, &Tensor::f_zeros(&size, (x.kind(), x.device()))?], 0)?)
}

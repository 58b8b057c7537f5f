//! Packing: sequences of unequal length in one batch without padding.

use std::cell::OnceCell;

use tch::{Device, Kind, Tensor};

use super::copies::Copies;
use super::tiled::Layout;
use super::{Error, Result};
use crate::{device::opened, ffi, kernels::rows::ceil_div};

/// Sequences back to back: sequence `b` is the tokens `offsets[b] .. offsets[b + 1]` of a batch. Each token has a row, its own
/// one unless sequences have tokens in common.
///
/// Kernels index with these numbers unchecked, so they are made here from lengths and cannot be changed.
#[derive(Debug)]
pub struct Packing {
    offsets: Vec<i64>,
    sharing: Option<Sharing>,
    offsets_tensor: Tensor,
    offsets_int32: Tensor,
    positions: Tensor,
    max_len: i64,
    pages: OnceCell<Pages>,
    layout: OnceCell<Layout>,
}

/// Tokens that have the rows of others.
#[derive(Debug)]
struct Sharing {
    /// Copies of rows, one for each token.
    copies: Copies,
    /// The row of each token.
    rows: Vec<i64>,
    /// Number of tokens at each sequence's start whose rows belong to earlier sequences.
    common: Vec<i64>,
    /// The place of each row in its sequences: int64 `[N]`.
    positions: Tensor,
}

/// Places of a packing's tokens in a cache of blocks.
#[derive(Debug)]
pub(super) struct Pages {
    /// int32 `[N, W]`: the blocks of each token's sequence.
    pub tables: Tensor,
    /// int64 `[N]`: each token's place in the cache.
    pub places: Tensor,
    pub blocks: i64,
}

impl Packing {
    /// Packs sequences of these lengths; a length may be 0. The tensors go to `device`.
    ///
    /// # Errors
    /// A negative length, or libtorch's error.
    pub fn new(lengths: &[i64], device: Device) -> Result<Packing> {
        if let Some(length) = lengths.iter().find(|&&length| length < 0) {
            let problem = format!("holds {length}");
            return Err(Error::Argument { op: "packing", argument: "lengths", problem });
        }
        let mut offsets = Vec::with_capacity(lengths.len() + 1);
        offsets.push(0);
        let mut positions = Vec::with_capacity(lengths.iter().sum::<i64>() as usize);
        for &length in lengths {
            positions.extend(0..length);
            offsets.push(positions.len() as i64);
        }
        let offsets_tensor = upload(&offsets, device)?;
        Ok(Packing {
            offsets_int32: offsets_tensor.f_to_kind(Kind::Int)?,
            offsets_tensor,
            positions: upload(&positions, device)?,
            max_len: lengths.iter().copied().max().unwrap_or(0),
            offsets,
            sharing: None,
            pages: OnceCell::new(),
            layout: OnceCell::new(),
        })
    }

    /// The same for sequences that may share their first tokens with earlier ones. `rows` has the row of each token, numbered by
    /// first use.
    ///
    /// # Errors
    /// The same as [`Self::new`]; also if the numbers of rows and tokens differ, rows are not numbered by first use, or a
    /// sequence's rows do not rise.
    pub fn sharing(lengths: &[i64], rows: &[i64], device: Device) -> Result<Packing> {
        let packing = Packing::new(lengths, device)?;
        let refuse = |problem: String| Error::Argument { op: "packing", argument: "rows", problem };
        if rows.len() as i64 != packing.tokens() {
            return Err(refuse(format!("are {}, of {} tokens", rows.len(), packing.tokens())));
        }
        let (mut common, mut next) = (Vec::with_capacity(lengths.len()), 0);
        for (sequence, ends) in packing.offsets.windows(2).enumerate() {
            let own = &rows[ends[0] as usize..ends[1] as usize];
            if let Some(pair) = own.windows(2).find(|pair| pair[0] >= pair[1]) {
                return Err(refuse(format!("hold {} behind {}, in sequence {sequence}", pair[1], pair[0])));
            }
            let shared = own.iter().take_while(|&&row| row < next).count();
            common.push(shared as i64);
            next += (own.len() - shared) as i64;
        }
        if next == packing.tokens() {
            return Ok(packing);
        }
        let copies = Copies::new(rows, device)?;
        let positions = packing.positions.f_index_select(0, copies.first())?;
        let sharing = Some(Sharing { copies, rows: rows.to_vec(), common, positions });
        Ok(Packing { sharing, ..packing })
    }

    /// The number of sequences B.
    pub fn sequences(&self) -> i64 {
        self.offsets.len() as i64 - 1
    }

    /// The number of tokens of all sequences.
    pub fn tokens(&self) -> i64 {
        self.offsets[self.offsets.len() - 1]
    }

    /// The number of rows N of the batch, which is smaller where sequences have tokens in common.
    pub fn rows(&self) -> i64 {
        self.copies().map_or_else(|| self.tokens(), Copies::rows)
    }

    /// The row of each token, if there are fewer rows than tokens.
    pub fn shared_rows(&self) -> Option<&[i64]> {
        self.sharing.as_ref().map(|sharing| sharing.rows.as_slice())
    }

    /// The rows' copies in the order of the tokens, if there are fewer rows.
    pub(super) fn copies(&self) -> Option<&Copies> {
        self.sharing.as_ref().map(|sharing| &sharing.copies)
    }

    /// Attention by what knows of no row in common: with a row for each token, made of `[N, heads, D]`. It gives outputs and
    /// log-sum-exps of each, and this those of each row.
    pub(super) fn over_tokens(
        &self,
        qkv: [&Tensor; 3],
        attend: impl FnOnce(&Tensor, &Tensor, &Tensor) -> Result<(Tensor, Tensor)>,
    ) -> Result<(Tensor, Tensor)> {
        let Some(copies) = self.copies() else {
            let [q, k, v] = qkv;
            return attend(q, k, v);
        };
        let [q, k, v] = qkv.map(|rows| copies.spread(rows));
        let (out, lse) = attend(&q?, &k?, &v?)?;
        Ok((copies.of_first(&out)?, copies.of_first(&lse.f_contiguous()?)?))
    }

    /// The length of the longest sequence.
    pub fn max_len(&self) -> i64 {
        self.max_len
    }

    /// The first token of each sequence, and the end of the last: B + 1 numbers.
    pub fn offsets(&self) -> &[i64] {
        &self.offsets
    }

    /// [`Self::offsets`] on the device: int64 `[B + 1]`.
    pub fn offsets_tensor(&self) -> &Tensor {
        &self.offsets_tensor
    }

    /// The same as int32, as libtorch's attention takes them.
    pub(super) fn offsets_int32(&self) -> &Tensor {
        &self.offsets_int32
    }

    /// The length that all sequences have, if they do.
    pub(super) fn uniform_len(&self) -> Option<i64> {
        (self.max_len * self.sequences() == self.tokens()).then_some(self.max_len)
    }

    /// Places of its tokens in blocks of `block_tokens`, the same in every call.
    pub(super) fn pages(&self, block_tokens: i64) -> Result<&Pages> {
        if self.pages.get().is_none() {
            let pages = self.lay_out(block_tokens)?;
            self.pages.set(pages).expect("nobody else is here");
        }
        Ok(self.pages.get().expect("just made"))
    }

    /// The layout that our kernels of attention take, the same in every call.
    pub(super) fn layout(&self) -> Result<&Layout> {
        if self.layout.get().is_none() {
            let (common, rows): (&[i64], &[i64]) =
                self.sharing.as_ref().map_or((&[], &[]), |sharing| (&sharing.common, &sharing.rows));
            let layout = Layout::new(&self.offsets, common, rows, self.positions.device())?;
            self.layout.set(layout).expect("nobody else is here");
        }
        Ok(self.layout.get().expect("just made"))
    }

    fn lay_out(&self, block_tokens: i64) -> Result<Pages> {
        let table_len = ceil_div(self.max_len, block_tokens).max(1);
        let (mut tables, mut sequences, mut places) = (Vec::new(), Vec::new(), Vec::new());
        let mut blocks = 0;
        for (sequence, ends) in self.offsets.windows(2).enumerate() {
            let length = ends[1] - ends[0];
            // Those behind the sequence's own are not read.
            tables.extend((0..table_len).map(|index| blocks + index));
            sequences.extend((0..length).map(|_| sequence as i64));
            places.extend((0..length).map(|token| blocks * block_tokens + token));
            blocks += ceil_div(length, block_tokens);
        }
        let device = self.positions.device();
        let of_sequences = upload(&tables, device)?.f_to_kind(Kind::Int)?.f_view([-1, table_len])?;
        Ok(Pages {
            tables: of_sequences.f_index_select(0, &upload(&sequences, device)?)?,
            places: upload(&places, device)?,
            blocks,
        })
    }

    /// The place of each row in its sequences, from 0, on the device: int64 `[N]`.
    pub fn positions(&self) -> &Tensor {
        self.sharing.as_ref().map_or(&self.positions, |sharing| &sharing.positions)
    }

    /// The place of each token in its sequence.
    pub(super) fn positions_of_tokens(&self) -> &Tensor {
        &self.positions
    }
}

/// Copies values to a device, in the order of its stream. The host does not wait, unless libtorch has no page-locked memory for
/// this device.
///
/// # Errors
/// libtorch's error.
pub fn upload<T: tch::kind::Element>(values: &[T], device: Device) -> Result<Tensor> {
    let host = Tensor::f_from_slice(values)?;
    if device == Device::Cpu {
        return Ok(host);
    }
    // An accelerator that nobody has opened, as in a test of libtorch's own.
    let Some(at) = opened::torch_device(device) else { return Ok(host.f_to_device(device)?) };
    // SAFETY: a live tensor; the shim makes another and gives it away.
    let uploaded =
        unsafe { ffi::own_tensor(ffi::anyroll_tensor_upload(ffi::tensor_ptr(&host), at.kind, at.index)) };
    uploaded.map_err(|error| Error::Kernel { op: "upload", message: error.to_string() })
}

/// Returns a tensor on `device`; the same one if it is there already.
///
/// # Errors
/// libtorch's error.
pub fn moved(tensor: &Tensor, device: Device) -> Result<Tensor, tch::TchError> {
    if tensor.device() == device {
        return Ok(tensor.shallow_clone());
    }
    let mut there = Tensor::f_empty(tensor.size(), (tensor.kind(), device))?;
    copy_across(&mut there, tensor)?;
    Ok(there)
}

/// Copies a tensor into one of libtorch's own memory, on any device. A copy between two devices goes through libtorch's own
/// memory, which both can read: other memory may be private to its device.
///
/// # Errors
/// libtorch's error.
pub fn copy_across(to: &mut Tensor, from: &Tensor) -> Result<(), tch::TchError> {
    let (there, here) = (to.device(), from.device());
    if here == there || [here, there].contains(&Device::Cpu) {
        return to.f_copy_(from);
    }
    let mut own = from.f_empty_like()?;
    own.f_copy_(from)?;
    to.f_copy_(&own)
}

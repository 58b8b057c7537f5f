//! How sequences of unequal length lie in one batch without padding.

use tch::{Device, Tensor};

use super::check::Args;
use super::{Error, Result};

/// Sequences back to back: sequence `b` is the rows `offsets[b] .. offsets[b + 1]` of a batch.
///
/// Kernels index with these numbers unchecked, so they are made here from lengths and cannot be changed.
#[derive(Debug)]
pub struct Packing {
    offsets: Vec<i64>,
    offsets_tensor: Tensor,
    positions: Tensor,
    max_len: i64,
}

impl Packing {
    /// Packs sequences of these lengths; a length may be 0. The tensors go to `device`.
    ///
    /// # Errors
    /// A negative length, or libtorch's error.
    pub fn new(lengths: &[i64], device: Device) -> Result<Packing> {
        if let Some(length) = lengths.iter().find(|&&length| length < 0) {
            return Err(Args("packing").refuse("lengths", format!("holds {length}")));
        }
        let mut offsets = Vec::with_capacity(lengths.len() + 1);
        offsets.push(0);
        let mut positions = Vec::with_capacity(lengths.iter().sum::<i64>() as usize);
        for &length in lengths {
            positions.extend(0..length);
            offsets.push(positions.len() as i64);
        }
        let to_device = |values: &[i64]| -> Result<Tensor, Error> {
            Ok(Tensor::f_from_slice(values)?.f_to_device(device)?)
        };
        Ok(Packing {
            offsets_tensor: to_device(&offsets)?,
            positions: to_device(&positions)?,
            max_len: lengths.iter().copied().max().unwrap_or(0),
            offsets,
        })
    }

    /// The number of sequences B.
    pub fn sequences(&self) -> i64 {
        self.offsets.len() as i64 - 1
    }

    /// The number of rows N of the batch.
    pub fn tokens(&self) -> i64 {
        self.offsets[self.offsets.len() - 1]
    }

    /// The length of the longest sequence.
    pub fn max_len(&self) -> i64 {
        self.max_len
    }

    /// Where each sequence begins, and the end of the last: B + 1 numbers.
    pub fn offsets(&self) -> &[i64] {
        &self.offsets
    }

    /// [`Self::offsets`] on the device: int64 `[B + 1]`.
    pub fn offsets_tensor(&self) -> &Tensor {
        &self.offsets_tensor
    }

    /// The place of each row in its sequence, from 0, on the device: int64 `[N]`.
    pub fn positions(&self) -> &Tensor {
        &self.positions
    }
}

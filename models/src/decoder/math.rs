//! Ways of a forward pass to multiply: the fastest order of sums, one that is fixed per row, and rows in 8 bits.

use anyroll_backends::ops::{self, Causal, EightBitRows, Groups, Normed, Packing};
use tch::Tensor;

use crate::Result;

/// Way of a forward pass to multiply.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Math {
    /// The fastest order, which may depend on the number of rows.
    Fast,
    /// An order per row that does not depend on other rows: see [`ops::linear_by_rows`].
    ByRows,
    /// The fastest order, with rows rounded to 8 bits where the matrix is in 8 bits.
    EightBits,
}

impl Math {
    /// Returns true if rows are rounded to 8 bits before their product with this matrix.
    pub fn rounds_rows_of(self, weight: &Tensor) -> bool {
        self == Math::EightBits && ops::is_in_eight_bits(weight)
    }

    /// Returns `x W^T + bias`. Here and below W may be [in 8 bits](ops::in_eight_bits).
    pub fn linear(self, x: &Tensor, weight: &Tensor, bias: Option<&Tensor>) -> Result<Tensor> {
        match self {
            _ if self.rounds_rows_of(weight) => Ok(ops::linear_of_eight_bits(x, weight, bias)?),
            Math::Fast | Math::EightBits => Ok(ops::linear(x, weight, bias)?),
            Math::ByRows => Ok(ops::linear_by_rows(x, weight, bias)?),
        }
    }

    /// Returns `to + x W^T`, in the memory of `to` unless that is kept.
    pub fn add_linear(self, to: &mut Tensor, x: &Tensor, weight: &Tensor, kept: bool) -> Result<Tensor> {
        let product = match self {
            _ if self.rounds_rows_of(weight) => ops::linear_of_eight_bits(x, weight, None)?,
            Math::Fast | Math::EightBits => {
                if !kept && ops::is_quick_in_eight_bits(x, weight) {
                    ops::add_linear_(to, x, weight)?;
                    return Ok(to.shallow_clone());
                }
                let matrix = ops::widened(weight, x.kind())?.f_tr()?;
                return Ok(if kept { to.f_addmm(x, &matrix)? } else { to.f_addmm_(x, &matrix)? });
            }
            Math::ByRows => ops::linear_by_rows(x, weight, None)?,
        };
        Ok(if kept { to.f_add(&product)? } else { to.f_add_(&product)? })
    }

    /// See [`ops::grouped_linear`].
    pub fn grouped_linear(self, x: &Tensor, weight: &Tensor, groups: &Groups) -> Result<Tensor> {
        match self {
            Math::Fast | Math::EightBits => Ok(ops::grouped_linear(x, weight, groups)?),
            Math::ByRows => Ok(ops::grouped_linear_by_rows(x, weight, groups)?),
        }
    }

    /// Computes [`Self::linear`] of a norm into `y`, in a recorded step, whose memory for rows in 8 bits is `rows`.
    pub fn linear_into(
        self,
        x: &mut Normed,
        weight: &Tensor,
        bias: Option<&Tensor>,
        y: &mut Tensor,
        rows: Option<&EightBitRows>,
    ) -> Result<()> {
        match (self, rows) {
            (_, Some(rows)) if self.rounds_rows_of(weight) => Ok(rows.linear_into(x, weight, bias, y)?),
            (Math::Fast | Math::EightBits, _) => Ok(ops::linear_into(x, weight, bias, y)?),
            (Math::ByRows, _) => Ok(ops::linear_by_rows_into(x.values()?, weight, bias, y)?),
        }
    }

    /// See [`ops::attention`].
    pub fn attention(
        self,
        q: &Tensor,
        k: &Tensor,
        v: &Tensor,
        packing: &Packing,
        causal: Causal,
    ) -> Result<(Tensor, Tensor)> {
        match self {
            Math::Fast | Math::EightBits => Ok(ops::attention(q, k, v, packing, causal)?),
            Math::ByRows => Ok(ops::attention_by_rows(q, k, v, packing, causal)?),
        }
    }

    /// See [`ops::attention_with_history`].
    pub fn attention_with_history(
        self,
        q: &Tensor,
        k: &Tensor,
        v: &Tensor,
        causal: Causal,
    ) -> Result<Tensor> {
        match self {
            Math::Fast | Math::EightBits => Ok(ops::attention_with_history(q, k, v, causal)?),
            Math::ByRows => Ok(ops::attention_with_history_by_rows(q, k, v, causal)?),
        }
    }

    /// See [`ops::decode_attention`].
    pub fn decode_attention(
        self,
        q: &Tensor,
        (keys, values): (&Tensor, &Tensor),
        (tables, lengths): (&Tensor, &Tensor),
        causal: Causal,
    ) -> Result<Tensor> {
        match self {
            Math::Fast | Math::EightBits => {
                Ok(ops::decode_attention(q, keys, values, tables, lengths, causal)?)
            }
            Math::ByRows => Ok(ops::decode_attention_by_rows(q, keys, values, tables, lengths, causal)?),
        }
    }
}

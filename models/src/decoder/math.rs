//! The two summation orders of a forward pass: the fastest one, and one that is fixed per row.

use anyroll_backends::ops::{self, Causal, Groups, Normed, Packing};
use tch::Tensor;

use crate::Result;

/// Summation order of a forward pass.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Math {
    /// The fastest order, which may depend on the number of rows.
    Fast,
    /// An order per row that does not depend on other rows: see [`ops::linear_by_rows`].
    ByRows,
}

impl Math {
    /// Returns `x W^T + bias`. Here and below W may be [in 8 bits](ops::in_eight_bits).
    pub fn linear(self, x: &Tensor, weight: &Tensor, bias: Option<&Tensor>) -> Result<Tensor> {
        match self {
            Math::Fast => Ok(ops::linear(x, weight, bias)?),
            Math::ByRows => Ok(ops::linear_by_rows(x, weight, bias)?),
        }
    }

    /// Returns `to + x W^T`, in the memory of `to` unless that is kept.
    pub fn add_linear(self, to: &mut Tensor, x: &Tensor, weight: &Tensor, kept: bool) -> Result<Tensor> {
        let product = match self {
            Math::Fast if kept => return Ok(to.f_addmm(x, &ops::widened(weight, x.kind())?.f_tr()?)?),
            Math::Fast if ops::is_quick_in_eight_bits(x, weight) => {
                ops::add_linear_(to, x, weight)?;
                return Ok(to.shallow_clone());
            }
            Math::Fast => return Ok(to.f_addmm_(x, &ops::widened(weight, x.kind())?.f_tr()?)?),
            Math::ByRows => ops::linear_by_rows(x, weight, None)?,
        };
        Ok(if kept { to.f_add(&product)? } else { to.f_add_(&product)? })
    }

    /// See [`ops::grouped_linear`].
    pub fn grouped_linear(self, x: &Tensor, weight: &Tensor, groups: &Groups) -> Result<Tensor> {
        match self {
            Math::Fast => Ok(ops::grouped_linear(x, weight, groups)?),
            Math::ByRows => Ok(ops::grouped_linear_by_rows(x, weight, groups)?),
        }
    }

    /// Computes [`Self::linear`] of a norm into `y`, in a recorded step.
    pub fn linear_into(
        self,
        x: &mut Normed,
        weight: &Tensor,
        bias: Option<&Tensor>,
        y: &mut Tensor,
    ) -> Result<()> {
        match self {
            Math::Fast => Ok(ops::linear_into(x, weight, bias, y)?),
            Math::ByRows => Ok(ops::linear_by_rows_into(x.values()?, weight, bias, y)?),
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
            Math::Fast => Ok(ops::attention(q, k, v, packing, causal)?),
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
            Math::Fast => Ok(ops::attention_with_history(q, k, v, causal)?),
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
            Math::Fast => Ok(ops::decode_attention(q, keys, values, tables, lengths, causal)?),
            Math::ByRows => Ok(ops::decode_attention_by_rows(q, keys, values, tables, lengths, causal)?),
        }
    }
}

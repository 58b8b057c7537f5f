//! Position encoding of patches: rotates pairs of each head's values, some by time, some by row, some by
//! column.

use tch::{Kind, Tensor};

use super::WanConfig;
use crate::Result;

const MAX_PERIOD: f64 = 10_000.0;

/// Returns the angles of every position in time and in the longest side: fp32 `[rope_max_seq_len, D / 2]`.
/// The pairs of time come first, then those of rows and of columns.
pub(super) fn angles(config: &WanConfig) -> Result<Tensor> {
    let options = (Kind::Double, tch::Device::Cpu);
    let places = Tensor::f_arange(config.rope_max_seq_len, options)?.f_unsqueeze(1)?;
    let axes = widths(config).map(|width| {
        let exponents = Tensor::f_arange(width / 2, options)?.f_mul_scalar(-2.0 / width as f64)?;
        let frequencies = exponents.f_mul_scalar(MAX_PERIOD.ln())?.f_exp()?;
        Ok(places.f_mul(&frequencies)?)
    });
    Ok(Tensor::f_cat(&axes.into_iter().collect::<Result<Vec<_>>>()?, 1)?)
}

/// Returns how many values of a head encode time, rows and columns.
fn widths(config: &WanConfig) -> [i64; 3] {
    let side = config.attention_head_dim / 3;
    [config.attention_head_dim - 2 * side, side, side]
}

/// Returns the rows of a table of [`angles`] for a grid of `[frames, rows, columns]` patches: `[1, T, 1, D /
/// 2]`.
pub(super) fn of_grid(config: &WanConfig, table: &Tensor, grid: [i64; 3]) -> Result<Tensor> {
    let mut start = 0;
    let mut parts = Vec::with_capacity(3);
    for (axis, width) in widths(config).into_iter().enumerate() {
        let pairs = width / 2;
        let mut shape = [1, 1, 1, pairs];
        shape[axis] = grid[axis];
        let part = table.f_narrow(0, 0, grid[axis])?.f_narrow(1, start, pairs)?.f_reshape(shape)?;
        parts.push(part.f_expand([grid[0], grid[1], grid[2], pairs], false)?);
        start += pairs;
    }
    Ok(Tensor::f_cat(&parts, 3)?.f_flatten(0, 2)?.f_unsqueeze(0)?.f_unsqueeze(2)?)
}

/// Rotates pairs of adjacent values of `x` `[B, T, H, D]`.
pub(super) fn turn(x: &Tensor, [cos, sin]: &[Tensor; 2]) -> Result<Tensor> {
    let [batch, tokens, heads, dim] = x.size()[..] else { unreachable!("heads have four dimensions") };
    let pairs = x.f_view([batch, tokens, heads, dim / 2, 2])?;
    let (a, b) = (pairs.f_select(4, 0)?, pairs.f_select(4, 1)?);
    let first = a.f_mul(cos)?.f_sub(&b.f_mul(sin)?)?;
    let second = a.f_mul(sin)?.f_add(&b.f_mul(cos)?)?;
    Ok(Tensor::f_stack(&[first, second], 4)?.f_flatten(3, 4)?.f_to_kind(x.kind())?)
}

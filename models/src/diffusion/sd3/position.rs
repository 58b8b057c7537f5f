//! Where patches are: cosines and sines of both sides, as diffusers' `get_2d_sincos_pos_embed`.

use tch::{Kind, Tensor};

use super::Sd3Config;
use crate::Result;

const MAX_PERIOD: f64 = 10_000.0;

/// fp32 `[side, side, C]`, the first half of C for the column, the second for the row.
pub(super) fn table(config: &Sd3Config) -> Result<Tensor> {
    let (side, inner) = (config.pos_embed_max_size, config.inner_dim());
    let base = (config.sample_size / config.patch_size) as f64;
    let options = (Kind::Double, tch::Device::Cpu);
    let places = Tensor::f_arange(side, options)?.f_mul_scalar(base / side as f64)?;
    let of_side = sines(&places, inner / 2)?;
    let wide = [side, side, inner / 2];
    let columns = of_side.f_unsqueeze(0)?.f_expand(wide, false)?;
    let rows = of_side.f_unsqueeze(1)?.f_expand(wide, false)?;
    Ok(Tensor::f_cat(&[columns, rows], 2)?.f_to_kind(Kind::Float)?)
}

/// `[N]` to `[N, size]`: sines, then cosines.
fn sines(places: &Tensor, size: i64) -> Result<Tensor> {
    let half = size / 2;
    let exponents = Tensor::f_arange(half, (Kind::Double, places.device()))?;
    let frequencies = exponents.f_mul_scalar(-MAX_PERIOD.ln() / half as f64)?.f_exp()?;
    let angles = places.f_unsqueeze(1)?.f_mul(&frequencies)?;
    Ok(Tensor::f_cat(&[angles.f_sin()?, angles.f_cos()?], 1)?)
}

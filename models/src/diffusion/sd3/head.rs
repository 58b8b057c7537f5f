//! The last block: patches back to velocities.

use tch::{Kind, Tensor};

use super::Sd3Config;
use crate::Result;
use crate::diffusion::layers::{Params, layer_norm, modulate};
use crate::model::{Unit, Weights};

const MODULATION: usize = 0;
const PROJECTION: usize = 2;

pub(super) fn unit(config: &Sd3Config) -> Unit {
    let inner = config.inner_dim();
    let mut params = Params::default();
    params.linear("norm_out.linear", 2 * inner, inner);
    params.linear("proj_out", config.patch_size * config.patch_size * config.out_channels, inner);
    Unit { name: "proj_out".into(), params: params.0, trainable: true }
}

/// `x` `[B, 1 + T, C]` to fp32 `[B, out_channels, height, width]`, for latents of the size `latents`.
pub(super) fn forward(config: &Sd3Config, weights: &Weights, x: &Tensor, latents: &[i64]) -> Result<Tensor> {
    let linear =
        |first: usize, x: &Tensor| x.f_linear(weights.get(0, first), Some(weights.get(0, first + 1)));
    let modulation = linear(MODULATION, &x.f_narrow(1, 0, 1)?.f_silu()?)?.f_chunk(2, -1)?;
    let patches = layer_norm(&x.f_narrow(1, 1, x.size()[1] - 1)?)?;
    // diffusers' continuous norm has the scale before the shift.
    let out = linear(PROJECTION, &modulate(&patches, &modulation[1], &modulation[0])?)?;
    let (p, channels) = (config.patch_size, config.out_channels);
    let (rows, columns) = (latents[2] / p, latents[3] / p);
    let apart = out.f_view([-1, rows, columns, p, p, channels])?.f_permute([0, 5, 1, 3, 2, 4])?;
    Ok(apart.f_reshape([-1, channels, rows * p, columns * p])?.f_to_kind(Kind::Float)?)
}

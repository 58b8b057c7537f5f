//! The last block: patches back to an image of velocities.

use tch::{Kind, Tensor};

use super::{DitConfig, apply_linear, conditioned, linear, modulate};
use crate::Result;
use crate::model::{Init, ParamSpec, Unit, Weights};

const MODULATION: usize = 0;
const PROJECTION: usize = 2;

pub(super) fn unit(config: &DitConfig) -> Unit {
    let hidden = config.hidden_size;
    let mut params: Vec<ParamSpec> =
        linear("final_layer.adaLN_modulation.1", 2 * hidden, hidden, Init::Zeros).into();
    params.extend(linear("final_layer.linear", config.patch_len(), hidden, Init::Zeros));
    Unit { name: "final_layer".into(), params, trainable: true }
}

/// `x` `[B, 1 + T, C]` to fp32 `[B, channels, height, width]`.
pub(super) fn forward(config: &DitConfig, weights: &Weights, x: &Tensor) -> Result<Tensor> {
    let (condition, tokens) = conditioned(x)?;
    let modulation = apply_linear(weights, MODULATION, &condition)?.f_chunk(2, -1)?;
    let patches = apply_linear(weights, PROJECTION, &modulate(&tokens, &modulation[0], &modulation[1])?)?;
    let (side, p, channels) = (config.patches_per_row(), config.patch_size, config.channels);
    let apart = patches.f_view([-1, side, side, channels, p, p])?.f_permute([0, 3, 1, 4, 2, 5])?;
    let size = config.image_size;
    Ok(apart.f_reshape([-1, channels, size, size])?.f_to_kind(Kind::Float)?)
}

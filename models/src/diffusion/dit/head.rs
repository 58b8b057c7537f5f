//! The last block: turns patches into an image of velocities.

use anyroll_backends::ops::modulated_norm;
use tch::{Kind, Tensor};

use super::{DitConfig, conditioned};
use crate::Result;
use crate::diffusion::layers::{EPS, Linear, Params};
use crate::model::{Unit, Weights};

/// Positions of the layers in the head's unit.
#[derive(Debug)]
pub(super) struct Head {
    modulation: Linear,
    projection: Linear,
}

impl Head {
    /// Returns the unit, and the positions of its layers in it.
    pub fn layout(config: &DitConfig) -> (Unit, Head) {
        let hidden = config.hidden_size;
        let mut params = Params::default();
        let head = Head {
            modulation: params.zero_linear("final_layer.adaLN_modulation.1", 2 * hidden, hidden),
            projection: params.zero_linear("final_layer.linear", config.patch_len(), hidden),
        };
        (params.into_unit("final_layer"), head)
    }

    /// Maps `x` `[B, 1 + T, C]` to fp32 `[B, channels, height, width]`.
    pub fn forward(&self, config: &DitConfig, weights: &Weights, x: &Tensor) -> Result<Tensor> {
        let (condition, tokens) = conditioned(x)?;
        let modulation = self.modulation.forward(weights, &condition)?.f_chunk(2, -1)?;
        let (_, input) = modulated_norm(&tokens, &modulation[0], &modulation[1], EPS)?;
        let patches = self.projection.forward(weights, &input)?;
        let (side, p, channels) = (config.patches_per_row(), config.patch_size, config.channels);
        let apart = patches.f_view([-1, side, side, channels, p, p])?.f_permute([0, 3, 1, 4, 2, 5])?;
        let size = config.image_size;
        Ok(apart.f_reshape([-1, channels, size, size])?.f_to_kind(Kind::Float)?)
    }
}

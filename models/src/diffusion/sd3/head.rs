//! The last block: turns patches into velocities.

use anyroll_backends::ops::modulated_norm;
use tch::{Kind, Tensor};

use super::Sd3Config;
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
    pub fn layout(config: &Sd3Config) -> (Unit, Head) {
        let (inner, patch) = (config.inner_dim(), config.patch_size);
        let mut params = Params::default();
        let modulation = params.linear("norm_out.linear", 2 * inner, inner);
        let projection = params.linear("proj_out", patch * patch * config.out_channels, inner);
        (params.into_unit("proj_out"), Head { modulation, projection })
    }

    /// Maps `x` `[B, 1 + T, C]` to fp32 `[B, out_channels, height, width]`, for latents of the shape
    /// `latents`.
    pub fn forward(
        &self,
        config: &Sd3Config,
        weights: &Weights,
        x: &Tensor,
        latents: &[i64],
    ) -> Result<Tensor> {
        let modulation = self.modulation.forward(weights, &x.f_narrow(1, 0, 1)?.f_silu()?)?.f_chunk(2, -1)?;
        let patches = x.f_narrow(1, 1, x.size()[1] - 1)?;
        // diffusers' continuous norm has the scale before the shift.
        let (_, input) = modulated_norm(&patches, &modulation[1], &modulation[0], EPS)?;
        let out = self.projection.forward(weights, &input)?;
        let (p, channels) = (config.patch_size, config.out_channels);
        let (rows, columns) = (latents[2] / p, latents[3] / p);
        let apart = out.f_view([-1, rows, columns, p, p, channels])?.f_permute([0, 5, 1, 3, 2, 4])?;
        Ok(apart.f_reshape([-1, channels, rows * p, columns * p])?.f_to_kind(Kind::Float)?)
    }
}

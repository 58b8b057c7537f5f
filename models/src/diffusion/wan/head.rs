//! The last block: turns patches into velocities.

use anyroll_backends::ops::modulated_norm;
use tch::{Kind, Tensor};

use super::{ROWS, WanConfig};
use crate::Result;
use crate::diffusion::layers::{Linear, Params};
use crate::model::{Init, Weights};

/// Positions of the layers in the head's unit.
#[derive(Debug)]
pub(super) struct Head {
    modulation: usize,
    projection: Linear,
}

impl Head {
    /// Adds the parameters, with names that begin with `prefix`, and returns their positions.
    pub fn layout(config: &WanConfig, params: &mut Params, prefix: &str) -> Head {
        let inner = config.inner_dim();
        let std = (inner as f64).powf(-0.5);
        let table = format!("{prefix}scale_shift_table");
        let modulation = params.table(&table, &[1, 2, inner], Init::Normal { std });
        let values = config.in_channels * config.patch_size.iter().product::<i64>();
        let projection = params.linear(&format!("{prefix}proj_out"), values, inner);
        Head { modulation, projection }
    }

    /// Maps `x` `[B, 7 + S + T, C]` with `text` text tokens to fp32 `[B, in_channels, frames, height,
    /// width]`, for a grid of `[frames, rows, columns]` patches.
    pub fn forward(
        &self,
        config: &WanConfig,
        weights: &Weights,
        x: &Tensor,
        text: i64,
        [frames, rows, columns]: [i64; 3],
    ) -> Result<Tensor> {
        let patches = x.f_narrow(1, ROWS + text, x.size()[1] - ROWS - text)?;
        let modulation = weights.get(0, self.modulation).f_add(&x.f_narrow(1, 0, 1)?)?.f_split(1, 1)?;
        let (_, input) = modulated_norm(&patches, &modulation[0], &modulation[1], config.eps)?;
        let out = self.projection.forward(weights, &input)?;
        let ([t, h, w], channels) = (config.patch_size, config.in_channels);
        let apart = out.f_view(&[-1, frames, rows, columns, t, h, w, channels][..])?;
        let apart = apart.f_permute([0, 7, 1, 4, 2, 5, 3, 6])?;
        Ok(apart.f_reshape([-1, channels, frames * t, rows * h, columns * w])?.f_to_kind(Kind::Float)?)
    }
}

//! The first block: patches with their positions, the text, and the conditioning of all blocks.

use tch::Tensor;

use super::{Sd3Config, position};
use crate::Result;
use crate::diffusion::layers::{FREQUENCIES, Linear, Params, time_features};
use crate::model::{Unit, Weights};

/// Positions of the layers in the embedding's unit.
#[derive(Debug)]
pub(super) struct Embedding {
    patch: Linear,
    time: [Linear; 2],
    pooled: [Linear; 2],
    context: Linear,
}

impl Embedding {
    /// Returns the unit, and the positions of its layers in it.
    pub fn layout(config: &Sd3Config) -> (Unit, Embedding) {
        let (inner, patch) = (config.inner_dim(), config.patch_size);
        let mut params = Params::default();
        let patch = params.convolution("pos_embed.proj", &[inner, config.in_channels, patch, patch]);
        let mut two = |name: &str, columns| {
            let name = format!("time_text_embed.{name}");
            [
                params.linear(&format!("{name}.linear_1"), inner, columns),
                params.linear(&format!("{name}.linear_2"), inner, inner),
            ]
        };
        let time = two("timestep_embedder", FREQUENCIES);
        let pooled = two("text_embedder", config.pooled_projection_dim);
        let context = params.linear("context_embedder", inner, config.joint_attention_dim);
        (params.into_unit("embedding"), Embedding { patch, time, pooled, context })
    }

    /// Maps `latents` at `sigmas` to `[B, 1 + S + T, C]`, with the text `[B, S, D]` and `[B, E]`. `places`
    /// are the positions of the longest side.
    pub fn forward(
        &self,
        weights: &Weights,
        latents: &Tensor,
        sigmas: &Tensor,
        (context, pooled): (&Tensor, &Tensor),
        places: &Tensor,
    ) -> Result<Tensor> {
        let kind = weights.get(0, 0).kind();
        let patches = self.patch.patches(weights, &latents.f_to_kind(kind)?)?;
        let (rows, columns) = (patches.size()[2], patches.size()[3]);
        let tokens = patches.f_flatten(2, -1)?.f_transpose(1, 2)?;
        let tokens = tokens.f_add(&position::grid(places, rows, columns)?.f_to_kind(kind)?)?;

        let two = |[first, second]: [Linear; 2], x: &Tensor| {
            second.forward(weights, &first.forward(weights, x)?.f_silu()?)
        };
        let time = two(self.time, &time_features(sigmas, FREQUENCIES)?.f_to_kind(kind)?)?;
        let pooled = two(self.pooled, &pooled.f_to_kind(kind)?)?;
        let condition = time.f_add(&pooled)?.f_unsqueeze(1)?;
        let text = self.context.forward(weights, &context.f_to_kind(kind)?)?;
        Ok(Tensor::f_cat(&[condition, text, tokens], 1)?)
    }
}

//! The first block: patches, the text, and the conditioning of all blocks.

use tch::Tensor;

use super::WanConfig;
use crate::Result;
use crate::diffusion::layers::{Linear, Params, time_features};
use crate::model::Weights;

/// Positions of the layers in the embedding's unit.
#[derive(Debug)]
pub(super) struct Embedding {
    patch: Linear,
    time: [Linear; 2],
    modulation: Linear,
    text: [Linear; 2],
}

impl Embedding {
    /// Adds the parameters, with names that begin with `prefix`, and returns their positions.
    pub fn layout(config: &WanConfig, params: &mut Params, prefix: &str) -> Embedding {
        let inner = config.inner_dim();
        let [frames, rows, columns] = config.patch_size;
        let patch_shape = [inner, config.in_channels, frames, rows, columns];
        let patch = params.convolution(&format!("{prefix}patch_embedding"), &patch_shape);
        let mut linear = |name: &str, rows, columns| {
            params.linear(&format!("{prefix}condition_embedder.{name}"), rows, columns)
        };
        let time = [
            linear("time_embedder.linear_1", inner, config.freq_dim),
            linear("time_embedder.linear_2", inner, inner),
        ];
        let modulation = linear("time_proj", 6 * inner, inner);
        let text = [
            linear("text_embedder.linear_1", inner, config.text_dim),
            linear("text_embedder.linear_2", inner, inner),
        ];
        Embedding { patch, time, modulation, text }
    }

    /// Maps `latents` at `sigmas` to `[B, 7 + S + T, C]`, with the text `[B, S, D]`.
    pub fn forward(
        &self,
        config: &WanConfig,
        weights: &Weights,
        latents: &Tensor,
        sigmas: &Tensor,
        text: &Tensor,
    ) -> Result<Tensor> {
        let kind = weights.get(0, 0).kind();
        let patches = self.patch.patches(weights, &latents.f_to_kind(kind)?)?;
        let tokens = patches.f_flatten(2, -1)?.f_transpose(1, 2)?;
        let [first, second] = self.time;
        let features = time_features(sigmas, config.freq_dim)?.f_to_kind(kind)?;
        let time = second.forward(weights, &first.forward(weights, &features)?.f_silu()?)?;
        let modulation = self.modulation.forward(weights, &time.f_silu()?)?;
        let modulation = modulation.f_view([-1, 6, config.inner_dim()])?;
        let [first, second] = self.text;
        let words = first.forward(weights, &text.f_to_kind(kind)?)?.f_gelu("tanh")?;
        let words = second.forward(weights, &words)?;
        Ok(Tensor::f_cat(&[time.f_unsqueeze(1)?, modulation, words, tokens], 1)?)
    }
}

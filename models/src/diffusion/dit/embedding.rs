//! The first block: patches, their positions, and the conditioning of all blocks.

use tch::Tensor;

use super::DitConfig;
use crate::Result;
use crate::diffusion::DenoiseBatch;
use crate::diffusion::layers::{FREQUENCIES, Linear, Params, time_features};
use crate::model::{Init, Unit, Weights};

/// Positions of the layers in the embedding's unit.
#[derive(Debug)]
pub(super) struct Embedding {
    patch: Linear,
    position: usize,
    time: [Linear; 2],
    class: usize,
}

impl Embedding {
    /// Returns the unit, and the positions of its layers in it.
    pub fn layout(config: &DitConfig) -> (Unit, Embedding) {
        let hidden = config.hidden_size;
        let patches = config.patches_per_row().pow(2);
        let mut params = Params::default();
        let patch = params.linear("x_embedder.proj", hidden, config.patch_len());
        let position = params.table("pos_embed", &[patches, hidden], Init::Normal { std: 0.02 });
        let time = [
            params.linear("t_embedder.mlp.0", hidden, FREQUENCIES),
            params.linear("t_embedder.mlp.2", hidden, hidden),
        ];
        let classes = [config.classes + 1, hidden];
        let class = params.table("y_embedder.embedding_table.weight", &classes, Init::Normal { std: 1.0 });
        let embedding = Embedding { patch, position, time, class };
        (params.into_unit("embedding"), embedding)
    }

    /// Maps `latents` `[B, channels, height, width]` to `[B, 1 + T, C]`.
    pub fn forward(
        &self,
        config: &DitConfig,
        weights: &Weights,
        latents: &Tensor,
        batch: &DenoiseBatch,
    ) -> Result<Tensor> {
        let position = weights.get(0, self.position);
        let patches = patches(config, &latents.f_to_kind(position.kind())?)?;
        let tokens = self.patch.forward(weights, &patches)?.f_add(position)?;
        let time = time_features(&batch.sigmas, FREQUENCIES)?.f_to_kind(position.kind())?;
        let [first, second] = self.time;
        let time = second.forward(weights, &first.forward(weights, &time)?.f_silu()?)?;
        let class = weights.get(0, self.class).f_index_select(0, &batch.labels)?;
        let condition = time.f_add(&class)?.f_unsqueeze(1)?;
        Ok(Tensor::f_cat(&[condition, tokens], 1)?)
    }
}

/// Maps `[B, channels, height, width]` to `[B, T, channels p p]`.
fn patches(config: &DitConfig, latents: &Tensor) -> Result<Tensor> {
    let (side, p) = (config.patches_per_row(), config.patch_size);
    let apart = latents.f_reshape([-1, config.channels, side, p, side, p])?;
    Ok(apart.f_permute([0, 2, 4, 1, 3, 5])?.f_reshape([-1, side * side, config.patch_len()])?)
}

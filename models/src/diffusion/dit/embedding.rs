//! The first block: patches, where they are, and what all blocks are conditioned on.

use tch::Tensor;

use super::{DitConfig, apply_linear, linear, param, usual};
use crate::Result;
use crate::diffusion::DenoiseBatch;
use crate::diffusion::layers::{FREQUENCIES, time_features};
use crate::model::{Init, ParamSpec, Unit, Weights};

const PATCH: usize = 0;
const POSITION: usize = 2;
const TIME_IN: usize = 3;
const TIME_OUT: usize = 5;
const CLASS: usize = 7;

pub(super) fn unit(config: &DitConfig) -> Unit {
    let (hidden, patch) = (config.hidden_size, config.patch_len());
    let patches = config.patches_per_row().pow(2);
    let mut params: Vec<ParamSpec> = linear("x_embedder.proj", hidden, patch, usual(patch)).into();
    params.push(param("pos_embed".into(), vec![patches, hidden], Init::Normal { std: 0.02 }));
    params.extend(linear("t_embedder.mlp.0", hidden, FREQUENCIES, usual(FREQUENCIES)));
    params.extend(linear("t_embedder.mlp.2", hidden, hidden, usual(hidden)));
    let table = "y_embedder.embedding_table.weight".into();
    params.push(param(table, vec![config.classes + 1, hidden], Init::Normal { std: 1.0 }));
    Unit { name: "embedding".into(), params, trainable: true }
}

/// `latents` `[B, channels, height, width]` to `[B, 1 + T, C]`.
pub(super) fn forward(
    config: &DitConfig,
    weights: &Weights,
    latents: &Tensor,
    batch: &DenoiseBatch,
) -> Result<Tensor> {
    let position = weights.get(0, POSITION);
    let patches = patches(config, &latents.f_to_kind(position.kind())?)?;
    let tokens = apply_linear(weights, PATCH, &patches)?.f_add(position)?;
    let time = time_features(&batch.sigmas)?.f_to_kind(position.kind())?;
    let time = apply_linear(weights, TIME_OUT, &apply_linear(weights, TIME_IN, &time)?.f_silu()?)?;
    let class = weights.get(0, CLASS).f_index_select(0, &batch.labels)?;
    let condition = time.f_add(&class)?.f_unsqueeze(1)?;
    Ok(Tensor::f_cat(&[condition, tokens], 1)?)
}

/// `[B, channels, height, width]` to `[B, T, channels p p]`.
fn patches(config: &DitConfig, latents: &Tensor) -> Result<Tensor> {
    let (side, p) = (config.patches_per_row(), config.patch_size);
    let apart = latents.f_reshape([-1, config.channels, side, p, side, p])?;
    Ok(apart.f_permute([0, 2, 4, 1, 3, 5])?.f_reshape([-1, side * side, config.patch_len()])?)
}

//! The first block: patches with their positions, the text, and what all blocks are conditioned on.

use tch::Tensor;

use super::{Sd3Batch, Sd3Config};
use crate::Result;
use crate::diffusion::layers::{FREQUENCIES, Params, time_features};
use crate::model::{Unit, Weights};

/// The layers by the order in which [`unit()`] lists them.
const PATCH: usize = 0;
const TIME: [usize; 2] = [2, 4];
const POOLED: [usize; 2] = [6, 8];
const CONTEXT: usize = 10;

pub(super) fn unit(config: &Sd3Config) -> Unit {
    let inner = config.inner_dim();
    let mut params = Params::default();
    params.convolution("pos_embed.proj", [inner, config.in_channels, config.patch_size, config.patch_size]);
    params.linear("time_text_embed.timestep_embedder.linear_1", inner, FREQUENCIES);
    params.linear("time_text_embed.timestep_embedder.linear_2", inner, inner);
    params.linear("time_text_embed.text_embedder.linear_1", inner, config.pooled_projection_dim);
    params.linear("time_text_embed.text_embedder.linear_2", inner, inner);
    params.linear("context_embedder", inner, config.joint_attention_dim);
    Unit { name: "embedding".into(), params: params.0, trainable: true }
}

/// `latents` to `[B, 1 + S + T, C]`; `positions` are those of the largest side.
pub(super) fn forward(
    config: &Sd3Config,
    weights: &Weights,
    latents: &Tensor,
    batch: &Sd3Batch,
    positions: &Tensor,
) -> Result<Tensor> {
    let kernel = weights.get(0, PATCH);
    let kind = kernel.kind();
    let stride = [config.patch_size; 2];
    let bias = Some(weights.get(0, PATCH + 1));
    let patches = latents.f_to_kind(kind)?.f_conv2d(kernel, bias, stride, [0, 0], [1, 1], 1)?;
    let (rows, columns) = (patches.size()[2], patches.size()[3]);
    let tokens = patches.f_flatten(2, -1)?.f_transpose(1, 2)?;
    let tokens = tokens.f_add(&middle(positions, rows, columns)?.f_to_kind(kind)?)?;

    let linear =
        |first: usize, x: &Tensor| x.f_linear(weights.get(0, first), Some(weights.get(0, first + 1)));
    let two = |[first, second]: [usize; 2], x: &Tensor| linear(second, &linear(first, x)?.f_silu()?);
    let time = two(TIME, &time_features(&batch.sigmas)?.f_to_kind(kind)?)?;
    let condition = time.f_add(&two(POOLED, &batch.pooled.f_to_kind(kind)?)?)?.f_unsqueeze(1)?;
    let text = linear(CONTEXT, &batch.context.f_to_kind(kind)?)?;
    Ok(Tensor::f_cat(&[condition, text, tokens], 1)?)
}

/// The middle of the positions of the largest side: `[rows * columns, C]`.
fn middle(positions: &Tensor, rows: i64, columns: i64) -> Result<Tensor> {
    let side = positions.size()[0];
    let part = positions.f_narrow(0, (side - rows) / 2, rows)?.f_narrow(1, (side - columns) / 2, columns)?;
    Ok(part.f_flatten(0, 1)?)
}

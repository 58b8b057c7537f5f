//! A transformer block: attention and a feed-forward, each modulated and gated by the conditioning.

use tch::Tensor;

use super::{DitConfig, apply_linear, conditioned, linear, modulate, usual};
use crate::Result;
use crate::model::{Init, ParamSpec, Unit, Weights};

const QKV: usize = 0;
const PROJECTION: usize = 2;
const FC1: usize = 4;
const FC2: usize = 6;
const MODULATION: usize = 8;

pub(super) fn unit(config: &DitConfig, layer: usize) -> Unit {
    let (hidden, intermediate) = (config.hidden_size, config.intermediate_size);
    let name = format!("blocks.{layer}");
    let mut params: Vec<ParamSpec> = Vec::new();
    for (rest, rows, columns, init) in [
        ("attn.qkv", 3 * hidden, hidden, usual(hidden)),
        ("attn.proj", hidden, hidden, usual(hidden)),
        ("mlp.fc1", intermediate, hidden, usual(hidden)),
        ("mlp.fc2", hidden, intermediate, usual(intermediate)),
        ("adaLN_modulation.1", 6 * hidden, hidden, Init::Zeros), // a block begins as the identity
    ] {
        params.extend(linear(&format!("{name}.{rest}"), rows, columns, init));
    }
    Unit { name, params, trainable: true }
}

/// `x` `[B, 1 + T, C]` to the same shape; the conditioning goes through.
pub(super) fn forward(config: &DitConfig, weights: &Weights, x: &Tensor) -> Result<Tensor> {
    let (condition, tokens) = conditioned(x)?;
    let modulation = apply_linear(weights, MODULATION, &condition)?.f_chunk(6, -1)?;
    let [shift1, scale1, gate1, shift2, scale2, gate2] = &modulation[..] else { unreachable!("six chunks") };

    let attended = attention(config, weights, &modulate(&tokens, shift1, scale1)?)?;
    let tokens = tokens.f_add(&attended.f_mul(gate1)?)?;
    let wide = apply_linear(weights, FC1, &modulate(&tokens, shift2, scale2)?)?;
    let out = apply_linear(weights, FC2, &wide.f_gelu("tanh")?)?;
    let tokens = tokens.f_add(&out.f_mul(gate2)?)?;
    Ok(Tensor::f_cat(&[x.f_narrow(1, 0, 1)?, tokens], 1)?)
}

/// Every patch attends to all of its image.
fn attention(config: &DitConfig, weights: &Weights, x: &Tensor) -> Result<Tensor> {
    let (patches, heads) = (x.size()[1], config.heads);
    let qkv = apply_linear(weights, QKV, x)?.f_view([-1, patches, 3, heads, config.hidden_size / heads])?;
    let qkv = qkv.f_permute([2, 0, 3, 1, 4])?;
    let [q, k, v] = [qkv.f_select(0, 0)?, qkv.f_select(0, 1)?, qkv.f_select(0, 2)?];
    let attended =
        Tensor::f_scaled_dot_product_attention(&q, &k, &v, None::<&Tensor>, 0.0, false, None, false)?;
    let attended = attended.f_transpose(1, 2)?.f_reshape([-1, patches, config.hidden_size])?;
    apply_linear(weights, PROJECTION, &attended)
}

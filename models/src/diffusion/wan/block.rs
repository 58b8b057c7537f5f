//! A block: patches attend to each other and to the text, and pass through a feed-forward.

use anyroll_backends::ops::{GatedSum, attend, gated_add, gated_sums_behind, modulated_norm, rms_normed};
use tch::Tensor;

use super::{ROWS, WanConfig, rotary};
use crate::Result;
use crate::diffusion::layers::{Linear, Params, split};
use crate::model::{Init, Weights};

/// Positions of the layers in a block's unit.
#[derive(Debug)]
pub(super) struct Block {
    qkv: Linear,
    own_norms: [usize; 2],
    own_out: Linear,
    /// Norm before the attention to the text.
    norm: Option<Linear>,
    q: Linear,
    kv: Linear,
    text_norms: [usize; 2],
    text_out: Linear,
    feed_forward: [Linear; 2],
    modulation: usize,
}

impl Block {
    /// Adds the parameters of the block `name` and of its adapters, and returns their positions.
    pub fn layout(config: &WanConfig, params: &mut Params, name: &str) -> Block {
        let inner = config.inner_dim();
        let at = |rest: &str| format!("{name}.{rest}");
        let std = (inner as f64).powf(-0.5);
        let modulation = params.table(&at("scale_shift_table"), &[1, 6, inner], Init::Normal { std });
        let [q, k, v] = ["to_q", "to_k", "to_v"].map(|which| at(&format!("attn1.{which}")));
        let qkv = params.linears(&at("attn1.to_q+to_k+to_v"), &[&q, &k, &v], inner, inner);
        let own_norms = ["norm_q", "norm_k"].map(|norm| params.norm(&at(&format!("attn1.{norm}")), inner));
        let own_out = params.linear(&at("attn1.to_out.0"), inner, inner);
        let norm = config.cross_attn_norm.then(|| params.group_norm(&at("norm2"), inner));
        let q = params.linear(&at("attn2.to_q"), inner, inner);
        let [k, v] = ["to_k", "to_v"].map(|which| at(&format!("attn2.{which}")));
        let kv = params.linears(&at("attn2.to_k+to_v"), &[&k, &v], inner, inner);
        let text_norms = ["norm_q", "norm_k"].map(|norm| params.norm(&at(&format!("attn2.{norm}")), inner));
        let text_out = params.linear(&at("attn2.to_out.0"), inner, inner);
        let feed_forward = [
            params.linear(&at("ffn.net.0.proj"), config.ffn_dim, inner),
            params.linear(&at("ffn.net.2"), inner, config.ffn_dim),
        ];
        Block { qkv, own_norms, own_out, norm, q, kv, text_norms, text_out, feed_forward, modulation }
    }

    /// Maps `x` `[B, 7 + S + T, C]` with `text` text tokens to the same shape; only the patches change.
    /// `turns` are the cosines and sines of the patches' positions.
    pub fn forward(
        &self,
        config: &WanConfig,
        weights: &Weights,
        x: &Tensor,
        text: i64,
        turns: &[Tensor; 2],
    ) -> Result<Tensor> {
        let [before, patches] = split(x, [ROWS + text, x.size()[1] - ROWS - text])?;
        let words = before.f_narrow(1, ROWS, text)?;
        let table = weights.get(0, self.modulation);
        let modulation = before.f_narrow(1, 1, 6)?.f_add(table)?.f_split(1, 1)?;
        let [shift1, scale1, gate1, shift2, scale2, gate2] = &modulation[..] else {
            unreachable!("six rows")
        };

        let (patches, input) = modulated_norm(&patches, shift1, scale1, config.eps)?;
        let attended = self.attend(config, weights, &input, turns)?;
        let patches = gated_add(&patches, &attended, gate1)?;
        let input = match self.norm {
            Some(norm) => norm.layer_norm(weights, &patches, config.eps)?,
            None => patches.shallow_clone(),
        };
        let patches = patches.f_add(&self.read(config, weights, &input, &words)?)?;
        let (patches, input) = modulated_norm(&patches, shift2, scale2, config.eps)?;
        let [wide, narrow] = self.feed_forward;
        let out = narrow.forward(weights, &wide.forward(weights, &input)?.f_gelu("tanh")?)?;
        Ok(gated_sums_behind(&before, &[GatedSum { x: &patches, y: &out, gate: gate2 }])?)
    }

    /// Every patch attends to all patches.
    fn attend(
        &self,
        config: &WanConfig,
        weights: &Weights,
        x: &Tensor,
        turns: &[Tensor; 2],
    ) -> Result<Tensor> {
        let [q, k, v] = three(self.qkv.forward(weights, x)?.f_chunk(3, -1)?);
        let [q_norm, k_norm] = self.own_norms.map(|norm| weights.get(0, norm));
        let q = rotary::turn(&heads(config, &rms_norm(config, &q, q_norm)?)?, turns)?;
        let k = rotary::turn(&heads(config, &rms_norm(config, &k, k_norm)?)?, turns)?;
        self.own_out.forward(weights, &attention(&q, &k, &heads(config, &v)?)?)
    }

    /// Every patch attends to the text.
    fn read(&self, config: &WanConfig, weights: &Weights, x: &Tensor, words: &Tensor) -> Result<Tensor> {
        let kv = self.kv.forward(weights, words)?.f_chunk(2, -1)?;
        let [q_norm, k_norm] = self.text_norms.map(|norm| weights.get(0, norm));
        let q = heads(config, &rms_norm(config, &self.q.forward(weights, x)?, q_norm)?)?;
        let k = heads(config, &rms_norm(config, &kv[0], k_norm)?)?;
        self.text_out.forward(weights, &attention(&q, &k, &heads(config, &kv[1])?)?)
    }
}

fn three(chunks: Vec<Tensor>) -> [Tensor; 3] {
    chunks.try_into().expect("three chunks")
}

/// Maps `[B, N, C]` to `[B, N, H, D]`.
fn heads(config: &WanConfig, x: &Tensor) -> Result<Tensor> {
    let (batch, tokens) = (x.size()[0], x.size()[1]);
    Ok(x.f_reshape([batch, tokens, config.num_attention_heads, config.attention_head_dim])?)
}

/// Runs attention over heads `[B, N, H, D]`. Returns `[B, N, C]`.
fn attention(q: &Tensor, k: &Tensor, v: &Tensor) -> Result<Tensor> {
    let [q, k, v] = [q.f_transpose(1, 2)?, k.f_transpose(1, 2)?, v.f_transpose(1, 2)?];
    Ok(attend(&q, &k, &v, false)?.f_transpose(1, 2)?.f_flatten(2, 3)?)
}

/// Norms all heads together.
fn rms_norm(config: &WanConfig, x: &Tensor, weight: &Tensor) -> Result<Tensor> {
    Ok(rms_normed(x, weight, config.eps)?)
}

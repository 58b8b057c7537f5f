//! A joint block: patches and text, each with weights of its own, attend to all of both.

use tch::Tensor;

use super::Sd3Config;
use crate::Result;
use crate::diffusion::layers::{EPS, Linear, Lora, Params, layer_norm, modulate};
use crate::model::{ParamSpec, Unit, Weights};

/// Where each layer lies in a block's unit.
#[derive(Clone, Debug)]
pub(super) struct Block {
    patches: Stream,
    /// The text's; in the last block it has no output, and so neither projection nor feed-forward.
    text: Stream,
    /// The patches' second attention, among themselves.
    dual: Option<Attention>,
}

/// The layers of one of the two kinds of tokens.
#[derive(Clone, Debug)]
struct Stream {
    modulation: Linear,
    attention: Attention,
    feed_forward: Option<(Linear, Linear)>,
}

#[derive(Clone, Debug)]
struct Attention {
    qkv: Linear,
    /// The norms of queries and keys.
    qk_norm: Option<(usize, usize)>,
    out: Option<Linear>,
}

impl Block {
    /// The unit of a block, the parameters of its adapters, and where its layers lie.
    pub fn layout(config: &Sd3Config, layer: usize, lora: Option<&Lora>) -> (Unit, Vec<ParamSpec>, Block) {
        let is_last = layer + 1 == config.num_layers;
        let is_dual = config.dual_attention_layers.contains(&layer);
        let name = format!("transformer_blocks.{layer}");
        let mut params = Params::with_lora(lora);
        let mut layers = Layers { config, name: &name, params: &mut params };
        let patches = Stream {
            modulation: layers.linear("norm1.linear", if is_dual { 9 } else { 6 }, 1),
            attention: layers.attention(
                "attn",
                ["to_q", "to_k", "to_v"],
                ["norm_q", "norm_k"],
                Some("to_out.0"),
            ),
            feed_forward: Some(layers.feed_forward("ff")),
        };
        let text = Stream {
            modulation: layers.linear("norm1_context.linear", if is_last { 2 } else { 6 }, 1),
            attention: layers.attention(
                "attn",
                ["add_q_proj", "add_k_proj", "add_v_proj"],
                ["norm_added_q", "norm_added_k"],
                (!is_last).then_some("to_add_out"),
            ),
            feed_forward: (!is_last).then(|| layers.feed_forward("ff_context")),
        };
        let dual = is_dual.then(|| {
            layers.attention("attn2", ["to_q", "to_k", "to_v"], ["norm_q", "norm_k"], Some("to_out.0"))
        });
        let (unit, adapters) = params.into_units(&name);
        (unit, adapters, Block { patches, text, dual })
    }

    /// `x` `[B, 1 + S + T, C]`, of `text` text tokens, to the same shape, or from the last block on to
    /// `[B, 1 + T, C]`.
    pub fn forward(&self, config: &Sd3Config, weights: &Weights, x: &Tensor, text: i64) -> Result<Tensor> {
        let condition = x.f_narrow(1, 0, 1)?;
        let active = condition.f_silu()?;
        let words = x.f_narrow(1, 1, text)?;
        let patches = x.f_narrow(1, 1 + text, x.size()[1] - 1 - text)?;
        let of_patches =
            self.patches.modulation.forward(weights, &active)?.f_split(config.inner_dim(), -1)?;
        let of_words = self.text.modulation.forward(weights, &active)?.f_split(config.inner_dim(), -1)?;

        let normed = layer_norm(&patches)?;
        let patch_heads = self.patches.attention.heads(
            config,
            weights,
            &modulate(&normed, &of_patches[0], &of_patches[1])?,
        )?;
        // Where the text has no output, diffusers' norm has the scale before the shift.
        let (shift, scale) = if of_words.len() == 2 { (1, 0) } else { (0, 1) };
        let word_input = modulate(&layer_norm(&words)?, &of_words[shift], &of_words[scale])?;
        let word_heads = self.text.attention.heads(config, weights, &word_input)?;
        let attended = attend(&[patch_heads, word_heads])?;
        let (patch_count, word_count) = (patches.size()[1], words.size()[1]);

        let out = self.patches.attention.project(weights, &attended.f_narrow(1, 0, patch_count)?)?;
        let mut patches = patches.f_add(&out.f_mul(&of_patches[2])?)?;
        if let Some(dual) = &self.dual {
            let input = modulate(&normed, &of_patches[6], &of_patches[7])?;
            let out = dual.project(weights, &attend(&[dual.heads(config, weights, &input)?])?)?;
            patches = patches.f_add(&out.f_mul(&of_patches[8])?)?;
        }
        let patches = self.patches.feed_forward(weights, &patches, &of_patches)?;
        if self.text.feed_forward.is_none() {
            return Ok(Tensor::f_cat(&[condition, patches], 1)?);
        }
        let out = self.text.attention.project(weights, &attended.f_narrow(1, patch_count, word_count)?)?;
        let words = words.f_add(&out.f_mul(&of_words[2])?)?;
        let words = self.text.feed_forward(weights, &words, &of_words)?;
        Ok(Tensor::f_cat(&[condition, words, patches], 1)?)
    }
}

impl Stream {
    /// The second half, with the shift, scale and gate that are the fourth to sixth of `modulation`.
    fn feed_forward(&self, weights: &Weights, x: &Tensor, modulation: &[Tensor]) -> Result<Tensor> {
        let (wide, narrow) = self.feed_forward.expect("a stream with an output has a feed-forward");
        let input = modulate(&layer_norm(x)?, &modulation[3], &modulation[4])?;
        let out = narrow.forward(weights, &wide.forward(weights, &input)?.f_gelu("tanh")?)?;
        Ok(x.f_add(&out.f_mul(&modulation[5])?)?)
    }
}

impl Attention {
    /// Queries, keys and values of `x` `[B, N, C]`: `[B, H, N, C / H]` each.
    fn heads(&self, config: &Sd3Config, weights: &Weights, x: &Tensor) -> Result<[Tensor; 3]> {
        let shape = [x.size()[0], x.size()[1], 3, config.num_attention_heads, config.attention_head_dim];
        let qkv = self.qkv.forward(weights, x)?.f_view(shape)?.f_permute([2, 0, 3, 1, 4])?;
        let [mut q, mut k, v] = [qkv.f_select(0, 0)?, qkv.f_select(0, 1)?, qkv.f_select(0, 2)?];
        if let Some((q_norm, k_norm)) = self.qk_norm {
            let size = [config.attention_head_dim];
            q = q.f_rms_norm(size, Some(weights.get(0, q_norm)), EPS)?;
            k = k.f_rms_norm(size, Some(weights.get(0, k_norm)), EPS)?;
        }
        Ok([q, k, v])
    }

    fn project(&self, weights: &Weights, x: &Tensor) -> Result<Tensor> {
        self.out.expect("a stream with an output has a projection").forward(weights, x)
    }
}

/// The heads of all kinds of tokens, attending to each other: `[B, N, C]`, the kinds one after another.
fn attend(kinds: &[[Tensor; 3]]) -> Result<Tensor> {
    let join = |which: usize| Tensor::f_cat(&kinds.iter().map(|kind| &kind[which]).collect::<Vec<_>>(), 2);
    let (q, k, v) = (join(0)?, join(1)?, join(2)?);
    let out = Tensor::f_scaled_dot_product_attention(&q, &k, &v, None::<&Tensor>, 0.0, false, None, false)?;
    Ok(out.f_transpose(1, 2)?.f_flatten(2, 3)?)
}

/// Lists a block's layers, whose sizes are multiples of the inner one.
struct Layers<'a, 'b> {
    config: &'a Sd3Config,
    name: &'a str,
    params: &'a mut Params<'b>,
}

impl Layers<'_, '_> {
    fn linear(&mut self, rest: &str, rows: i64, columns: i64) -> Linear {
        let inner = self.config.inner_dim();
        self.params.linear(&format!("{}.{rest}", self.name), rows * inner, columns * inner)
    }

    fn feed_forward(&mut self, rest: &str) -> (Linear, Linear) {
        (self.linear(&format!("{rest}.net.0.proj"), 4, 1), self.linear(&format!("{rest}.net.2"), 1, 4))
    }

    fn attention(&mut self, rest: &str, qkv: [&str; 3], norms: [&str; 2], out: Option<&str>) -> Attention {
        let inner = self.config.inner_dim();
        let name = format!("{}.{rest}", self.name);
        let names = qkv.map(|which| format!("{name}.{which}"));
        let [q, k, v] = &names;
        let qkv = self.params.linears(&format!("{name}.{}", qkv.join("+")), &[q, k, v], inner, inner);
        let qk_norm = self.config.qk_rms_norm.then(|| {
            let [q, k] =
                norms.map(|norm| self.params.norm(&format!("{name}.{norm}"), self.config.attention_head_dim));
            (q, k)
        });
        Attention { qkv, qk_norm, out: out.map(|out| self.linear(&format!("{rest}.{out}"), 1, 1)) }
    }
}

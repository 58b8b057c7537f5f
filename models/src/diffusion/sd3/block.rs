//! A joint block: patches and text, each with their own weights, attend to all patches and text.

use anyroll_backends::ops::{
    self, GatedSum, TokenKind, gated_add, gated_sums_behind, joint_heads, modulated_norm,
};
use tch::Tensor;

use super::Sd3Config;
use crate::Result;
use crate::diffusion::layers::{EPS, Linear, Lora, Params, split};
use crate::model::{ParamSpec, Unit, Weights};

/// Positions of the layers in a block's unit.
#[derive(Clone, Debug)]
pub(super) struct Block {
    patches: Stream,
    /// Layers of the text. In the last block the text has no output, and so no projection and no
    /// feed-forward.
    text: Stream,
    /// Second attention of the patches, among themselves.
    dual: Option<Attention>,
}

/// Layers of one of the two kinds of tokens.
#[derive(Clone, Debug)]
struct Stream {
    modulation: Linear,
    attention: Attention,
    feed_forward: Option<(Linear, Linear)>,
}

#[derive(Clone, Debug)]
struct Attention {
    qkv: Linear,
    /// Norms of queries and keys.
    qk_norm: Option<(usize, usize)>,
    out: Option<Linear>,
}

impl Block {
    /// Returns the unit of a block, its adapters' parameters, and the positions of its layers.
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

    /// Maps `x` `[B, 1 + S + T, C]` with `text` text tokens to the same shape; the last block returns `[B, 1
    /// + T, C]`.
    pub fn forward(&self, config: &Sd3Config, weights: &Weights, x: &Tensor, text: i64) -> Result<Tensor> {
        let [condition, words, patches] = split(x, [1, text, x.size()[1] - 1 - text])?;
        let active = condition.f_silu()?;
        let of_patches =
            self.patches.modulation.forward(weights, &active)?.f_split(config.inner_dim(), -1)?;
        let of_words = self.text.modulation.forward(weights, &active)?.f_split(config.inner_dim(), -1)?;

        let (mut patches, input) = modulated_norm(&patches, &of_patches[0], &of_patches[1], EPS)?;
        let patch_qkv = self.patches.attention.qkv.forward(weights, &input)?;
        // If the text has no output, diffusers' norm has the scale before the shift.
        let (shift, scale) = if of_words.len() == 2 { (1, 0) } else { (0, 1) };
        let (words, input) = modulated_norm(&words, &of_words[shift], &of_words[scale], EPS)?;
        let word_qkv = self.text.attention.qkv.forward(weights, &input)?;
        let kinds = [
            self.patches.attention.tokens(weights, &patch_qkv),
            self.text.attention.tokens(weights, &word_qkv),
        ];
        let attended = attend(config, &kinds)?;
        let [patches_saw, words_saw] = split(&attended, [patches.size()[1], text])?;

        let mut of_dual = None;
        if let Some(dual) = &self.dual {
            let input;
            (patches, input) = modulated_norm(&patches, &of_patches[6], &of_patches[7], EPS)?;
            let qkv = dual.qkv.forward(weights, &input)?;
            of_dual = Some(dual.project(weights, &attend(config, &[dual.tokens(weights, &qkv)])?)?);
        }
        let out = self.patches.attention.project(weights, &patches_saw)?;
        patches = gated_add(&patches, &out, &of_patches[2])?;
        if let Some(out) = of_dual {
            patches = gated_add(&patches, &out, &of_patches[8])?;
        }
        let (patches, of_feed_forward) = self.patches.feed_forward(weights, &patches, &of_patches)?;
        let patches = GatedSum { x: &patches, y: &of_feed_forward, gate: &of_patches[5] };
        if self.text.feed_forward.is_none() {
            return Ok(gated_sums_behind(&condition, &[patches])?);
        }
        let out = self.text.attention.project(weights, &words_saw)?;
        let words = gated_add(&words, &out, &of_words[2])?;
        let (words, of_feed_forward) = self.text.feed_forward(weights, &words, &of_words)?;
        let words = GatedSum { x: &words, y: &of_feed_forward, gate: &of_words[5] };
        Ok(gated_sums_behind(&condition, &[words, patches])?)
    }
}

impl Stream {
    /// Returns the tokens, and the feed-forward's output for them. Uses the fourth and fifth tensor of
    /// `modulation` as shift and scale.
    fn feed_forward(&self, weights: &Weights, x: &Tensor, modulation: &[Tensor]) -> Result<(Tensor, Tensor)> {
        let (wide, narrow) = self.feed_forward.expect("a stream with an output has a feed-forward");
        let (x, input) = modulated_norm(x, &modulation[3], &modulation[4], EPS)?;
        let out = narrow.forward(weights, &wide.forward(weights, &input)?.f_gelu("tanh")?)?;
        Ok((x, out))
    }
}

impl Attention {
    /// Returns tokens with these queries, keys and values.
    fn tokens<'a>(&self, weights: &Weights<'a>, qkv: &'a Tensor) -> TokenKind<'a> {
        let norms = self.qk_norm.map(|(q, k)| [weights.get(0, q), weights.get(0, k)]);
        TokenKind { qkv, norms }
    }

    fn project(&self, weights: &Weights, x: &Tensor) -> Result<Tensor> {
        self.out.expect("a stream with an output has a projection").forward(weights, x)
    }
}

/// Runs attention over all kinds of tokens. Returns `[B, N, C]`, the kinds one after the other.
fn attend(config: &Sd3Config, kinds: &[TokenKind]) -> Result<Tensor> {
    let [q, k, v] = joint_heads(kinds, config.num_attention_heads, EPS)?.map(|heads| heads.f_transpose(1, 2));
    Ok(ops::attend(&q?, &k?, &v?, false)?.f_transpose(1, 2)?.f_flatten(2, 3)?)
}

/// Lists a block's layers, whose sizes are multiples of the inner size.
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

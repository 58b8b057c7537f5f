//! A transformer block: attention and a feed-forward, each modulated and gated by the conditioning.

use anyroll_backends::ops::{GatedSum, attend, gated_add, gated_sums_behind, modulated_norm};
use tch::Tensor;

use super::{DitConfig, conditioned};
use crate::Result;
use crate::diffusion::layers::{EPS, Linear, Params};
use crate::model::{Unit, Weights};

/// Positions of the layers in a block's unit.
#[derive(Debug)]
pub(super) struct Block {
    qkv: Linear,
    projection: Linear,
    feed_forward: [Linear; 2],
    modulation: Linear,
}

impl Block {
    /// Returns the unit of a block, and the positions of its layers in it.
    pub fn layout(config: &DitConfig, layer: usize) -> (Unit, Block) {
        let (hidden, intermediate) = (config.hidden_size, config.intermediate_size);
        let name = format!("blocks.{layer}");
        let mut params = Params::default();
        let mut linear = |rest: &str, rows, columns| params.linear(&format!("{name}.{rest}"), rows, columns);
        let qkv = linear("attn.qkv", 3 * hidden, hidden);
        let projection = linear("attn.proj", hidden, hidden);
        let feed_forward = [linear("mlp.fc1", intermediate, hidden), linear("mlp.fc2", hidden, intermediate)];
        // A block is initialized as the identity.
        let modulation = params.zero_linear(&format!("{name}.adaLN_modulation.1"), 6 * hidden, hidden);
        let block = Block { qkv, projection, feed_forward, modulation };
        (params.into_unit(&name), block)
    }

    /// Maps `x` `[B, 1 + T, C]` to the same shape; the conditioning is passed through.
    pub fn forward(&self, config: &DitConfig, weights: &Weights, x: &Tensor) -> Result<Tensor> {
        let (condition, tokens) = conditioned(x)?;
        let modulation = self.modulation.forward(weights, &condition)?.f_chunk(6, -1)?;
        let [shift1, scale1, gate1, shift2, scale2, gate2] = &modulation[..] else {
            unreachable!("six chunks")
        };

        let (tokens, input) = modulated_norm(&tokens, shift1, scale1, EPS)?;
        let attended = self.attention(config, weights, &input)?;
        let tokens = gated_add(&tokens, &attended, gate1)?;
        let (tokens, input) = modulated_norm(&tokens, shift2, scale2, EPS)?;
        let [fc1, fc2] = self.feed_forward;
        let out = fc2.forward(weights, &fc1.forward(weights, &input)?.f_gelu("tanh")?)?;
        let sum = GatedSum { x: &tokens, y: &out, gate: gate2 };
        Ok(gated_sums_behind(&x.f_narrow(1, 0, 1)?, &[sum])?)
    }

    /// Every patch attends to all patches of its image.
    fn attention(&self, config: &DitConfig, weights: &Weights, x: &Tensor) -> Result<Tensor> {
        let (patches, heads) = (x.size()[1], config.heads);
        let shape = [-1, patches, 3, heads, config.hidden_size / heads];
        let qkv = self.qkv.forward(weights, x)?.f_view(shape)?.f_permute([2, 0, 3, 1, 4])?;
        let [q, k, v] = [qkv.f_select(0, 0)?, qkv.f_select(0, 1)?, qkv.f_select(0, 2)?];
        let attended =
            attend(&q, &k, &v, false)?.f_transpose(1, 2)?.f_reshape([-1, patches, config.hidden_size])?;
        self.projection.forward(weights, &attended)
    }
}

//! A layer of GLM-4: norms on both sides of each branch, a fused gate, and adjacent elements of a part of each head
//! rotate together.

use tch::Tensor;

use super::operations::{Pairs, beside, columns, rotated};
use super::pass::{Linear, Params, Pass};
use crate::Result;

#[derive(Clone, Debug)]
pub(super) struct Layer {
    heads: i64,
    kv_heads: i64,
    dim: i64,
    rotary: i64,
    intermediate: i64,
    eps: f64,
    norms: [usize; 4],
    q: Linear,
    k: Linear,
    v: Linear,
    o: Linear,
    gate_up: Linear,
    down: Linear,
}

impl Layer {
    pub fn new(params: &mut Params) -> Layer {
        let config = params.config;
        let (heads, kv_heads, dim, hidden, width) = (
            config.num_attention_heads,
            config.num_key_value_heads,
            config.head_dim,
            config.hidden_size,
            config.intermediate_size,
        );
        let norms =
            ["input_layernorm", "post_self_attn_layernorm", "post_attention_layernorm", "post_mlp_layernorm"];
        Layer {
            heads,
            kv_heads,
            dim,
            rotary: config.rotary_dim(),
            intermediate: width,
            eps: config.rms_norm_eps,
            norms: norms.map(|name| params.norm(name, hidden)),
            q: params.linear("self_attn.q_proj", heads * dim, hidden, config.qkv_bias),
            k: params.linear("self_attn.k_proj", kv_heads * dim, hidden, config.qkv_bias),
            v: params.linear("self_attn.v_proj", kv_heads * dim, hidden, config.qkv_bias),
            o: params.linear("self_attn.o_proj", hidden, heads * dim, false),
            gate_up: params.linear("mlp.gate_up_proj", 2 * width, hidden, false),
            down: params.linear("mlp.down_proj", hidden, width, false),
        }
    }

    /// Returns queries `[N, H, D]`, keys and values `[N, K, D]`.
    pub fn project(&self, pass: &Pass, x: &Tensor, turns: &Tensor) -> Result<[Tensor; 3]> {
        let h = pass.norm(self.norms[0], x, self.eps)?;
        let heads = |linear, count| -> Result<Tensor> {
            Ok(pass.linear(linear, &h)?.f_reshape([-1, count, self.dim])?)
        };
        let turned = |x: Tensor| {
            let turned = rotated(&columns(&x, 0, self.rotary)?, turns, Pairs::Adjacent)?;
            match self.dim - self.rotary {
                0 => Ok(turned),
                rest => beside(&turned, &columns(&x, self.rotary, rest)?),
            }
        };
        Ok([
            turned(heads(self.q, self.heads)?)?,
            turned(heads(self.k, self.kv_heads)?)?,
            heads(self.v, self.kv_heads)?,
        ])
    }

    /// Returns the layer's output from attention's `[N, H D]`.
    pub fn finish(&self, pass: &Pass, x: &Tensor, attended: &Tensor) -> Result<Tensor> {
        let branch = pass.norm(self.norms[1], &pass.linear(self.o, attended)?, self.eps)?;
        let x = x.f_add(&branch)?;
        let gate_up = pass.linear(self.gate_up, &pass.norm(self.norms[2], &x, self.eps)?)?;
        let width = self.intermediate;
        let (gate, up) = (columns(&gate_up, 0, width)?, columns(&gate_up, width, width)?);
        let branch = pass.linear(self.down, &gate.f_silu()?.f_mul(&up)?)?;
        Ok(x.f_add(&pass.norm(self.norms[3], &branch, self.eps)?)?)
    }
}

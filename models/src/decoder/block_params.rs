//! The parameters of a decoder block, in the order of its unit.

use super::block::Block;
use super::experts::{self, Experts};
use super::{DecoderConfig, NormPlaces, QkNorm, math::Math, matrix_spec, norm_spec};
use crate::model::{Init, ParamSpec, Part, Unit};

/// Returns the unit of a layer's block, and the block.
pub(super) fn layout(config: &DecoderConfig, layer: usize) -> (Unit, Block) {
    let name = format!("model.layers.{layer}");
    let (params, block) = params(config, layer, &name);
    (Unit { name, params, trainable: true }, block)
}

/// Returns the parameters of the layer `prefix` in the order of its unit, and the block with their indices.
fn params(config: &DecoderConfig, layer: usize, prefix: &str) -> (Vec<ParamSpec>, Block) {
    let (hidden, intermediate, dim) = (config.hidden_size, config.intermediate_size, config.head_dim);
    let (heads, kv_heads) = (config.num_attention_heads, config.num_key_value_heads);
    let std = config.initializer_range;
    let name = |rest: &str| format!("{prefix}.{rest}");
    let qkv_parts = |kind: &str| {
        let part = |which: &str, heads: i64| Part {
            name: name(&format!("self_attn.{which}_proj.{kind}")),
            rows: heads * dim,
        };
        match config.fused_projections {
            true => vec![part("qkv", heads + 2 * kv_heads)],
            false => vec![part("q", heads), part("k", kv_heads), part("v", kv_heads)],
        }
    };
    let gate_up_parts = |kind: &str| {
        let part = |which: &str, rows: i64| Part { name: name(&format!("mlp.{which}_proj.{kind}")), rows };
        match config.fused_projections {
            true => vec![part("gate_up", 2 * intermediate)],
            false => vec![part("gate", intermediate), part("up", intermediate)],
        }
    };

    let mut params = Vec::new();
    let mut add = |spec: ParamSpec| {
        params.push(spec);
        params.len() - 1
    };
    let matrix = |rest: &str, rows: i64, columns: i64| matrix_spec(name(rest), rows, columns, std);
    let bias = |rest: &str, parts: Vec<Part>| {
        let shape = vec![parts.iter().map(|part| part.rows).sum()];
        ParamSpec { name: name(rest), shape, parts, init: Init::Zeros, decay: false, offset: 0.0 }
    };
    let one_bias = |rest: &str, rows: i64| bias(rest, vec![Part { name: name(rest), rows }]);
    let qkv_rows = (heads + 2 * kv_heads) * dim;
    let norm_of = |rest: &str, width: i64| norm_spec(name(rest), width, config.norm_offset);
    let norm = |rest: &str| norm_of(&format!("{rest}_layernorm.weight"), hidden);
    let before = config.norms != NormPlaces::After;
    let after = config.norms != NormPlaces::Before;
    let input_norm = before.then(|| add(norm("input")));
    let qkv = add(ParamSpec {
        parts: qkv_parts("weight"),
        ..matrix("self_attn.qkv_proj.weight", qkv_rows, hidden)
    });
    let qkv_bias = config.qkv_bias.then(|| add(bias("self_attn.qkv_proj.bias", qkv_parts("bias"))));
    let norms_heads_together = config.qk_norm == Some(QkNorm::Together);
    let qk_norm = config.qk_norm.map(|_| {
        let width = |heads: i64| if norms_heads_together { heads * dim } else { dim };
        let q_norm = add(norm_of("self_attn.q_norm.weight", width(heads)));
        (q_norm, add(norm_of("self_attn.k_norm.weight", width(kv_heads))))
    });
    let o = add(matrix("self_attn.o_proj.weight", hidden, heads * dim));
    let o_bias = config.o_bias.then(|| add(one_bias("self_attn.o_proj.bias", hidden)));
    let attention_norm = after.then(|| add(norm("post_attention")));
    // Named after the first family with it. A model with both kinds has names that match the positions.
    let mlp_input_norm = before.then(|| add(norm(if after { "pre_feedforward" } else { "post_attention" })));
    let of_experts = config.experts_of(layer).map(|it| (it, experts::params(config, it, prefix)));
    let (experts, gate_up_spec, down_spec) = match of_experts {
        Some((experts, [router, gate_up, down])) => (Some(Experts::new(experts, add(router))), gate_up, down),
        None => {
            let gate_up = matrix("mlp.gate_up_proj.weight", 2 * intermediate, hidden);
            let gate_up = ParamSpec { parts: gate_up_parts("weight"), ..gate_up };
            (None, gate_up, matrix("mlp.down_proj.weight", hidden, intermediate))
        }
    };
    let block = Block {
        input_norm,
        qkv,
        qkv_bias,
        qk_norm,
        norms_heads_together,
        o,
        o_bias,
        attention_norm,
        mlp_input_norm,
        experts,
        gate_up: add(gate_up_spec),
        gate_up_bias: config.mlp_bias.then(|| add(bias("mlp.gate_up_proj.bias", gate_up_parts("bias")))),
        down: add(down_spec),
        down_bias: config.mlp_bias.then(|| add(one_bias("mlp.down_proj.bias", hidden))),
        mlp_norm: after.then(|| add(norm("post_feedforward"))),
        heads,
        kv_heads,
        head_dim: dim,
        eps: config.rms_norm_eps,
        scale: config.attention_multiplier(),
        residual_multiplier: config.multipliers.residual,
        activation: config.activation,
        deterministic: true,
        math: Math::Fast,
        lora: None,
        peers: None,
        spread: None,
        kv_sharers: 1,
    };
    (params, block)
}

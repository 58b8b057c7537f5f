//! The shape of a decoder with new weights.

use serde::{Deserialize, Serialize};

use crate::document::Section;

/// Shape of a decoder: RMSNorm, rotary positions, grouped-query attention, SwiGLU.
#[derive(Clone, Debug, PartialEq, Deserialize, Serialize)]
#[serde(deny_unknown_fields)]
pub struct DecoderConfig {
    /// Width of the residual stream; a multiple of `heads`, with an even quotient (the head's width).
    pub hidden_size: usize,
    /// Number of decoder blocks; 1 or above.
    pub layers: usize,
    /// Number of query heads; 1 or above.
    pub heads: usize,
    /// Number of key and value heads, a divisor of `heads`. Default: `heads`, no sharing.
    #[serde(default)]
    pub kv_heads: Option<usize>,
    /// Width of the feed-forward's hidden layer; in a mixture of experts, of the blocks in `mlp_only_layers` alone.
    pub intermediate_size: usize,
    /// Number of experts, 1 or above, which makes the feed-forward a mixture of experts, as in Qwen3-MoE. Default: no
    /// experts.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub num_experts: Option<usize>,
    /// Number of experts that process a token; from 1 to `num_experts`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub num_experts_per_tok: Option<usize>,
    /// Width of an expert's hidden layer; 1 or above.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub moe_intermediate_size: Option<usize>,
    /// True if the weights of a token's experts are divided by their sum. Default true.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub norm_topk_prob: Option<bool>,
    /// Indices of the blocks without experts, from 0. Default: none.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub mlp_only_layers: Option<Vec<usize>>,
    /// Maximum length of a sequence in tokens, prompt and completion together; 1 or above.
    pub max_length: usize,
    /// Base of the rotary positions' wavelengths; above 1. Default 10000.
    #[serde(default = "ten_thousand")]
    pub rope_theta: f64,
    /// Constant added to the mean square in RMSNorm; above 0. Default 1e-6.
    #[serde(default = "one_millionth")]
    pub norm_eps: f64,
    /// Adds a bias to the query, key and value projections, as in Qwen2. Default false.
    #[serde(default)]
    pub qkv_bias: bool,
    /// Applies RMSNorm to each head's query and key, as in Qwen3. Default false.
    #[serde(default)]
    pub qk_norm: bool,
    /// Uses one matrix for the embedding and the output head. Default false.
    #[serde(default)]
    pub tie_embeddings: bool,
}

impl DecoderConfig {
    pub(super) fn validate(&self, at: &Section) {
        let kv_heads = self.kv_heads.unwrap_or(self.heads);
        for (name, size) in [
            ("hidden_size", self.hidden_size),
            ("layers", self.layers),
            ("heads", self.heads),
            ("intermediate_size", self.intermediate_size),
            ("max_length", self.max_length),
        ] {
            at.positive(name, size);
        }
        if let Some(kv_heads) = self.kv_heads {
            at.positive("kv_heads", kv_heads);
        }
        self.validate_experts(at);
        let Self { hidden_size, heads, .. } = *self;
        let of_heads = at.given(&["heads"]);
        of_heads.ensure(
            heads.is_multiple_of(kv_heads),
            "kv_heads",
            format!("{heads} query heads cannot share {kv_heads} key and value heads evenly"),
            format!("write a divisor of `heads`, {heads}"),
        );
        let width = heads.saturating_mul(2);
        of_heads.ensure(
            hidden_size.is_multiple_of(width),
            "hidden_size",
            format!("{heads} heads of an even width do not make {hidden_size}"),
            format!("write a multiple of {width}: rotary positions turn pairs of a head's elements"),
        );
        at.number("rope_theta", self.rope_theta, self.rope_theta > 1.0, "above 1");
        at.number("norm_eps", self.norm_eps, self.norm_eps > 0.0, "above 0");
    }

    /// Reports a mixture of experts with missing fields, or of a form that no published family has.
    fn validate_experts(&self, at: &Section) {
        let Some(experts) = self.num_experts else {
            for (name, is_there) in [
                ("num_experts_per_tok", self.num_experts_per_tok.is_some()),
                ("moe_intermediate_size", self.moe_intermediate_size.is_some()),
                ("norm_topk_prob", self.norm_topk_prob.is_some()),
                ("mlp_only_layers", self.mlp_only_layers.is_some()),
            ] {
                let help = "write `num_experts` beside it, or leave it out";
                at.given(&["num_experts"]).ensure(!is_there, name, "there are no experts", help);
            }
            return;
        };
        at.positive("num_experts", experts);
        for (name, size) in [
            ("num_experts_per_tok", self.num_experts_per_tok),
            ("moe_intermediate_size", self.moe_intermediate_size),
        ] {
            match size {
                Some(size) => at.positive(name, size),
                None => at.given(&[name]).ensure(
                    false,
                    "num_experts",
                    format!("experts have no `{name}`"),
                    format!("write `{name}` beside it"),
                ),
            };
        }
        let chosen = self.num_experts_per_tok.unwrap_or(1);
        let message = format!("a token cannot go to {chosen} of {experts} experts");
        let help = format!("write {experts} or fewer");
        at.given(&["num_experts"]).ensure(chosen <= experts, "num_experts_per_tok", message, help);
        self.validate_plain_layers(&at.given(&["layers"]));
        at.given(&["qk_norm", "qkv_bias"]).ensure(
            self.qk_norm && !self.qkv_bias,
            "num_experts",
            "published families with experts have norms on queries and keys, and no biases",
            "write `qk_norm: true`, `qkv_bias: false`",
        );
    }

    /// Reports indices of blocks that do not exist, and a mixture of experts whose blocks all have none.
    fn validate_plain_layers(&self, at: &Section) {
        let (layers, plain) = (self.layers, self.mlp_only_layers.as_deref().unwrap_or_default());
        let unknown = plain.iter().find(|&&layer| layer >= layers);
        let message = unknown.map_or_else(String::new, |layer| format!("there is no layer {layer}"));
        let help = format!("write some of 0 to {}", layers.saturating_sub(1));
        at.ensure(unknown.is_none(), "mlp_only_layers", message, help);
        let message = "no layer has experts";
        let help = "leave a layer out, or all fields of experts";
        at.ensure((0..layers).any(|it| !plain.contains(&it)), "mlp_only_layers", message, help);
    }
}

// serde's attributes take functions only.

fn ten_thousand() -> f64 {
    10_000.0
}

fn one_millionth() -> f64 {
    1e-6
}

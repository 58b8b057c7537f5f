//! A layer of DeepSeek-V3 (2412.19437): keys and values of all heads are made of one short vector per token (MLA),
//! and the MLP is a mixture with a shared expert, whose router has a bias for the choice.

use tch::Tensor;

use super::super::{DecoderConfig, ExpertNames, ExpertsConfig, experts};
use super::operations::{Choice, Pairs, beside, columns, rotated};
use super::pass::{Linear, Mixture, Mlp, Params, Pass};
use crate::Result;
use crate::error::check_config;

/// The fields of a DeepSeek-V3 that other decoders lack, with the names of its `config.json`. Its heads of queries and
/// keys have `qk_nope_head_dim` elements and then `qk_rope_head_dim` rotated ones: `head_dim` in total.
#[derive(Clone, Debug, PartialEq)]
pub struct DeepseekV3 {
    /// Width between the two matrices of queries; `None`: one matrix.
    pub q_lora_rank: Option<i64>,
    /// Width of the vector that keys and values are made of.
    pub kv_lora_rank: i64,
    /// Rotated elements of a head of queries and keys.
    pub qk_rope_head_dim: i64,
    /// Width of a head of values, at most that of queries.
    pub v_head_dim: i64,
    /// Elements that rotate together; adjacent if `rope_interleave`.
    pub pairs: Pairs,
    /// Logarithmic growth of the attention scores with YaRN's factor; 0: none.
    pub mscale_all_dim: f64,
    /// Number of first layers with an MLP.
    pub first_k_dense_replace: usize,
    /// Number of experts E.
    pub n_routed_experts: i64,
    /// Number of experts per token J.
    pub num_experts_per_tok: i64,
    /// Width of an expert.
    pub moe_intermediate_size: i64,
    /// Width of the shared expert, in widths of one.
    pub n_shared_experts: i64,
    /// Number of groups of experts, of at least two each.
    pub n_group: i64,
    /// Number of groups that offer experts to a token.
    pub topk_group: i64,
    /// True if a token's weights are divided by their sum.
    pub norm_topk_prob: bool,
    /// Factor of the weights.
    pub routed_scaling_factor: f64,
}

/// Added to the mean square in the norms of short vectors, whatever the model's is.
const EPS: f64 = 1e-6;

impl DeepseekV3 {
    /// Checks the fields.
    pub(super) fn validate(&self, config: &DecoderConfig) -> Result<()> {
        let sizes = [
            ("q_lora_rank", self.q_lora_rank.unwrap_or(1)),
            ("kv_lora_rank", self.kv_lora_rank),
            ("v_head_dim", self.v_head_dim),
            ("n_routed_experts", self.n_routed_experts),
            ("num_experts_per_tok", self.num_experts_per_tok),
            ("moe_intermediate_size", self.moe_intermediate_size),
            ("n_shared_experts", self.n_shared_experts),
            ("n_group", self.n_group),
            ("topk_group", self.topk_group),
        ];
        for (field, size) in sizes {
            let most = super::super::config::MOST_WIDTH;
            check_config((1..=most).contains(&size), field, || format!("is {size}, must be 1 to {most}"))?;
        }
        let (dim, rope) = (config.head_dim, self.qk_rope_head_dim);
        check_config(rope > 0 && rope < dim && rope % 2 == 0, "qk_rope_head_dim", || {
            format!("is {rope}, must be even, above 0 and below the {dim} elements of a head")
        })?;
        check_config(self.v_head_dim <= dim, "v_head_dim", || {
            format!("is {}, must be at most the {dim} elements of a head of queries", self.v_head_dim)
        })?;
        let (heads, kv_heads) = (config.num_attention_heads, config.num_key_value_heads);
        check_config(kv_heads == heads, "num_key_value_heads", || {
            format!("is {kv_heads}, must be the {heads} heads of queries")
        })?;
        let (experts, groups) = (self.n_routed_experts, self.n_group);
        check_config(experts % groups == 0 && experts >= 2 * groups, "n_group", || {
            format!("is {groups}, must divide n_routed_experts = {experts} into groups of at least 2")
        })?;
        check_config(self.topk_group <= groups, "topk_group", || {
            format!("is {}, must be at most n_group = {groups}", self.topk_group)
        })?;
        let offered = self.topk_group * (experts / groups);
        check_config(self.num_experts_per_tok <= offered, "num_experts_per_tok", || {
            format!("is {}, but a token's groups have {offered} experts", self.num_experts_per_tok)
        })?;
        let scale = self.routed_scaling_factor;
        check_config(scale > 0.0 && scale.is_finite(), "routed_scaling_factor", || {
            format!("is {scale}, must be a positive number")
        })?;
        let grows = self.mscale_all_dim;
        check_config(grows >= 0.0 && grows.is_finite(), "mscale_all_dim", || {
            format!("is {grows}, must be a number and not below 0")
        })
    }
}

#[derive(Clone, Debug)]
pub(super) struct Layer {
    config: DeepseekV3,
    heads: i64,
    dim: i64,
    eps: f64,
    input_norm: usize,
    q: Query,
    kv_a: Linear,
    kv_norm: usize,
    kv_b: Linear,
    o: Linear,
    mlp_norm: usize,
    mlp: Branch,
}

#[derive(Clone, Copy, Debug)]
enum Query {
    Whole(Linear),
    Short { a: Linear, norm: usize, b: Linear },
}

#[derive(Clone, Copy, Debug)]
enum Branch {
    Mlp(Mlp),
    Mixture(Mixture),
}

impl Layer {
    pub fn new(of: &DeepseekV3, params: &mut Params, layer: usize) -> Layer {
        let config = params.config;
        let (heads, dim, hidden, is_biased) =
            (config.num_attention_heads, config.head_dim, config.hidden_size, config.o_bias);
        let input_norm = params.norm("input_layernorm", hidden);
        let q = match of.q_lora_rank {
            None => Query::Whole(params.linear("self_attn.q_proj", heads * dim, hidden, false)),
            Some(rank) => Query::Short {
                a: params.linear("self_attn.q_a_proj", rank, hidden, is_biased),
                norm: params.norm("self_attn.q_a_layernorm", rank),
                b: params.linear("self_attn.q_b_proj", heads * dim, rank, false),
            },
        };
        let rank = of.kv_lora_rank;
        let kv_width = heads * (dim - of.qk_rope_head_dim + of.v_head_dim);
        let kv_a_width = rank + of.qk_rope_head_dim;
        Layer {
            config: of.clone(),
            heads,
            dim,
            eps: config.rms_norm_eps,
            input_norm,
            q,
            kv_a: params.linear("self_attn.kv_a_proj_with_mqa", kv_a_width, hidden, is_biased),
            kv_norm: params.norm("self_attn.kv_a_layernorm", rank),
            kv_b: params.linear("self_attn.kv_b_proj", kv_width, rank, false),
            o: params.linear("self_attn.o_proj", hidden, heads * of.v_head_dim, is_biased),
            mlp_norm: params.norm("post_attention_layernorm", hidden),
            mlp: match layer < of.first_k_dense_replace {
                true => Branch::Mlp(
                    params.mlp(["mlp.gate_proj", "mlp.up_proj", "mlp.down_proj"], config.intermediate_size),
                ),
                false => Branch::Mixture(mixture(of, params)),
            },
        }
    }

    /// Returns queries, keys and values `[N, H, D]`.
    pub fn project(&self, pass: &Pass, x: &Tensor, turns: &Tensor) -> Result<[Tensor; 3]> {
        let DeepseekV3 { kv_lora_rank: rank, qk_rope_head_dim: rope, v_head_dim, pairs, .. } = self.config;
        let plain = self.dim - rope;
        let h = pass.norm(self.input_norm, x, self.eps)?;
        let q = match self.q {
            Query::Whole(q) => pass.linear(q, &h)?,
            Query::Short { a, norm, b } => pass.linear(b, &pass.norm(norm, &pass.linear(a, &h)?, EPS)?)?,
        };
        let q = q.f_reshape([-1, self.heads, self.dim])?;
        let q = beside(&columns(&q, 0, plain)?, &rotated(&columns(&q, plain, rope)?, turns, pairs)?)?;
        let kv = pass.linear(self.kv_a, &h)?;
        let k_turned = rotated(&columns(&kv, rank, rope)?.f_reshape([-1, 1, rope])?, turns, pairs)?;
        let kv = pass.linear(self.kv_b, &pass.norm(self.kv_norm, &columns(&kv, 0, rank)?, EPS)?)?;
        let kv = kv.f_reshape([-1, self.heads, plain + v_head_dim])?;
        let k = beside(&columns(&kv, 0, plain)?, &k_turned.f_expand([-1, self.heads, -1], false)?)?;
        let v = columns(&kv, plain, v_head_dim)?.f_constant_pad_nd([0, self.dim - v_head_dim])?;
        Ok([q, k, v])
    }

    /// Returns the layer's output from attention's `[N, H D]`.
    pub fn finish(&self, pass: &Pass, x: &Tensor, attended: &Tensor) -> Result<Tensor> {
        let width = self.config.v_head_dim;
        let attended = columns(&attended.f_reshape([-1, self.heads, self.dim])?, 0, width)?;
        let x = x.f_add(&pass.linear(self.o, &attended.f_reshape([-1, self.heads * width])?)?)?;
        let h = pass.norm(self.mlp_norm, &x, self.eps)?;
        let branch = match self.mlp {
            Branch::Mlp(mlp) => pass.mlp(mlp, &h)?,
            Branch::Mixture(mixture) => pass.mixture(mixture, &h)?,
        };
        Ok(x.f_add(&branch)?)
    }
}

/// Adds the parameters of a mixture.
fn mixture(of: &DeepseekV3, params: &mut Params) -> Mixture {
    let stacked = ExpertsConfig {
        num_experts: of.n_routed_experts,
        num_experts_per_tok: of.num_experts_per_tok,
        moe_intermediate_size: of.moe_intermediate_size,
        norm_topk_prob: of.norm_topk_prob,
        layers: Vec::new(),
        names: ExpertNames::Usual,
    };
    let [router, gate_up, down] = experts::params(params.config, &stacked, &params.prefix);
    let names =
        ["mlp.shared_experts.gate_proj", "mlp.shared_experts.up_proj", "mlp.shared_experts.down_proj"];
    Mixture {
        router: params.add(router),
        bias: params.zeros("mlp.gate.e_score_correction_bias", of.n_routed_experts),
        gate_up: params.add(gate_up),
        down: params.add(down),
        width: of.moe_intermediate_size,
        choice: Choice {
            per_token: of.num_experts_per_tok,
            groups: of.n_group,
            groups_per_token: of.topk_group,
            is_normalized: of.norm_topk_prob,
            scale: of.routed_scaling_factor,
        },
        shared: params.mlp(names, of.moe_intermediate_size * of.n_shared_experts),
    }
}

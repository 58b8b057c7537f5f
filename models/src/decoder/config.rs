//! The shape of a decoder.

use anyroll_backends::ops::Activation;

use super::{Expressed, Multipliers, OtherRope, RopeScaling};
use crate::Result;
use crate::error::{check_config, check_layers};

/// The shape of a decoder, with Hugging Face's field names where they exist.
#[derive(Clone, Debug, PartialEq)]
pub struct DecoderConfig {
    /// Vocabulary size V.
    pub vocab_size: i64,
    /// Width of the residual stream C.
    pub hidden_size: i64,
    /// Number of decoder blocks.
    pub num_hidden_layers: usize,
    /// Number of query heads H.
    pub num_attention_heads: i64,
    /// Number of key and value heads K; divides H.
    pub num_key_value_heads: i64,
    /// Width of a head D; even.
    pub head_dim: i64,
    /// Width of the MLP F.
    pub intermediate_size: i64,
    /// Layers with a mixture of experts instead of the MLP, and its shape; `None`: no layer.
    pub experts: Option<ExpertsConfig>,
    /// Layers that libtorch differentiates, instead of this decoder's own; `None`: its own.
    pub expressed: Option<Expressed>,
    /// Added to the mean square in a norm.
    pub rms_norm_eps: f64,
    /// Base of the rotary frequencies.
    pub rope_theta: f64,
    /// Fraction of a head that is rotated, its first elements (Phi-3); above 0, usually 1.
    pub partial_rotary_factor: f64,
    /// Deviation of the frequencies from those of `rope_theta`.
    pub rope_scaling: RopeScaling,
    /// Layers with another rotation of queries and keys (SmolLM3, OLMo 3); `None`: all layers have the same.
    pub other_rope: Option<OtherRope>,
    /// Maximum sequence length, in tokens.
    pub max_position_embeddings: i64,
    /// Layers with a sliding window, and its size (Mistral); `None`: every layer sees all tokens.
    pub sliding_window: Option<SlidingWindow>,
    /// True if files have one fused tensor for queries, keys and values, and one for the MLP's gate and up
    /// (Phi-3).
    pub fused_projections: bool,
    /// True if the query, key and value projections have a bias (Qwen2).
    pub qkv_bias: bool,
    /// True if attention's output projection has a bias (`attention_bias` in Llama and Qwen3).
    pub o_bias: bool,
    /// True if the MLP's three matrices have a bias (`mlp_bias` in Llama).
    pub mlp_bias: bool,
    /// Norm of queries and keys before the rotation (Qwen3, OLMo 2), if any.
    pub qk_norm: Option<QkNorm>,
    /// Positions of a layer's norms.
    pub norms: NormPlaces,
    /// Difference between a norm's weights here and in files: 1 if a norm multiplies by 1 + w (Gemma), else
    /// 0. In memory they are 1 + w in every dtype.
    pub norm_offset: f32,
    /// Activation of the MLP's gate.
    pub activation: Activation,
    /// Constant factors in the forward pass (Granite, Gemma).
    pub multipliers: Multipliers,
    /// True if the head's matrix is the embedding's.
    pub tie_word_embeddings: bool,
    /// Standard deviation of the matrices' initial values.
    pub initializer_range: f64,
}

/// Elements that a norm of queries or keys averages over.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum QkNorm {
    /// Each head separately: weights `[D]`.
    PerHead,
    /// All heads of a token together: weights `[H D]` and `[K D]`.
    Together,
}

/// Positions of a layer's norms.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum NormPlaces {
    /// On the inputs of attention and MLP.
    Before,
    /// On their outputs (OLMo 2).
    After,
    /// On both (Gemma 3).
    Both,
}

/// Layers in which a token sees only the tokens in a window.
#[derive(Clone, Debug, PartialEq)]
pub struct SlidingWindow {
    /// Number of tokens that a token sees, including itself.
    pub tokens: i64,
    /// True for each layer with the window.
    pub layers: Vec<bool>,
}

/// Layers with a mixture of experts, in which each token is sent to a few of many small MLPs.
#[derive(Clone, Debug, PartialEq)]
pub struct ExpertsConfig {
    /// Number of experts E.
    pub num_experts: i64,
    /// Number of experts per token J.
    pub num_experts_per_tok: i64,
    /// Width of an expert.
    pub moe_intermediate_size: i64,
    /// True if the weights of a token's experts are divided by their sum.
    pub norm_topk_prob: bool,
    /// True for each layer with experts.
    pub layers: Vec<bool>,
    /// Names of the experts' tensors.
    pub names: ExpertNames,
}

impl ExpertsConfig {
    /// Returns `num_experts` experts in each of `layers` that is true, whose weights are divided by their sum, with the usual
    /// names.
    pub fn plain(
        layers: Vec<bool>,
        num_experts: i64,
        num_experts_per_tok: i64,
        moe_intermediate_size: i64,
    ) -> ExpertsConfig {
        ExpertsConfig {
            num_experts,
            num_experts_per_tok,
            moe_intermediate_size,
            norm_topk_prob: true,
            layers,
            names: ExpertNames::Usual,
        }
    }
}

/// Names of the experts' tensors in files.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ExpertNames {
    /// `mlp.gate`, and `gate_proj`, `up_proj` and `down_proj` of each expert (Qwen3-MoE, OLMoE).
    Usual,
    /// `block_sparse_moe.gate`, and `w1`, `w3` and `w2` of each expert.
    Mixtral,
}

/// Limit on positions, since a table has one row for each.
const MOST_POSITIONS: i64 = 1 << 24;

/// Limit on any width, far above existing models, so that sizes do not overflow.
pub(super) const MOST_WIDTH: i64 = 1 << 22;

impl DecoderConfig {
    /// Returns a small decoder with as many heads of keys as of queries, no biases, and nothing that only some
    /// families have.
    pub fn plain(layers: usize, width: i64, heads: i64) -> DecoderConfig {
        DecoderConfig {
            vocab_size: 12,
            hidden_size: width,
            num_hidden_layers: layers,
            num_attention_heads: heads,
            num_key_value_heads: heads,
            head_dim: width / heads,
            intermediate_size: 4 * width,
            experts: None,
            expressed: None,
            rms_norm_eps: 1e-6,
            rope_theta: 10_000.0,
            partial_rotary_factor: 1.0,
            rope_scaling: RopeScaling::None,
            other_rope: None,
            max_position_embeddings: 64,
            sliding_window: None,
            fused_projections: false,
            qkv_bias: false,
            o_bias: false,
            mlp_bias: false,
            qk_norm: None,
            norms: NormPlaces::Before,
            norm_offset: 0.0,
            activation: Activation::Silu,
            multipliers: Multipliers::default(),
            tie_word_embeddings: false,
            initializer_range: 0.02,
        }
    }

    /// Checks that ranks can each run a slice of a batch's rows.
    ///
    /// # Errors
    /// [`Error::Config`](crate::Error::Config) otherwise.
    pub fn check_slices(&self) -> Result<()> {
        check_config(self.expressed.is_none(), "architectures", || {
            "have layers that libtorch differentiates, whose attention is not split over ranks".to_owned()
        })
    }

    /// Checks that `ranks` ranks can share the heads: each has the same number of query heads, and one key head or more.
    pub(super) fn check_heads(&self, ranks: i64) -> Result<()> {
        let (heads, kv_heads) = (self.num_attention_heads, self.num_key_value_heads);
        check_config(heads % ranks == 0, "num_attention_heads", || {
            format!("is {heads}, which {ranks} ranks cannot share evenly")
        })?;
        check_config(kv_heads % ranks == 0 || ranks % kv_heads == 0, "num_key_value_heads", || {
            format!(
                "is {kv_heads}, which {ranks} ranks cannot share evenly, nor can one head serve several of them"
            )
        })
    }

    /// Returns true if `ranks` ranks that run a batch together share its heads: see [`Self::check_heads`]. Otherwise each has
    /// the keys and values of all rows.
    pub(super) fn shares_heads(&self, ranks: usize) -> bool {
        self.check_heads(ranks as i64).is_ok()
    }

    /// Returns the number of tokens that a token sees in a layer, including itself; `None`: all before it.
    pub fn window_of(&self, layer: usize) -> Option<i64> {
        self.sliding_window.as_ref().filter(|window| window.layers[layer]).map(|window| window.tokens)
    }

    /// Returns the experts of a layer, if it has any.
    pub fn experts_of(&self, layer: usize) -> Option<&ExpertsConfig> {
        self.experts.as_ref().filter(|experts| experts.layers[layer])
    }

    /// Returns the number of rotated elements of a head, R.
    pub fn rotary_dim(&self) -> i64 {
        let of_expressed = self.expressed.as_ref().and_then(Expressed::rotary_dim);
        of_expressed.unwrap_or((self.head_dim as f64 * self.partial_rotary_factor) as i64)
    }

    /// Explains, for an error about `max_position_embeddings`, why longer texts are refused although the
    /// model's files allow them.
    pub fn why_no_longer(&self) -> &'static str {
        match self.rope_scaling {
            RopeScaling::LongRope { .. } => {
                ", its `original_max_position_embeddings`: longer texts rotate by `long_factor`, and cached keys would have to be rotated again"
            }
            _ => "",
        }
    }

    /// Returns the factor of the attention scores.
    pub fn attention_multiplier(&self) -> f64 {
        let factor = self.expressed.as_ref().map_or(1.0, |of| of.attention_factor(self));
        self.multipliers.attention.unwrap_or(factor / (self.head_dim as f64).sqrt())
    }

    /// Checks that the sizes are valid.
    ///
    /// # Errors
    /// [`Error::Config`](crate::Error::Config) with the field and the valid values.
    pub fn validate(&self) -> Result<()> {
        let sizes = [
            ("vocab_size", self.vocab_size),
            ("hidden_size", self.hidden_size),
            ("num_attention_heads", self.num_attention_heads),
            ("num_key_value_heads", self.num_key_value_heads),
            ("head_dim", self.head_dim),
            ("intermediate_size", self.intermediate_size),
            ("max_position_embeddings", self.max_position_embeddings),
            ("sliding_window", self.sliding_window.as_ref().map_or(1, |window| window.tokens)),
        ];
        for (field, size) in sizes {
            check_config(size > 0, field, || format!("is {size}, must be at least 1"))?;
        }
        let heads_width = self.num_attention_heads.saturating_mul(self.head_dim);
        let widths = [
            ("vocab_size", self.vocab_size),
            ("hidden_size", self.hidden_size),
            ("num_attention_heads", heads_width),
            ("intermediate_size", self.intermediate_size),
        ];
        for (field, width) in widths {
            let what = if field == "num_attention_heads" { "times head_dim is" } else { "is" };
            check_config(width <= MOST_WIDTH, field, || {
                format!("{what} {width}, must be at most {MOST_WIDTH}")
            })?;
        }
        check_layers("num_hidden_layers", self.num_hidden_layers)?;
        let positions = self.max_position_embeddings;
        check_config(positions <= MOST_POSITIONS, "max_position_embeddings", || {
            format!("is {positions}, must be at most {MOST_POSITIONS}")
        })?;
        if let Some(SlidingWindow { layers, .. }) = &self.sliding_window {
            let (found, expected) = (layers.len(), self.num_hidden_layers);
            check_config(found == expected, "layer_types", || {
                format!("has {found} entries, must have one for each of the {expected} layers")
            })?;
        }
        if let Some(other) = &self.other_rope {
            other.validate(self.num_hidden_layers)?;
        }
        if let Some(experts) = &self.experts {
            experts.validate(self)?;
        }
        if let Some(expressed) = &self.expressed {
            expressed.validate(self)?;
        }
        let (heads, kv_heads) = (self.num_attention_heads, self.num_key_value_heads);
        check_config(heads % kv_heads == 0, "num_key_value_heads", || {
            format!("is {kv_heads}, must divide num_attention_heads = {heads}")
        })?;
        check_config(self.head_dim % 2 == 0, "head_dim", || {
            format!("is {}, must be even: the rotation takes pairs", self.head_dim)
        })?;
        let (turned, is_part) = (self.rotary_dim(), self.partial_rotary_factor <= 1.0);
        check_config(is_part && turned > 0 && turned % 2 == 0, "partial_rotary_factor", || {
            let factor = self.partial_rotary_factor;
            format!("is {factor}, must be at most 1 and leave an even number of head_dim = {}", self.head_dim)
        })?;
        let numbers = [
            ("rms_norm_eps", self.rms_norm_eps),
            ("rope_theta", self.rope_theta),
            ("initializer_range", self.initializer_range),
        ];
        for (field, number) in numbers {
            check_config(number > 0.0 && number.is_finite(), field, || {
                format!("is {number}, must be a positive number")
            })?;
        }
        self.multipliers.validate()?;
        self.rope_scaling.validate(turned)
    }
}

impl ExpertsConfig {
    fn validate(&self, config: &DecoderConfig) -> Result<()> {
        for (field, size) in [
            ("num_experts", self.num_experts),
            ("num_experts_per_tok", self.num_experts_per_tok),
            ("moe_intermediate_size", self.moe_intermediate_size),
        ] {
            check_config(size > 0, field, || format!("is {size}, must be at least 1"))?;
        }
        let (experts, chosen) = (self.num_experts, self.num_experts_per_tok);
        check_config(chosen <= experts, "num_experts_per_tok", || {
            format!("is {chosen}, must be at most num_experts = {experts}")
        })?;
        // All experts of a layer share one tensor.
        let width = experts.saturating_mul(self.moe_intermediate_size);
        check_config(width <= MOST_WIDTH, "moe_intermediate_size", || {
            format!("times num_experts is {width}, must be at most {MOST_WIDTH}")
        })?;
        let (found, expected) = (self.layers.len(), config.num_hidden_layers);
        check_config(found == expected, "num_experts", || {
            format!("covers {found} layers, must cover all {expected}")
        })?;
        check_config(config.norms == NormPlaces::Before, "norms", || {
            "are on branch outputs; with experts they must be on branch inputs".to_owned()
        })?;
        let residual = config.multipliers.residual;
        check_config(residual == 1.0, "residual_multiplier", || {
            format!("is {residual}, must be 1 with experts")
        })?;
        check_config(config.activation == Activation::Silu, "hidden_act", || {
            "must be `silu` with experts".to_owned()
        })?;
        check_config(!config.mlp_bias, "mlp_bias", || "is true, must be false with experts".to_owned())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::Error;

    fn small() -> DecoderConfig {
        let sizes = DecoderConfig {
            num_key_value_heads: 2,
            intermediate_size: 176,
            ..DecoderConfig::plain(2, 64, 4)
        };
        DecoderConfig { tie_word_embeddings: true, ..sizes }
    }

    #[test]
    fn contradictions_name_their_field() {
        let check = |field: &str, change: &dyn Fn(&mut DecoderConfig)| {
            let mut config = small();
            change(&mut config);
            match config.validate() {
                Err(Error::Config { field: found, .. }) => assert_eq!(found, field),
                other => panic!("{field}: {other:?}"),
            }
        };
        small().validate().unwrap();
        check("vocab_size", &|config| config.vocab_size = 0);
        check("num_key_value_heads", &|config| config.num_key_value_heads = 3);
        check("head_dim", &|config| config.head_dim = 15);
        check("vocab_size", &|config| config.vocab_size = i64::MAX);
        check("intermediate_size", &|config| config.intermediate_size = 1 << 40);
        check("num_attention_heads", &|config| config.num_attention_heads = i64::MAX - 1);
        check("num_attention_heads", &|config| config.head_dim = 1 << 62);
        check("rms_norm_eps", &|config| config.rms_norm_eps = f64::NAN);
        check("rope_theta", &|config| config.rope_theta = 0.0);
        for factor in [0.0, -0.5, 1.25, 0.1, 0.95, f64::NAN] {
            check("partial_rotary_factor", &|config| config.partial_rotary_factor = factor);
        }
        let window = |tokens, layers| Some(SlidingWindow { tokens, layers });
        check("sliding_window", &|config| config.sliding_window = window(0, vec![true, true]));
        check("layer_types", &|config| config.sliding_window = window(8, vec![true]));
        let other = |theta, layers| Some(OtherRope { theta, layers });
        check("other_rope", &|config| config.other_rope = other(None, vec![true]));
        check("other_rope", &|config| config.other_rope = other(Some(-1.0), vec![true, false]));
        let experts = |num_experts, num_experts_per_tok, moe_intermediate_size| {
            Some(ExpertsConfig::plain(
                vec![true, false],
                num_experts,
                num_experts_per_tok,
                moe_intermediate_size,
            ))
        };
        check("num_experts", &|config| config.experts = experts(0, 1, 8));
        check("num_experts_per_tok", &|config| config.experts = experts(4, 5, 8));
        check("moe_intermediate_size", &|config| config.experts = experts(4, 2, 0));
        check("moe_intermediate_size", &|config| config.experts = experts(1 << 20, 2, i64::MAX));
        check("num_experts", &|config| {
            config.experts = experts(4, 2, 8).map(|experts| ExpertsConfig { layers: vec![true], ..experts });
        });
        check("hidden_act", &|config| {
            (config.experts, config.activation) = (experts(4, 2, 8), Activation::GeluTanh);
        });
        check("mlp_bias", &|config| (config.experts, config.mlp_bias) = (experts(4, 2, 8), true));
        check("residual_multiplier", &|config| {
            (config.experts, config.multipliers.residual) = (experts(4, 2, 8), 0.5);
        });
        check("embedding_multiplier", &|config| config.multipliers.embedding = 0.0);
        check("attention_multiplier", &|config| config.multipliers.attention = Some(f64::NAN));
        check("logits_scaling", &|config| config.multipliers.logits_scaling = -8.0);
        check("rope_scaling", &|config| config.rope_scaling = RopeScaling::Linear { factor: -1.0 });
    }
}

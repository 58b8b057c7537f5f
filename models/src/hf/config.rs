//! `config.json`: the fields of each family, and the decoder's shape that they describe.

use std::path::Path;

use serde::{Deserialize, Deserializer};
use serde_json::{Map, Value};

use super::gemma::{self, GemmaFields};
use super::rope::{RopeFields, TURNED_WHOLE};
use super::{Error, Result, TokenIds, field, validated};
use crate::{
    Activation, DecoderConfig, ExpertNames, ExpertsConfig, Multipliers, NormPlaces, OtherRope, QkNorm,
    SlidingWindow, ValueHead,
};

/// The families that [`super::ModelFolder`] opens: the names of their architectures, without the suffix of
/// the task.
const FAMILIES: [&str; 13] = [
    "Qwen2", "Qwen3", "Qwen3Moe", "Llama", "Mistral", "Mixtral", "SmolLM3", "Olmo2", "Olmo3", "Olmoe",
    "Granite", "Phi3", GEMMA,
];

/// The text-only Gemma 3. With images it is another architecture, `Gemma3ForConditionalGeneration`.
const GEMMA: &str = "Gemma3";

/// Returns the infix that marks a text-only Gemma 3, in architecture names that have one.
fn of_texts(family: &str) -> &'static str {
    if family == GEMMA { "Text" } else { "" }
}

/// Purpose of a model, which determines its head.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Task {
    /// Predicts a distribution over the next token.
    Language,
    /// Gives texts, or their steps, a number.
    Value(ValueHead),
}

impl Task {
    /// Returns the suffix of architecture names.
    pub(super) fn suffix(self) -> &'static str {
        match self {
            Task::Language => "ForCausalLM",
            Task::Value(ValueHead::Number) => "ForSequenceClassification",
            Task::Value(ValueHead::Classes) => "ForTokenClassification",
        }
    }

    /// Returns the name of a family's architecture.
    fn architecture(self, family: &str) -> String {
        let of_texts = if self == Task::Language { "" } else { of_texts(family) };
        format!("{family}{of_texts}{}", self.suffix())
    }

    /// Lists the supported architectures.
    pub(super) fn architectures(self) -> String {
        FAMILIES.map(|family| self.architecture(family)).join(", ")
    }

    /// Returns the name for this task of the language model architecture `name`.
    pub(super) fn of_language(self, name: &str) -> String {
        name.strip_suffix(Task::Language.suffix())
            .map_or_else(|| name.to_owned(), |family| self.architecture(family))
    }
}

/// The architecture named by a `config.json`. It is read first, since other kinds of models have other
/// fields.
#[derive(Debug, Deserialize)]
pub(super) struct Architectures {
    architectures: Option<Vec<String>>,
}

/// Fields read from a `config.json`. Missing ones default to those of the family's class in `transformers`.
#[derive(Debug, Deserialize)]
pub(super) struct ConfigFile {
    vocab_size: i64,
    hidden_size: i64,
    num_hidden_layers: usize,
    num_attention_heads: i64,
    num_key_value_heads: Option<i64>,
    head_dim: Option<i64>,
    intermediate_size: i64,
    max_position_embeddings: i64,
    original_max_position_embeddings: Option<f64>,
    rms_norm_eps: Option<f64>,
    rope_theta: Option<f64>,
    rope_scaling: Option<Map<String, Value>>,
    /// Newer files' replacement of `rope_theta` and `rope_scaling`.
    rope_parameters: Option<Map<String, Value>>,
    /// 1 for each layer with a rotation, 0 for each without (SmolLM3).
    no_rope_layers: Option<Vec<i64>>,
    /// Without `no_rope_layers`, the last of every so many layers has no rotation.
    #[serde(default = "default_interval")]
    no_rope_layer_interval: usize,
    #[serde(default, deserialize_with = "even_null")]
    sliding_window: Option<Option<i64>>,
    #[serde(default)]
    use_sliding_window: bool,
    /// Layers before this one see the whole text (Qwen2, Qwen3).
    #[serde(default = "default_window_layers")]
    max_window_layers: usize,
    /// Kind of each layer, in newer files.
    layer_types: Option<Vec<String>>,
    tie_word_embeddings: Option<bool>,
    #[serde(default = "default_range")]
    initializer_range: f64,
    pub eos_token_id: Option<TokenIds>,
    /// Python code in the folder that computes the model in `transformers`.
    pub auto_map: Option<Value>,
    #[serde(default = "default_activation")]
    hidden_act: String,
    #[serde(default)]
    attention_bias: bool,
    #[serde(default)]
    mlp_bias: bool,
    #[serde(default)]
    attention_dropout: f64,
    partial_rotary_factor: Option<f64>,
    /// Dropout of each branch in training (Phi-3).
    #[serde(default)]
    resid_pdrop: f64,
    #[serde(flatten)]
    gemma: GemmaFields,
    #[serde(flatten)]
    mixture: Mixture,
    /// Clipping of queries, keys and values (OLMoE).
    clip_qkv: Option<f64>,
    #[serde(flatten)]
    multipliers: MultiplierFields,
    quantization_config: Option<Value>,
}

/// Multipliers of Granite.
#[derive(Debug, Deserialize)]
struct MultiplierFields {
    embedding_multiplier: Option<f64>,
    attention_multiplier: Option<f64>,
    residual_multiplier: Option<f64>,
    logits_scaling: Option<f64>,
}

/// Experts of a family that has them.
#[derive(Debug, Deserialize)]
struct Mixture {
    num_experts: Option<i64>,
    /// Number of experts in Mixtral and in newer files.
    num_local_experts: Option<i64>,
    num_experts_per_tok: Option<i64>,
    moe_intermediate_size: Option<i64>,
    #[serde(default)]
    norm_topk_prob: bool,
    /// The last one of this many layers has experts.
    #[serde(default = "every_layer")]
    decoder_sparse_step: usize,
    /// Layers without experts in any case.
    mlp_only_layers: Option<Vec<usize>>,
    /// True if a load-balancing loss is part of the model's loss.
    #[serde(default)]
    output_router_logits: bool,
    /// Noise on the router's input in training (Mixtral).
    #[serde(default)]
    router_jitter_noise: f64,
}

impl Architectures {
    /// Returns the head of a classifier: that of tokens if an architecture is one, else that of a sequence.
    pub fn value_head(&self) -> ValueHead {
        let suffix = Task::Value(ValueHead::Classes).suffix();
        let is_of_tokens = self.architectures.iter().flatten().any(|name| name.ends_with(suffix));
        if is_of_tokens { ValueHead::Classes } else { ValueHead::Number }
    }

    /// Returns the family of the file at `path`, whose model is for `task`.
    pub fn family(&self, path: &Path, task: Task) -> Result<&'static str> {
        let named = self.architectures.as_deref().unwrap_or_default().join(", ");
        // A base model has no head: if the head is tied to the embedding, nothing is missing.
        let is_base =
            |family: &str| task == Task::Language && named == format!("{family}{}Model", of_texts(family));
        let is_it = |family: &&str| named == task.architecture(family) || is_base(family);
        if named == format!("{GEMMA}ForConditionalGeneration") {
            let problem = format!(
                "are {named}, which reads images: load its text model with transformers' `{GEMMA}ForCausalLM`, \
                 save that, and use its folder"
            );
            return Err(field(path, "architectures", problem));
        }
        FAMILIES.into_iter().find(is_it).ok_or_else(|| {
            let found = if named.is_empty() { "(none)".to_owned() } else { named };
            Error::Architecture { path: path.to_owned(), found, known: task.architectures() }
        })
    }
}

impl ConfigFile {
    /// Returns the decoder that the file at `path` describes, of `family`.
    pub fn decoder_config(&self, path: &Path, family: &str) -> Result<DecoderConfig> {
        let (qwen2, qwen3) = (family == "Qwen2", matches!(family, "Qwen3" | "Qwen3Moe"));
        let (olmo, silent) = (matches!(family, "Olmo2" | "Olmo3" | "Olmoe"), Silent::of(family));
        let is_gemma = family == GEMMA;
        self.refuse_what_is_missing(path, family)?;
        let kv_heads = match self.num_key_value_heads {
            Some(heads) => heads,
            None if matches!(family, "Llama" | "Granite" | "Phi3") || olmo => self.num_attention_heads,
            None => return Err(field(path, "num_key_value_heads", "is missing")),
        };
        let head_dim = match self.head_dim {
            Some(dim) => dim,
            None if family == "Qwen3" => 128,
            None if is_gemma => 256,
            None => self.hidden_size / self.num_attention_heads.max(1),
        };
        let rope = RopeFields {
            path,
            max_length: self.max_position_embeddings as f64,
            original_length: self.original_max_position_embeddings,
            theta: self.rope_theta.unwrap_or(silent.rope_theta),
            scaling: self.rope_scaling.as_ref(),
            parameters: self.rope_parameters.as_ref(),
            is_phi: family == "Phi3",
            // Only layers without a window are scaled.
            by_kind: family == "Olmo3" || is_gemma,
            local_theta: is_gemma.then(|| self.gemma.local_theta()),
        };
        let rotations = rope.read()?;
        let sliding_window = self.window(path, family, silent.sliding_window)?;
        // Fields that the family's class does not read are ignored.
        let attention_bias = self.attention_bias
            && (qwen3 || olmo || is_gemma || matches!(family, "Llama" | "SmolLM3" | "Granite"));
        let of_heads = (qwen3 || is_gemma).then_some(QkNorm::PerHead);
        let qk_norm = if olmo { Some(QkNorm::Together) } else { of_heads };
        let norms = match family {
            "Olmo2" | "Olmo3" => NormPlaces::After,
            GEMMA => NormPlaces::Both,
            _ => NormPlaces::Before,
        };
        let config = DecoderConfig {
            vocab_size: self.vocab_size,
            hidden_size: self.hidden_size,
            num_hidden_layers: self.num_hidden_layers,
            num_attention_heads: self.num_attention_heads,
            num_key_value_heads: kv_heads,
            head_dim,
            intermediate_size: self.intermediate_size,
            experts: self.experts(path, family)?,
            rms_norm_eps: self.rms_norm_eps.unwrap_or(silent.rms_norm_eps),
            rope_theta: rotations.theta,
            partial_rotary_factor: rotations.partial.or(self.partial_rotary_factor).unwrap_or(1.0),
            max_position_embeddings: rotations.scaling.most_positions(self.max_position_embeddings),
            rope_scaling: rotations.scaling,
            other_rope: self.other_rope(path, family, rotations.sliding_theta, &sliding_window)?,
            sliding_window,
            fused_projections: family == "Phi3",
            qkv_bias: qwen2 || attention_bias,
            o_bias: attention_bias,
            mlp_bias: self.mlp_bias && matches!(family, "Llama" | "SmolLM3" | "Granite"),
            qk_norm,
            norms,
            norm_offset: if is_gemma { gemma::NORM_OFFSET } else { 0.0 },
            activation: if is_gemma { Activation::GeluTanh } else { Activation::Silu },
            multipliers: self.multipliers(path, family)?,
            tie_word_embeddings: self.tie_word_embeddings.unwrap_or(silent.tied),
            initializer_range: self.initializer_range,
        };
        validated(path, config.validate())?;
        Ok(config)
    }

    /// Returns an error for a setting that changes the model and is not supported.
    fn refuse_what_is_missing(&self, path: &Path, family: &str) -> Result<()> {
        let refuse = |holds: bool, name: &str, problem: &str| {
            if holds { Ok(()) } else { Err(field(path, name, problem)) }
        };
        if family == GEMMA {
            self.gemma.refuse_what_is_missing(path)?;
        }
        // Gemma's is another field.
        let silu = family == GEMMA || matches!(self.hidden_act.as_str(), "silu" | "swish");
        refuse(silu, "hidden_act", "must be `silu`")?;
        refuse(self.attention_dropout == 0.0, "attention_dropout", "is not 0, but dropout is not supported")?;
        let is_phi = family == "Phi3";
        let drops = is_phi && self.resid_pdrop != 0.0;
        refuse(!drops, "resid_pdrop", "is not 0, but dropout is not supported")?;
        let whole = is_phi || self.partial_rotary_factor.is_none_or(|factor| factor == 1.0);
        refuse(whole, "partial_rotary_factor", TURNED_WHOLE)?;
        let plain = self.quantization_config.is_none();
        refuse(plain, "quantization_config", "is set; weights must be fp32, bf16 or fp16")
    }

    /// Returns the family's multipliers: 1 if missing in the file, even for attention scores.
    fn multipliers(&self, path: &Path, family: &str) -> Result<Multipliers> {
        let fields = match family {
            "Granite" => &self.multipliers,
            GEMMA => return self.gemma.multipliers(path, self.hidden_size),
            _ => return Ok(Multipliers::default()),
        };
        Ok(Multipliers {
            embedding: fields.embedding_multiplier.unwrap_or(1.0),
            rounds_embedding: false,
            attention: Some(fields.attention_multiplier.unwrap_or(1.0)),
            residual: fields.residual_multiplier.unwrap_or(1.0),
            logits_scaling: fields.logits_scaling.unwrap_or(1.0),
        })
    }

    /// Returns the layers with experts, and the experts' shape.
    fn experts(&self, path: &Path, family: &str) -> Result<Option<ExpertsConfig>> {
        let mixture = &self.mixture;
        // In these two families all layers have experts, as wide as the MLP that they replace.
        let whole = Mixture {
            moe_intermediate_size: Some(self.intermediate_size),
            norm_topk_prob: mixture.norm_topk_prob || family == "Mixtral",
            decoder_sparse_step: every_layer(),
            mlp_only_layers: None,
            ..*mixture
        };
        let mixture = match family {
            "Qwen3Moe" => mixture,
            "Mixtral" | "Olmoe" => &whole,
            _ => return Ok(None),
        };
        if family == "Mixtral" && mixture.router_jitter_noise != 0.0 {
            return Err(field(path, "router_jitter_noise", "is not 0, but router noise is not supported"));
        }
        if let ("Olmoe", Some(_)) = (family, self.clip_qkv) {
            return Err(field(
                path,
                "clip_qkv",
                "is set, but clipping of queries, keys and values is not supported",
            ));
        }
        if mixture.output_router_logits {
            let problem = "is true, but a load-balancing loss is not supported";
            return Err(field(path, "output_router_logits", problem));
        }
        let required = |name: &str, size: Option<i64>| size.ok_or_else(|| field(path, name, "is missing"));
        let count = if family == "Mixtral" { "num_local_experts" } else { "num_experts" };
        if let (Some(old), Some(new)) = (mixture.num_experts, mixture.num_local_experts)
            && old != new
        {
            return Err(field(path, "num_local_experts", format!("is {new}, and `num_experts` is {old}")));
        }
        let num_experts = required(count, mixture.num_experts.or(mixture.num_local_experts))?;
        if num_experts == 0 && family != "Qwen3Moe" {
            return Err(field(path, count, "is 0, must be at least 1"));
        }
        let step = mixture.decoder_sparse_step;
        if step == 0 {
            return Err(field(path, "decoder_sparse_step", "is 0, must be at least 1"));
        }
        let is_only_mlp = |layer| mixture.mlp_only_layers.as_ref().is_some_and(|it| it.contains(&layer));
        let has_experts =
            |layer: usize| num_experts > 0 && (layer + 1).is_multiple_of(step) && !is_only_mlp(layer);
        let layers: Vec<bool> = (0..self.num_hidden_layers).map(has_experts).collect();
        if !layers.contains(&true) {
            return Ok(None);
        }
        Ok(Some(ExpertsConfig {
            num_experts,
            num_experts_per_tok: required("num_experts_per_tok", mixture.num_experts_per_tok)?,
            moe_intermediate_size: required("moe_intermediate_size", mixture.moe_intermediate_size)?,
            norm_topk_prob: mixture.norm_topk_prob,
            layers,
            names: if family == "Mixtral" { ExpertNames::Mixtral } else { ExpertNames::Usual },
        }))
    }

    /// Returns the layers with a sliding window, and its size; `silent` is the size if the file has none.
    fn window(&self, path: &Path, family: &str, silent: Option<i64>) -> Result<Option<SlidingWindow>> {
        let slides = |kind: &String| match kind.as_str() {
            "sliding_attention" => Ok(true),
            "full_attention" => Ok(false),
            _ => Err(field(
                path,
                "layer_types",
                format!("has `{kind}`, must be `full_attention` or `sliding_attention`"),
            )),
        };
        let named = || -> Result<Option<Vec<bool>>> {
            self.layer_types.as_ref().map(|kinds| kinds.iter().map(slides).collect()).transpose()
        };
        let all = 0..self.num_hidden_layers;
        let layers: Vec<bool> = match family {
            "Mistral" | "Mixtral" | "Phi3" => all.map(|_| true).collect(),
            "Qwen3Moe" if self.use_sliding_window => all.map(|_| true).collect(),
            "Qwen2" | "Qwen3" if self.use_sliding_window => {
                all.map(|layer| layer >= self.max_window_layers).collect()
            }
            "Olmo3" => all.map(|layer| (layer + 1) % 4 != 0).collect(),
            GEMMA => self.gemma.slides(path, self.num_hidden_layers)?,
            "SmolLM3" if self.use_sliding_window => self.layers_without_rope(path)?,
            // In transformers only some of the attention implementations would use the window.
            "SmolLM3" if named()?.is_some_and(|layers| layers.contains(&true)) => {
                let problem = "is false, but `layer_types` has `sliding_attention`: make them agree";
                return Err(field(path, "use_sliding_window", problem));
            }
            _ => return Ok(None),
        };
        // Phi-3 has its window in every layer, even if `layer_types` differs.
        let (named, tokens) =
            (if family == "Phi3" { None } else { named()? }, self.sliding_window.unwrap_or(silent));
        let is_named = named.as_ref().is_some_and(|layers| layers.contains(&true));
        let layers = named.unwrap_or(layers);
        match tokens {
            Some(tokens) => Ok(layers.contains(&true).then_some(SlidingWindow { tokens, layers })),
            None if matches!(family, "Olmo3" | GEMMA) || (family == "SmolLM3" && is_named) => {
                Err(field(path, "sliding_window", "is null, but layers have a sliding window"))
            }
            None => Ok(None),
        }
    }

    /// Returns the layers with another rotation than the model's base and scaling.
    fn other_rope(
        &self,
        path: &Path,
        family: &str,
        sliding_theta: Option<f64>,
        window: &Option<SlidingWindow>,
    ) -> Result<Option<OtherRope>> {
        let (theta, layers) = match (sliding_theta, window) {
            _ if family == "SmolLM3" => (None, self.layers_without_rope(path)?),
            (Some(theta), Some(window)) => (Some(theta), window.layers.clone()),
            _ => return Ok(None),
        };
        Ok(layers.contains(&true).then_some(OtherRope { theta, layers }))
    }

    /// For each layer of a SmolLM3, returns true if it has no rotation.
    fn layers_without_rope(&self, path: &Path) -> Result<Vec<bool>> {
        let (count, interval) = (self.num_hidden_layers, self.no_rope_layer_interval);
        let Some(turned) = &self.no_rope_layers else {
            if interval == 0 {
                return Err(field(path, "no_rope_layer_interval", "is 0, must be at least 1"));
            }
            return Ok((1..=count).map(|layer| layer % interval == 0).collect());
        };
        if turned.len() < count {
            let problem =
                format!("has {} entries, must have one for each of the {count} layers", turned.len());
            return Err(field(path, "no_rope_layers", problem));
        }
        Ok(turned[..count].iter().map(|&turned| turned == 0).collect())
    }
}

/// Defaults of a family's class in `transformers`.
struct Silent {
    tied: bool,
    rms_norm_eps: f64,
    rope_theta: f64,
    sliding_window: Option<i64>,
}

impl Silent {
    fn of(family: &str) -> Silent {
        let usual =
            Silent { tied: false, rms_norm_eps: 1e-6, rope_theta: 10_000.0, sliding_window: Some(4096) };
        match family {
            "SmolLM3" => Silent { tied: true, rope_theta: 2_000_000.0, sliding_window: None, ..usual },
            "Phi3" => Silent { rms_norm_eps: 1e-5, sliding_window: None, ..usual },
            GEMMA => Silent { tied: true, rope_theta: 1_000_000.0, ..usual },
            "Olmo2" | "Olmo3" | "Olmoe" => Silent { rms_norm_eps: 1e-5, ..usual },
            "Mixtral" => {
                Silent { rms_norm_eps: 1e-5, rope_theta: 1_000_000.0, sliding_window: None, ..usual }
            }
            _ => usual,
        }
    }
}

/// Deserializes a nullable field, so that null differs from a missing field.
fn even_null<'de, D: Deserializer<'de>, T: Deserialize<'de>>(from: D) -> Result<Option<Option<T>>, D::Error> {
    Option::deserialize(from).map(Some)
}

fn default_interval() -> usize {
    4
}

fn every_layer() -> usize {
    1
}

fn default_window_layers() -> usize {
    28
}

fn default_range() -> f64 {
    0.02
}

fn default_activation() -> String {
    "silu".to_owned()
}

#[cfg(test)]
mod tests;

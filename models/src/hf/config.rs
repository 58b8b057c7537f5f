//! `config.json`: the fields of each family, and what they come to.

use std::path::Path;

use serde::{Deserialize, Deserializer};
use serde_json::{Map, Value};

use super::rope::{RopeFields, TURNED_WHOLE};
use super::{Error, Result, TokenIds, field, validated};
use crate::{
    DecoderConfig, ExpertNames, ExpertsConfig, Multipliers, NormPlaces, OtherRope, QkNorm, RopeScaling,
    SlidingWindow,
};

/// The families that [`super::ModelFolder`] opens: the names of their architectures, without what they are for.
const FAMILIES: [&str; 12] = [
    "Qwen2", "Qwen3", "Qwen3Moe", "Llama", "Mistral", "Mixtral", "SmolLM3", "Olmo2", "Olmo3", "Olmoe",
    "Granite", "Phi3",
];

/// What a model is for, which is what its head is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Task {
    /// A distribution over the next token.
    Language,
    /// A number for a text.
    Score,
}

impl Task {
    /// How the names of architectures end.
    pub(super) fn suffix(self) -> &'static str {
        match self {
            Task::Language => "ForCausalLM",
            Task::Score => "ForSequenceClassification",
        }
    }

    /// The architectures that there are.
    pub(super) fn architectures(self) -> String {
        FAMILIES.map(|family| format!("{family}{}", self.suffix())).join(", ")
    }
}

/// What matters of a `config.json`. Defaults are those of the family's class in `transformers`, where its files leave
/// fields out.
#[derive(Debug, Deserialize)]
pub(super) struct ConfigFile {
    architectures: Option<Vec<String>>,
    vocab_size: i64,
    hidden_size: i64,
    num_hidden_layers: usize,
    num_attention_heads: i64,
    num_key_value_heads: Option<i64>,
    head_dim: Option<i64>,
    intermediate_size: i64,
    max_position_embeddings: i64,
    rms_norm_eps: Option<f64>,
    rope_theta: Option<f64>,
    rope_scaling: Option<Map<String, Value>>,
    /// Where newer files have `rope_theta` and `rope_scaling`.
    rope_parameters: Option<Map<String, Value>>,
    /// Which layers turn by positions, 1 or 0 for each (SmolLM3).
    no_rope_layers: Option<Vec<i64>>,
    /// Where that is not there, the last of every so many layers does not.
    #[serde(default = "default_interval")]
    no_rope_layer_interval: usize,
    #[serde(default, deserialize_with = "even_null")]
    sliding_window: Option<Option<i64>>,
    #[serde(default)]
    use_sliding_window: bool,
    /// Before this layer, the whole text is seen (Qwen2, Qwen3).
    #[serde(default = "default_window_layers")]
    max_window_layers: usize,
    /// What newer files have beside it, for each layer.
    layer_types: Option<Vec<String>>,
    tie_word_embeddings: Option<bool>,
    #[serde(default = "default_range")]
    initializer_range: f64,
    pub eos_token_id: Option<TokenIds>,
    #[serde(default = "default_activation")]
    hidden_act: String,
    #[serde(default)]
    attention_bias: bool,
    #[serde(default)]
    mlp_bias: bool,
    #[serde(default)]
    attention_dropout: f64,
    partial_rotary_factor: Option<f64>,
    /// What is dropped of each branch in training (Phi-3).
    #[serde(default)]
    resid_pdrop: f64,
    #[serde(flatten)]
    mixture: Mixture,
    /// What queries, keys and values are clipped to (OLMoE).
    clip_qkv: Option<f64>,
    #[serde(flatten)]
    multipliers: MultiplierFields,
    quantization_config: Option<Value>,
}

/// What Granite multiplies.
#[derive(Debug, Deserialize)]
struct MultiplierFields {
    embedding_multiplier: Option<f64>,
    attention_multiplier: Option<f64>,
    residual_multiplier: Option<f64>,
    logits_scaling: Option<f64>,
}

/// The experts of a family that has some.
#[derive(Debug, Deserialize)]
struct Mixture {
    num_experts: Option<i64>,
    /// The same, of a Mixtral and in newer files.
    num_local_experts: Option<i64>,
    num_experts_per_tok: Option<i64>,
    moe_intermediate_size: Option<i64>,
    #[serde(default)]
    norm_topk_prob: bool,
    /// Of so many layers the last one has experts.
    #[serde(default = "every_layer")]
    decoder_sparse_step: usize,
    /// Layers that have none all the same.
    mlp_only_layers: Option<Vec<usize>>,
    /// Whether a loss that balances experts is part of the model's.
    #[serde(default)]
    output_router_logits: bool,
    /// How far the router's input is moved at random in training (Mixtral).
    #[serde(default)]
    router_jitter_noise: f64,
}

impl ConfigFile {
    /// The family of the file at `path`, whose model is for `task`.
    pub fn family(&self, path: &Path, task: Task) -> Result<&'static str> {
        let named = self.architectures.as_deref().unwrap_or_default().join(", ");
        // A base model has no head of its own: if it is tied to the embedding nothing is missing.
        let base = named.strip_suffix("Model").filter(|_| task == Task::Language);
        let family = named.strip_suffix(task.suffix()).or(base);
        FAMILIES.into_iter().find(|&known| Some(known) == family).ok_or_else(|| {
            let found = if named.is_empty() { "not named".to_owned() } else { named };
            Error::Architecture { path: path.to_owned(), found, known: task.architectures() }
        })
    }

    /// The decoder that the file at `path` describes, of `family`.
    pub fn decoder_config(&self, path: &Path, family: &str) -> Result<DecoderConfig> {
        let (qwen2, qwen3) = (family == "Qwen2", matches!(family, "Qwen3" | "Qwen3Moe"));
        let (olmo, silent) = (matches!(family, "Olmo2" | "Olmo3" | "Olmoe"), Silent::of(family));
        self.refuse_what_is_missing(path, family)?;
        let kv_heads = match self.num_key_value_heads {
            Some(heads) => heads,
            None if matches!(family, "Llama" | "Granite" | "Phi3") || olmo => self.num_attention_heads,
            None => return Err(field(path, "num_key_value_heads", "is missing")),
        };
        let head_dim = match self.head_dim {
            Some(dim) => dim,
            None if family == "Qwen3" => 128,
            None => self.hidden_size / self.num_attention_heads.max(1),
        };
        let rope = RopeFields {
            path,
            max_length: self.max_position_embeddings as f64,
            theta: self.rope_theta.unwrap_or(silent.rope_theta),
            scaling: self.rope_scaling.as_ref(),
            parameters: self.rope_parameters.as_ref(),
            // What is scaled are the layers that see far.
            by_kind: family == "Olmo3",
        };
        let rotations = rope.read()?;
        // There any name of a scaling means `longrope`, in transformers as well.
        if family == "Phi3" && rotations.scaling != RopeScaling::None {
            return Err(field(
                path,
                "rope_scaling",
                "is there; the only one of a Phi-3 is `longrope`, not read yet",
            ));
        }
        let sliding_window = self.window(path, family, silent.sliding_window)?;
        // Fields that the class of the family does not read say nothing.
        let attention_bias =
            self.attention_bias && (qwen3 || olmo || matches!(family, "Llama" | "SmolLM3" | "Granite"));
        let qk_norm = if olmo { Some(QkNorm::Together) } else { qwen3.then_some(QkNorm::PerHead) };
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
            partial_rotary_factor: self.partial_rotary_factor.unwrap_or(1.0),
            rope_scaling: rotations.scaling,
            other_rope: self.other_rope(path, family, rotations.sliding_theta, &sliding_window)?,
            max_position_embeddings: self.max_position_embeddings,
            sliding_window,
            fused_projections: family == "Phi3",
            qkv_bias: qwen2 || attention_bias,
            o_bias: attention_bias,
            mlp_bias: self.mlp_bias && matches!(family, "Llama" | "SmolLM3" | "Granite"),
            qk_norm,
            norms: if olmo && family != "Olmoe" { NormPlaces::After } else { NormPlaces::Before },
            multipliers: self.multipliers(family),
            tie_word_embeddings: self.tie_word_embeddings.unwrap_or(silent.tied),
            initializer_range: self.initializer_range,
        };
        validated(path, config.validate())?;
        Ok(config)
    }

    /// Refuses what changes the model and this crate does not have.
    fn refuse_what_is_missing(&self, path: &Path, family: &str) -> Result<()> {
        let refuse = |holds: bool, name: &str, problem: &str| {
            if holds { Ok(()) } else { Err(field(path, name, problem)) }
        };
        let silu = matches!(self.hidden_act.as_str(), "silu" | "swish");
        refuse(silu, "hidden_act", "is another than `silu`")?;
        refuse(self.attention_dropout == 0.0, "attention_dropout", "is not 0; there is no dropout here")?;
        let is_phi = family == "Phi3";
        let drops = is_phi && self.resid_pdrop != 0.0;
        refuse(!drops, "resid_pdrop", "is not 0; there is no dropout here")?;
        let whole = is_phi || self.partial_rotary_factor.is_none_or(|factor| factor == 1.0);
        refuse(whole, "partial_rotary_factor", TURNED_WHOLE)?;
        let plain = self.quantization_config.is_none();
        refuse(plain, "quantization_config", "is there; weights must be fp32, bf16 or fp16")
    }

    /// What the family multiplies: by 1 where the file is silent, attention's scores as well.
    fn multipliers(&self, family: &str) -> Multipliers {
        if family != "Granite" {
            return Multipliers::default();
        }
        let fields = &self.multipliers;
        Multipliers {
            embedding: fields.embedding_multiplier.unwrap_or(1.0),
            attention: Some(fields.attention_multiplier.unwrap_or(1.0)),
            residual: fields.residual_multiplier.unwrap_or(1.0),
            logits_scaling: fields.logits_scaling.unwrap_or(1.0),
        }
    }

    /// The layers that have experts, and which.
    fn experts(&self, path: &Path, family: &str) -> Result<Option<ExpertsConfig>> {
        let mixture = &self.mixture;
        // Of these two all layers have experts, as wide as the MLP that is not there.
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
            return Err(field(path, "router_jitter_noise", "is not 0; routers have no noise here"));
        }
        if let ("Olmoe", Some(_)) = (family, self.clip_qkv) {
            return Err(field(path, "clip_qkv", "is there; queries, keys and values are not clipped here"));
        }
        if mixture.output_router_logits {
            let problem =
                "is true, which adds a loss that balances experts to transformers' own; there is none here";
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

    /// The layers that see only the last tokens, which are so many where the file does not say it.
    fn window(&self, path: &Path, family: &str, silent: Option<i64>) -> Result<Option<SlidingWindow>> {
        let slides = |kind: &String| match kind.as_str() {
            "sliding_attention" => Ok(true),
            "full_attention" => Ok(false),
            _ => {
                Err(field(path, "layer_types", format!("has `{kind}`; there is full and sliding attention")))
            }
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
            "SmolLM3" if self.use_sliding_window => self.layers_without_rope(path)?,
            // There some of its attentions have a window, and others none.
            "SmolLM3" if named()?.is_some_and(|layers| layers.contains(&true)) => {
                let problem = "is false, and `layer_types` has `sliding_attention`: make them agree";
                return Err(field(path, "use_sliding_window", problem));
            }
            _ => return Ok(None),
        };
        // Phi-3 has its window in every layer, whatever is named.
        let (named, tokens) =
            (if family == "Phi3" { None } else { named()? }, self.sliding_window.unwrap_or(silent));
        let is_named = named.as_ref().is_some_and(|layers| layers.contains(&true));
        let layers = named.unwrap_or(layers);
        match tokens {
            Some(tokens) => Ok(layers.contains(&true).then_some(SlidingWindow { tokens, layers })),
            None if family == "Olmo3" || (family == "SmolLM3" && is_named) => {
                Err(field(path, "sliding_window", "is null, and layers have one"))
            }
            None => Ok(None),
        }
    }

    /// The layers that turn otherwise than `rope`, the base and the scaling of the others.
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

    /// Of each layer of a SmolLM3 whether positions turn nothing in it.
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

/// What the class of a family in `transformers` takes where a file is silent.
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
            "Olmo2" | "Olmo3" | "Olmoe" => Silent { rms_norm_eps: 1e-5, ..usual },
            "Mixtral" => {
                Silent { rms_norm_eps: 1e-5, rope_theta: 1_000_000.0, sliding_window: None, ..usual }
            }
            _ => usual,
        }
    }
}

/// A field that may be null, which is not what it is where it is not there.
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
mod tests {
    use serde_json::json;

    use super::*;

    /// A small Llama with `changes` to its file; a null takes a field away.
    fn read(changes: Value) -> Result<DecoderConfig> {
        let mut file = json!({
            "architectures": ["LlamaForCausalLM"], "vocab_size": 12, "hidden_size": 16, "num_hidden_layers": 1,
            "num_attention_heads": 2, "intermediate_size": 24, "max_position_embeddings": 64,
        });
        for (name, value) in changes.as_object().unwrap() {
            file[name] = value.clone();
        }
        let file: ConfigFile = serde_json::from_value(file).unwrap();
        let path = Path::new("m/config.json");
        file.decoder_config(path, file.family(path, Task::Language)?)
    }

    #[test]
    fn families_differ_where_their_files_are_silent() {
        let llama = read(json!({})).unwrap();
        assert_eq!((llama.num_key_value_heads, llama.head_dim, llama.rope_theta), (2, 8, 10_000.0));
        assert_eq!((llama.qkv_bias, llama.qk_norm, llama.tie_word_embeddings), (false, None, false));
        let biased = read(json!({"attention_bias": true, "mlp_bias": true})).unwrap();
        assert_eq!((biased.qkv_bias, biased.o_bias, biased.mlp_bias), (true, true, true));
        let base = read(json!({"architectures": ["LlamaModel"], "tie_word_embeddings": true})).unwrap();
        assert!(base.tie_word_embeddings && !base.o_bias);
        let qwen2 =
            json!({"architectures": ["Qwen2ForCausalLM"], "num_key_value_heads": 1, "sliding_window": 8});
        let qwen2 = read(qwen2).unwrap();
        assert_eq!((qwen2.qkv_bias, qwen2.sliding_window), (true, None));
        let qwen3 = read(json!({"architectures": ["Qwen3ForCausalLM"], "num_key_value_heads": 1})).unwrap();
        assert_eq!((qwen3.qk_norm, qwen3.head_dim), (Some(QkNorm::PerHead), 128));
        let mistral = json!({
            "architectures": ["MistralForCausalLM"], "num_key_value_heads": 1, "sliding_window": 8,
        });
        let window = |tokens, layers: &[bool]| Some(SlidingWindow { tokens, layers: layers.to_vec() });
        assert_eq!(read(mistral).unwrap().sliding_window, window(8, &[true]));
        let mistral = |tokens: Value| {
            json!({
                "architectures": ["MistralForCausalLM"], "num_key_value_heads": 1, "sliding_window": tokens,
            })
        };
        assert_eq!(read(mistral(Value::Null)).unwrap().sliding_window, None);
        let mut some = mistral(json!(8));
        some["layer_types"] = json!(["full_attention"]);
        assert_eq!(read(some).unwrap().sliding_window, None);
    }

    #[test]
    fn windows_are_of_layers() {
        let qwen = |changes: Value| {
            let mut file = json!({
                "architectures": ["Qwen3ForCausalLM"], "num_key_value_heads": 1, "num_hidden_layers": 3,
                "use_sliding_window": true, "sliding_window": 8,
            });
            file.as_object_mut().unwrap().extend(changes.as_object().unwrap().clone());
            read(file).map(|config| config.sliding_window.map(|window| (window.tokens, window.layers)))
        };
        assert_eq!(qwen(json!({})).unwrap(), None, "the first 28 layers have none");
        let from_second = Some((8, vec![false, true, true]));
        assert_eq!(qwen(json!({"max_window_layers": 1})).unwrap(), from_second);
        let kinds = json!(["sliding_attention", "full_attention", "sliding_attention"]);
        let found = qwen(json!({"max_window_layers": 1, "layer_types": kinds})).unwrap();
        assert_eq!(found, Some((8, vec![true, false, true])), "named layers count");
        assert_eq!(qwen(json!({"max_window_layers": 0, "use_sliding_window": false})).unwrap(), None);
        let error = qwen(json!({"layer_types": ["chunked_attention"]})).unwrap_err().to_string();
        assert!(error.contains("`layer_types` has `chunked_attention`"), "{error}");
        let error = qwen(json!({"layer_types": ["sliding_attention"]})).unwrap_err().to_string();
        assert!(error.contains("`layer_types` has 1 entries"), "{error}");
    }

    #[test]
    fn layers_of_smollm3_turn_or_do_not() {
        let smollm3 = |changes: Value| {
            let mut file = json!({
                "architectures": ["SmolLM3ForCausalLM"], "num_key_value_heads": 1, "num_hidden_layers": 4,
            });
            file.as_object_mut().unwrap().extend(changes.as_object().unwrap().clone());
            read(file)
        };
        let still =
            |changes: Value| smollm3(changes).map(|config| config.other_rope.map(|other| other.layers));
        let silent = smollm3(json!({})).unwrap();
        assert_eq!((silent.rope_theta, silent.tie_word_embeddings), (2_000_000.0, true));
        assert_eq!((silent.sliding_window, silent.qkv_bias, silent.mlp_bias), (None, false, false));
        let every_fourth = OtherRope { theta: None, layers: vec![false, false, false, true] };
        assert_eq!(silent.other_rope, Some(every_fourth));
        let named = json!({"no_rope_layers": [0, 1, 1, 0, 1]});
        assert_eq!(still(named).unwrap(), Some(vec![true, false, false, true]));
        assert_eq!(still(json!({"no_rope_layers": [1, 1, 1, 1]})).unwrap(), None);
        let slides = json!({"use_sliding_window": true, "sliding_window": 8, "no_rope_layer_interval": 2});
        let found = smollm3(slides).unwrap().sliding_window;
        assert_eq!(found, Some(SlidingWindow { tokens: 8, layers: vec![false, true, false, true] }));
        assert_eq!(smollm3(json!({"use_sliding_window": true})).unwrap().sliding_window, None);
        let check = |changes: Value, expected: &str| {
            let error = smollm3(changes).unwrap_err().to_string();
            assert!(error.contains(expected), "{error}");
        };
        check(json!({"no_rope_layers": [1, 1]}), "`no_rope_layers` has 2 entries");
        check(json!({"no_rope_layer_interval": 0}), "`no_rope_layer_interval` is 0");
        let kinds = ["full_attention", "sliding_attention", "full_attention", "full_attention"];
        check(json!({"layer_types": kinds, "sliding_window": 8}), "`use_sliding_window` is false");
        let unsized_window = json!({"layer_types": kinds, "use_sliding_window": true});
        check(unsized_window, "`sliding_window` is null");
    }

    #[test]
    fn norms_of_olmo_are_of_branches() {
        let olmo = |family: &str, changes: Value| {
            let architecture = format!("{family}ForCausalLM");
            let mut file = json!({"architectures": [architecture], "num_hidden_layers": 4});
            file.as_object_mut().unwrap().extend(changes.as_object().unwrap().clone());
            read(file)
        };
        let two = olmo("Olmo2", json!({"sliding_window": 8})).unwrap();
        assert_eq!((two.norms, two.qk_norm), (NormPlaces::After, Some(QkNorm::Together)));
        assert_eq!((two.rms_norm_eps, two.num_key_value_heads, two.sliding_window), (1e-5, 2, None));
        let yarn = json!({"rope_type": "yarn", "factor": 2.0});
        let three = olmo("Olmo3", json!({"rope_scaling": yarn, "rope_theta": 50.0})).unwrap();
        let layers = vec![true, true, true, false];
        assert_eq!(three.sliding_window, Some(SlidingWindow { tokens: 4096, layers: layers.clone() }));
        assert_eq!(three.other_rope, Some(OtherRope { theta: Some(50.0), layers }));
        assert_eq!(olmo("Olmo3", json!({})).unwrap().other_rope, None, "all turn alike without a scaling");
        let error = olmo("Olmo3", json!({"sliding_window": null})).unwrap_err().to_string();
        assert!(error.contains("`sliding_window` is null, and layers have one"), "{error}");
    }

    /// As newer files have them.
    #[test]
    fn rotations_are_of_kinds_of_layers() {
        let read = |family: &str, full: &Value, sliding: Value| {
            read(json!({
                "architectures": [format!("{family}ForCausalLM")], "num_hidden_layers": 4, "num_key_value_heads": 1,
                "rope_theta": null, "rope_parameters": {"full_attention": full, "sliding_attention": sliding},
            }))
        };
        let yarn = json!({"rope_type": "yarn", "factor": 2.0, "rope_theta": 50.0});
        let plain = |theta: f64| json!({"rope_type": "default", "rope_theta": theta});
        let other = read("Olmo3", &yarn, plain(50.0)).unwrap();
        let of_sliding =
            |theta| Some(OtherRope { theta: Some(theta), layers: vec![true, true, true, false] });
        assert_eq!((other.rope_theta, other.other_rope), (50.0, of_sliding(50.0)));
        assert!(matches!(other.rope_scaling, RopeScaling::Yarn { factor: 2.0, .. }));
        assert_eq!(read("Olmo3", &yarn, plain(9.0)).unwrap().other_rope, of_sliding(9.0));
        assert_eq!(read("Olmo3", &plain(9.0), plain(9.0)).unwrap().other_rope, None);
        assert_eq!(read("Olmo3", &yarn, yarn.clone()).unwrap().other_rope, None);
        for (family, sliding, expected) in [
            (
                "Olmo3",
                json!({"rope_type": "linear", "factor": 2.0}),
                "`rope_parameters.sliding_attention.rope_type` scales",
            ),
            (
                "Olmo3",
                json!({"rope_type": "linear", "factor": "2"}),
                "`rope_parameters.sliding_attention.factor` is",
            ),
            ("Olmo3", json!(7), "`rope_parameters.sliding_attention` is missing"),
            ("Qwen3", plain(9.0), "`rope_parameters.full_attention` is there"),
        ] {
            let error = read(family, &yarn, sliding).unwrap_err().to_string();
            assert!(error.contains(expected), "{error}");
        }
    }

    #[test]
    fn phi3_has_fused_projections() {
        let phi = |changes: Value| {
            let mut file = json!({"architectures": ["Phi3ForCausalLM"], "hidden_size": 32});
            file.as_object_mut().unwrap().extend(changes.as_object().unwrap().clone());
            read(file)
        };
        let silent = phi(json!({"attention_bias": true, "embd_pdrop": 0.5})).unwrap();
        assert!(silent.fused_projections && !silent.qkv_bias && !silent.o_bias);
        assert_eq!((silent.rms_norm_eps, silent.num_key_value_heads, silent.rotary_dim()), (1e-5, 2, 16));
        assert_eq!(silent.sliding_window, None);
        let partly = phi(json!({"partial_rotary_factor": 0.75, "sliding_window": 8})).unwrap();
        assert_eq!((partly.rotary_dim(), partly.sliding_window.unwrap().layers), (12, vec![true]));
        for (changes, expected) in [
            (json!({"resid_pdrop": 0.1}), "`resid_pdrop` is not 0"),
            (json!({"partial_rotary_factor": 0.2}), "`partial_rotary_factor` is 0.2, must be"),
            (json!({"rope_scaling": {"type": "longrope"}}), "`rope_scaling.rope_type` is `longrope`"),
            (json!({"rope_scaling": {"type": "su"}}), "`rope_scaling.rope_type` is `su`"),
            (
                json!({"rope_scaling": {"type": "yarn", "factor": 2.0}}),
                "`rope_scaling` is there; the only one",
            ),
            (json!({"architectures": ["PhimoeForCausalLM"]}), "the architecture is PhimoeForCausalLM"),
        ] {
            let error = phi(changes).unwrap_err().to_string();
            assert!(error.contains(expected), "{error}");
        }
    }

    #[test]
    fn granite_multiplies() {
        let granite = |changes: Value| {
            let mut file = json!({"architectures": ["GraniteForCausalLM"]});
            file.as_object_mut().unwrap().extend(changes.as_object().unwrap().clone());
            read(file)
        };
        let silent = granite(json!({})).unwrap();
        assert_eq!(silent.multipliers, Multipliers { attention: Some(1.0), ..Multipliers::default() });
        assert_eq!((silent.num_key_value_heads, silent.tie_word_embeddings), (2, false));
        let fields = json!({
            "embedding_multiplier": 12.0, "attention_multiplier": 0.5, "residual_multiplier": 0.22,
            "logits_scaling": 8,
        });
        let expected =
            Multipliers { embedding: 12.0, attention: Some(0.5), residual: 0.22, logits_scaling: 8.0 };
        assert_eq!(granite(fields.clone()).unwrap().multipliers, expected);
        assert_eq!(read(fields).unwrap().multipliers, Multipliers::default(), "Llama does not read them");
        let error = granite(json!({"logits_scaling": 0.0})).unwrap_err().to_string();
        assert!(error.contains("`logits_scaling` is 0, must be a positive number"), "{error}");
    }

    #[test]
    fn experts_are_of_layers() {
        let moe = |changes: Value| {
            let mut file = json!({
                "architectures": ["Qwen3MoeForCausalLM"], "num_key_value_heads": 1, "num_hidden_layers": 4,
                "num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 12,
            });
            file.as_object_mut().unwrap().extend(changes.as_object().unwrap().clone());
            read(file)
        };
        let layers = |changes: Value| moe(changes).unwrap().experts.map(|experts| experts.layers);
        let all = moe(json!({})).unwrap();
        assert!(
            all.qk_norm == Some(QkNorm::PerHead)
                && !all.o_bias
                && all.head_dim == 8
                && all.sliding_window.is_none()
        );
        let experts = all.experts.unwrap();
        assert_eq!((experts.num_experts, experts.num_experts_per_tok), (8, 2));
        assert_eq!((experts.moe_intermediate_size, experts.norm_topk_prob), (12, false));
        assert_eq!(experts.layers, [true; 4]);
        assert_eq!(layers(json!({"decoder_sparse_step": 2})), Some(vec![false, true, false, true]));
        assert_eq!(layers(json!({"mlp_only_layers": [0, 9]})), Some(vec![false, true, true, true]));
        assert_eq!(layers(json!({"decoder_sparse_step": 5})), None);
        assert_eq!(layers(json!({"num_experts": 0})), None);
        assert!(moe(json!({"norm_topk_prob": true})).unwrap().experts.unwrap().norm_topk_prob);
        let windowed = moe(json!({"use_sliding_window": true, "sliding_window": 8})).unwrap();
        assert_eq!(windowed.sliding_window.unwrap().layers, [true; 4], "max_window_layers says nothing");
        let check = |changes: Value, expected: &str| {
            let error = moe(changes).unwrap_err().to_string();
            assert!(error.contains(expected), "{error}");
        };
        check(json!({"output_router_logits": true}), "`output_router_logits` is true");
        check(json!({"num_experts": null}), "`num_experts` is missing");
        check(json!({"num_local_experts": 7}), "`num_local_experts` is 7, and `num_experts` is 8");
        let newer = moe(json!({"num_experts": null, "num_local_experts": 8})).unwrap().experts.unwrap();
        assert_eq!(newer.num_experts, 8);
        check(json!({"moe_intermediate_size": null}), "`moe_intermediate_size` is missing");
        check(
            json!({"num_experts_per_tok": 9}),
            "`num_experts_per_tok` is 9, must be at most num_experts = 8",
        );
        check(json!({"decoder_sparse_step": 0}), "`decoder_sparse_step` is 0");
    }

    #[test]
    fn mixtral_and_olmoe_have_experts_in_all_layers() {
        let moe = |family: &str, changes: Value| {
            let mut file = json!({
                "architectures": [format!("{family}ForCausalLM")], "num_key_value_heads": 1,
                "num_hidden_layers": 2, "num_experts_per_tok": 2, "rms_norm_eps": null, "rope_theta": null,
            });
            let count = if family == "Mixtral" { "num_local_experts" } else { "num_experts" };
            file[count] = json!(8);
            file.as_object_mut().unwrap().extend(changes.as_object().unwrap().clone());
            read(file)
        };
        let mixtral = moe("Mixtral", json!({"mlp_only_layers": [0], "attention_bias": true})).unwrap();
        assert_eq!((mixtral.rms_norm_eps, mixtral.rope_theta), (1e-5, 1e6));
        assert_eq!((mixtral.qkv_bias, mixtral.qk_norm, &mixtral.sliding_window), (false, None, &None));
        let experts = mixtral.experts.unwrap();
        assert_eq!((experts.num_experts, experts.moe_intermediate_size), (8, mixtral.intermediate_size));
        assert!(experts.norm_topk_prob && experts.layers == [true; 2]);
        assert_eq!(experts.names, ExpertNames::Mixtral);
        let windowed = moe("Mixtral", json!({"sliding_window": 8})).unwrap().sliding_window.unwrap();
        assert_eq!((windowed.tokens, windowed.layers), (8, vec![true; 2]));

        let olmoe = moe("Olmoe", json!({"attention_bias": true, "clip_qkv": null})).unwrap();
        assert_eq!((olmoe.rms_norm_eps, olmoe.rope_theta), (1e-5, 1e4));
        assert_eq!((olmoe.qk_norm, olmoe.norms), (Some(QkNorm::Together), NormPlaces::Before));
        assert!(olmoe.qkv_bias && olmoe.o_bias);
        let experts = olmoe.experts.unwrap();
        assert!(!experts.norm_topk_prob && experts.layers == [true; 2]);
        assert_eq!(experts.names, ExpertNames::Usual);

        for (family, changes, expected) in [
            ("Mixtral", json!({"num_local_experts": null}), "`num_local_experts` is missing"),
            ("Mixtral", json!({"num_local_experts": 0}), "`num_local_experts` is 0"),
            ("Mixtral", json!({"router_jitter_noise": 0.1}), "`router_jitter_noise` is not 0"),
            ("Mixtral", json!({"output_router_logits": true}), "`output_router_logits` is true"),
            ("Olmoe", json!({"num_experts": null}), "`num_experts` is missing"),
            ("Olmoe", json!({"clip_qkv": 8.0}), "`clip_qkv` is there"),
        ] {
            let error = moe(family, changes).unwrap_err().to_string();
            assert!(error.contains(expected), "{error}");
        }
    }

    #[test]
    fn rope_is_read_from_either_place() {
        let linear = RopeScaling::Linear { factor: 2.0 };
        let old =
            read(json!({"rope_theta": 50.0, "rope_scaling": {"type": "linear", "factor": 2.0}})).unwrap();
        assert_eq!((old.rope_theta, old.rope_scaling), (50.0, linear));
        let parameters = json!({"rope_type": "linear", "factor": 2.0, "rope_theta": 50.0});
        let new = read(json!({"rope_parameters": parameters})).unwrap();
        assert_eq!((new.rope_theta, new.rope_scaling), (50.0, linear));
        let same = json!({"type": "linear", "factor": 2.0});
        let both = read(json!({"rope_parameters": parameters, "rope_scaling": same})).unwrap();
        assert_eq!((both.rope_theta, both.rope_scaling), (50.0, linear));
        let unnamed = read(json!({"rope_parameters": {"rope_theta": 50.0}})).unwrap();
        assert_eq!((unnamed.rope_theta, unnamed.rope_scaling), (50.0, RopeScaling::None));
        let llama3 =
            json!({"rope_type": "llama3", "factor": 2.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0});
        match read(json!({"rope_parameters": llama3})).unwrap().rope_scaling {
            RopeScaling::Llama3 { original_max_position_embeddings, .. } => {
                assert_eq!(original_max_position_embeddings, 64.0);
            }
            other => panic!("{other:?}"),
        }
    }

    #[test]
    fn what_is_missing_is_named() {
        let check = |changes: Value, expected: &str| {
            let error = read(changes).unwrap_err().to_string();
            assert!(error.starts_with("m/config.json: ") && error.contains(expected), "{error}");
        };
        check(
            json!({"architectures": ["GemmaForCausalLM"]}),
            "the architecture is GemmaForCausalLM, and there",
        );
        check(json!({"architectures": null}), "the architecture is not named");
        let scorer = json!({"architectures": ["LlamaForSequenceClassification"]});
        check(
            scorer,
            "the architecture is LlamaForSequenceClassification, and there is only Qwen2ForCausalLM",
        );
        check(json!({"architectures": ["MistralForCausalLM"]}), "`num_key_value_heads` is missing");
        check(json!({"num_key_value_heads": 3}), "`num_key_value_heads` is 3, must divide");
        check(json!({"hidden_size": 1_i64 << 60}), "`hidden_size` is 1152921504606846976, must be at most");
        check(json!({"hidden_act": "gelu"}), "`hidden_act` is another");
        check(json!({"quantization_config": {}}), "`quantization_config` is there");
        let yarn = json!({"rope_type": "yarn", "factor": 2.0});
        let plain = json!({"rope_type": "default", "rope_theta": 50.0});
        check(
            json!({"rope_parameters": plain, "rope_scaling": yarn}),
            "`rope_scaling` is another than `rope_parameters`",
        );
        let half = json!({"rope_type": "linear", "factor": 2.0, "partial_rotary_factor": 0.5});
        check(json!({"rope_parameters": half}), "`rope_parameters.partial_rotary_factor` is not 1");
        check(json!({"rope_scaling": {"rope_type": 1}}), "`rope_scaling.rope_type` is no text");
        let yarn = json!({"rope_type": "yarn", "factor": 2.0, "truncate": "no"});
        check(json!({"rope_scaling": yarn}), "`rope_scaling.truncate` is \"no\"");
        let yarn = json!({"rope_type": "yarn", "factor": 2.0, "beta_fast": 0.0});
        check(json!({"rope_scaling": yarn}), "`rope_scaling` has 0.0 for beta_fast");
        check(json!({"num_hidden_layers": 10_000_000}), "`num_hidden_layers` is 10000000, must be at most");
        check(json!({"max_position_embeddings": 1_000_000_000}), "`max_position_embeddings` is 1000000000");
        check(json!({"rope_scaling": {"rope_type": "longrope"}}), "`rope_scaling.rope_type` is `longrope`");
        check(json!({"rope_scaling": {"rope_type": "linear"}}), "`rope_scaling.factor` is missing");
        check(
            json!({"rope_scaling": {"rope_type": "linear", "factor": "2"}}),
            "`rope_scaling.factor` is \"2\"",
        );
    }
}

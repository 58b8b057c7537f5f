//! Families of language models, a file each: the name of their architectures, how a `config.json` is read and
//! written, and what is refused.
//!
//! [`FAMILIES`] is the only list of them. Traits that families share are read by [`Reader`], and by the modules
//! of rotations and of mixtures.

mod class;
mod deepseek_v3;
mod gemma3;
mod glm4;
mod granite;
mod llama;
mod mistral;
mod mixtral;
mod mixture;
mod olmo2;
mod olmo3;
mod olmoe;
mod phi3;
mod qwen2;
mod qwen3;
mod qwen3_moe;
mod reader;
mod smollm3;

use std::path::Path;

use serde_json::{Map, Value, json};

use super::config::{ConfigFile, Task};
use super::rope::rope_scaling;
use super::{Error, Result, field};
use crate::{DecoderConfig, Multipliers, RopeScaling};
use class::Class;
pub(super) use reader::Reader;

/// All families. A decoder made from scratch is written as the first one that has its shape.
pub(super) const FAMILIES: [&Family; 15] = [
    &qwen2::FAMILY,
    &qwen3::FAMILY,
    &qwen3_moe::FAMILY,
    &llama::FAMILY,
    &mistral::FAMILY,
    &mixtral::FAMILY,
    &smollm3::FAMILY,
    &olmo2::FAMILY,
    &olmo3::FAMILY,
    &olmoe::FAMILY,
    &granite::FAMILY,
    &phi3::FAMILY,
    &gemma3::FAMILY,
    &glm4::FAMILY,
    &deepseek_v3::FAMILY,
];

/// A family of models with one class in `transformers`.
#[derive(Debug)]
pub(super) struct Family {
    /// Name of its architectures, without the suffix of the task.
    pub name: &'static str,
    /// Infix of its architectures without the language model's head.
    pub infix: &'static str,
    /// Its `model_type`.
    pub model_type: &'static str,
    /// Its GGUF files, if they are read.
    pub gguf: Option<Gguf>,
    /// Related architectures that are refused, each with the problem and the way out.
    pub refused: &'static [(&'static str, &'static str)],
    /// Shared fields that its class reads, and their defaults.
    class: Class,
    /// Returns the decoder that a file describes, or an error for a field that is not supported.
    read: fn(&Reader) -> Result<DecoderConfig>,
    /// Adds the fields that are not those of every family.
    write: fn(&DecoderConfig, &mut Map<String, Value>),
}

/// GGUF files of a family.
#[derive(Debug)]
pub(super) struct Gguf {
    /// Name of the architecture.
    pub name: &'static str,
    /// True if rows of queries and keys are in pairs, as llama.cpp rotates them.
    pub in_pairs: bool,
}

impl Family {
    /// Returns a family with the most usual class and no fields of its own.
    const fn new(
        name: &'static str,
        model_type: &'static str,
        read: fn(&Reader) -> Result<DecoderConfig>,
    ) -> Family {
        let (class, write) = (Class::USUAL, (|_, _| {}) as fn(&DecoderConfig, &mut Map<String, Value>));
        Family { name, infix: "", model_type, gguf: None, refused: &[], class, read, write }
    }

    /// Returns the decoder that the `file` at `path` describes.
    pub fn decoder_config(&self, path: &Path, file: &ConfigFile) -> Result<DecoderConfig> {
        let reader = Reader { path, shared: file, class: &self.class };
        reader.refuse_unsupported()?;
        let config = (self.read)(&reader)?;
        super::validated(path, config.validate())?;
        Ok(config)
    }

    /// Returns the `config.json` of a decoder of this family.
    fn file(&self, config: &DecoderConfig, stop_tokens: &[i64]) -> Map<String, Value> {
        let tokens = config.sliding_window.as_ref().map(|window| window.tokens);
        let file = json!({
            "architectures": [Task::Language.architecture(self)],
            "model_type": self.model_type,
            "vocab_size": config.vocab_size,
            "hidden_size": config.hidden_size,
            "num_hidden_layers": config.num_hidden_layers,
            "num_attention_heads": config.num_attention_heads,
            "num_key_value_heads": config.num_key_value_heads,
            "head_dim": config.head_dim,
            "intermediate_size": config.intermediate_size,
            "hidden_act": "silu",
            "max_position_embeddings": config.max_position_embeddings,
            "rms_norm_eps": config.rms_norm_eps,
            "rope_theta": config.rope_theta,
            "rope_scaling": rope_scaling(&config.rope_scaling),
            "sliding_window": tokens,
            "use_sliding_window": tokens.is_some(),
            // From this layer on; earlier layers see the whole text.
            "max_window_layers": slides(config).iter().take_while(|slides| !**slides).count(),
            "tie_word_embeddings": config.tie_word_embeddings,
            "initializer_range": config.initializer_range,
            "attention_bias": config.o_bias,
            "mlp_bias": config.mlp_bias,
            "attention_dropout": 0.0,
            "eos_token_id": stop_tokens,
        });
        let mut file = object(file);
        (self.write)(config, &mut file);
        file
    }

    /// Returns the decoder that is read from the file of `config`.
    fn read_back(&self, config: &DecoderConfig) -> Result<DecoderConfig> {
        let path = Path::new(FILE);
        let file = serde_json::from_value(self.file(config, &[]).into());
        let file: ConfigFile = file.map_err(|source| Error::Json { path: path.into(), hint: "", source })?;
        self.decoder_config(path, &file)
    }
}

/// Returns the `config.json` of a decoder: that of the first family whose file is read as the same decoder.
///
/// # Errors
/// [`Error::Field`] for a decoder that no family has. Examples:
/// - both biases and query and key norms, or neither and a window in some layers;
/// - experts without norms;
/// - multipliers in a decoder that otherwise differs from Llama.
pub fn config_file(config: &DecoderConfig, stop_tokens: &[i64]) -> Result<Map<String, Value>> {
    super::validated(Path::new(FILE), config.validate())?;
    let has_shape =
        |family: &&Family| family.read_back(config).is_ok_and(|found| found == normalized(config, &found));
    match FAMILIES.into_iter().find(has_shape) {
        Some(family) => Ok(family.file(config, stop_tokens)),
        None => Err(of_no_family(config)),
    }
}

const FILE: &str = "config.json";

/// Replaces the numbers of `config` that change no result by those of `found`, the decoder that was read back.
fn normalized(config: &DecoderConfig, found: &DecoderConfig) -> DecoderConfig {
    let (ours, theirs) = (config.attention_multiplier(), found.attention_multiplier());
    // A file may have a power of the number.
    let is_same = (ours - theirs).abs() < 1e-9 * ours;
    let attention = if is_same { found.multipliers.attention } else { config.multipliers.attention };
    let multipliers = Multipliers { attention, ..config.multipliers };
    // No layer may have an MLP.
    DecoderConfig { multipliers, intermediate_size: found.intermediate_size, ..config.clone() }
}

/// Returns the error for a decoder that no family has: a field, and the nearest family.
fn of_no_family(config: &DecoderConfig) -> Error {
    let refuse = |name: &str, problem: &str| field(Path::new(FILE), name, problem);
    if matches!(config.rope_scaling, RopeScaling::LongRope { .. }) && !config.fused_projections {
        return refuse("rope_scaling", "is `longrope`, which only Phi-3 has");
    }
    if config.qkv_bias && !config.o_bias && config.qk_norm.is_some() {
        return refuse("qkv_bias", "is set with qk_norm, but no published family has these two alone");
    }
    let nearest = FAMILIES.into_iter().filter_map(|family| {
        let found = family.read_back(config).ok()?;
        Some((family, differences(&normalized(config, &found), &found)))
    });
    match nearest.min_by_key(|(_, fields)| fields.len()) {
        Some((family, fields)) if !fields.is_empty() => {
            refuse(fields[0], &format!("differs from that of {}, the nearest published family", family.name))
        }
        _ => refuse("architectures", "have none with the decoder's shape"),
    }
}

/// Lists the traits in which two decoders differ.
fn differences(one: &DecoderConfig, other: &DecoderConfig) -> Vec<&'static str> {
    let traits = [
        ("num_experts", one.experts == other.experts),
        ("expressed", one.expressed == other.expressed),
        ("norms", one.norms == other.norms && one.norm_offset == other.norm_offset),
        ("hidden_act", one.activation == other.activation),
        ("qk_norm", one.qk_norm == other.qk_norm),
        ("qkv_bias", one.qkv_bias == other.qkv_bias),
        ("o_bias", one.o_bias == other.o_bias),
        ("mlp_bias", one.mlp_bias == other.mlp_bias),
        ("fused_projections", one.fused_projections == other.fused_projections),
        ("multipliers", one.multipliers == other.multipliers),
        ("partial_rotary_factor", one.partial_rotary_factor == other.partial_rotary_factor),
        ("rope_scaling", one.rope_scaling == other.rope_scaling),
        ("other_rope", one.other_rope == other.other_rope),
        ("sliding_window", one.sliding_window == other.sliding_window),
    ];
    traits.into_iter().filter(|(_, is_same)| !is_same).map(|(name, _)| name).collect()
}

/// Returns true for each layer with a sliding window.
fn slides(config: &DecoderConfig) -> Vec<bool> {
    match &config.sliding_window {
        Some(window) => window.layers.clone(),
        None => vec![false; config.num_hidden_layers],
    }
}

/// Adds the kind of each layer.
fn write_layer_types(config: &DecoderConfig, file: &mut Map<String, Value>) {
    let kind = |slides| if slides { "sliding_attention" } else { "full_attention" };
    let kinds: Vec<&str> = slides(config).into_iter().map(kind).collect();
    file.insert("layer_types".to_owned(), kinds.into());
}

/// Returns the fields of a JSON object.
fn object(value: Value) -> Map<String, Value> {
    let Value::Object(fields) = value else { unreachable!("written as an object by the caller") };
    fields
}

//! Folders of T5's and UMT5's encoders, as written by `transformers`.

use std::path::Path;

use serde::Deserialize;

use super::weights::{WeightFiles, reads_files};
use super::{Result, field, read_json, validated};
use crate::t5::{T5Config, T5Encoder};

/// Second name of the embedding in `transformers`, and the only one in some files.
const OTHER_EMBEDDING: &str = "encoder.embed_tokens.weight";

/// An encoder's folder, opened and checked: `config.json` and safetensors.
#[derive(Debug)]
pub struct T5Folder {
    config: T5Config,
    weights: WeightFiles,
}

impl T5Folder {
    /// Opens the folder at `path`, of a T5 or a UMT5. Weights are those of the `variant` if the folder has
    /// it.
    ///
    /// # Errors
    /// [`Error`](super::Error), which names the file and the field or tensor in it.
    pub fn open(path: &Path, variant: Option<&str>) -> Result<T5Folder> {
        let config_path = path.join("config.json");
        let file: ConfigFile = read_json(&config_path)?;
        let config = file.into_config(&config_path)?;
        let encoder = validated(&config_path, T5Encoder::new(config.clone()))?;
        let mut weights = WeightFiles::open_variant(path, "model", variant)?;
        if !weights.contains(T5Encoder::EMBEDDING) {
            weights = weights.renamed(|name| match name {
                OTHER_EMBEDDING => T5Encoder::EMBEDDING.to_owned(),
                other => other.to_owned(),
            })?;
        }
        weights.check([encoder.unit()], |name| name == OTHER_EMBEDDING)?;
        if !weights.begins_alike(OTHER_EMBEDDING, T5Encoder::EMBEDDING)? {
            let problem =
                format!("differs from `{}`, but they must be the same embedding", T5Encoder::EMBEDDING);
            return Err(weights.problem(OTHER_EMBEDDING, problem));
        }
        Ok(T5Folder { config, weights })
    }

    /// Returns the encoder's shape.
    pub fn config(&self) -> &T5Config {
        &self.config
    }
}

reads_files!(T5Folder);

/// Fields read from `config.json`.
#[derive(Deserialize)]
struct ConfigFile {
    model_type: String,
    vocab_size: i64,
    d_model: i64,
    d_kv: i64,
    d_ff: i64,
    num_layers: usize,
    num_heads: i64,
    #[serde(default = "first_buckets")]
    relative_attention_num_buckets: i64,
    #[serde(default = "first_distance")]
    relative_attention_max_distance: i64,
    #[serde(default = "first_epsilon")]
    layer_norm_epsilon: f64,
    feed_forward_proj: String,
    #[serde(default = "first_end")]
    eos_token_id: i64,
    #[serde(default)]
    pad_token_id: i64,
}

fn first_buckets() -> i64 {
    32
}

fn first_distance() -> i64 {
    128
}

fn first_epsilon() -> f64 {
    1e-6
}

fn first_end() -> i64 {
    1
}

impl ConfigFile {
    fn into_config(self, path: &Path) -> Result<T5Config> {
        let biases_by_layer = match self.model_type.as_str() {
            "t5" => false,
            "umt5" => true,
            other => return Err(field(path, "model_type", format!("is `{other}`, must be t5 or umt5"))),
        };
        if self.feed_forward_proj != "gated-gelu" {
            let problem = format!("is `{}`, must be gated-gelu (T5 1.1)", self.feed_forward_proj);
            return Err(field(path, "feed_forward_proj", problem));
        }
        Ok(T5Config {
            vocab_size: self.vocab_size,
            d_model: self.d_model,
            d_kv: self.d_kv,
            d_ff: self.d_ff,
            num_layers: self.num_layers,
            num_heads: self.num_heads,
            relative_attention_num_buckets: self.relative_attention_num_buckets,
            relative_attention_max_distance: self.relative_attention_max_distance,
            layer_norm_epsilon: self.layer_norm_epsilon,
            biases_by_layer,
            eos_token_id: self.eos_token_id,
            pad_token_id: self.pad_token_id,
        })
    }
}

//! Folders of CLIP models, as written by `transformers`.

use std::path::Path;

use serde::Deserialize;

use super::weights::{WeightFiles, reads_files};
use super::{Result, field, read_json, validated};
use crate::clip::{Activation, Clip, ClipConfig, TextConfig, TowerConfig};

/// A CLIP model's folder, opened and checked: `config.json`, safetensors and, if present,
/// `preprocessor_config.json`.
#[derive(Debug)]
pub struct ClipFolder {
    config: ClipConfig,
    weights: WeightFiles,
}

impl ClipFolder {
    /// Opens the folder at `path`.
    ///
    /// # Errors
    /// [`Error`](super::Error), which names the file and the field or tensor in it.
    pub fn open(path: &Path) -> Result<ClipFolder> {
        let config_path = path.join("config.json");
        let preprocessor_path = path.join("preprocessor_config.json");
        let preprocessor = match preprocessor_path.exists() {
            true => read_json(&preprocessor_path)?,
            false => PreprocessorFile::default(),
        };
        let file: ConfigFile = read_json(&config_path)?;
        let config = file.into_config(preprocessor, &config_path)?;
        let clip = validated(&config_path, Clip::new(config.clone()))?;
        let weights = WeightFiles::open(path, "model")?;
        weights
            .check(clip.units(), |name| name == "logit_scale" || name.ends_with("embeddings.position_ids"))?;
        Ok(ClipFolder { config, weights })
    }

    /// Returns the model's shape.
    pub fn config(&self) -> &ClipConfig {
        &self.config
    }
}

reads_files!(ClipFolder);

/// Fields read from `config.json`. Missing ones default to the first CLIP's.
#[derive(Deserialize)]
struct ConfigFile {
    model_type: String,
    #[serde(default)]
    text_config: TextFile,
    #[serde(default)]
    vision_config: VisionFile,
    #[serde(default = "first_projection")]
    projection_dim: i64,
}

/// Fields of its `text_config`.
#[derive(Deserialize)]
#[serde(default)]
pub(super) struct TextFile {
    vocab_size: i64,
    hidden_size: i64,
    intermediate_size: i64,
    num_hidden_layers: usize,
    num_attention_heads: i64,
    max_position_embeddings: i64,
    hidden_act: String,
    layer_norm_eps: f64,
    eos_token_id: Option<i64>,
}

/// Fields of its `vision_config`.
#[derive(Deserialize)]
#[serde(default)]
struct VisionFile {
    hidden_size: i64,
    intermediate_size: i64,
    num_hidden_layers: usize,
    num_attention_heads: i64,
    num_channels: i64,
    image_size: i64,
    patch_size: i64,
    hidden_act: String,
    layer_norm_eps: f64,
}

/// Fields read from `preprocessor_config.json`.
#[derive(Deserialize)]
#[serde(default)]
struct PreprocessorFile {
    image_mean: [f64; 3],
    image_std: [f64; 3],
}

impl Default for TextFile {
    fn default() -> Self {
        TextFile {
            vocab_size: 49_408,
            hidden_size: 512,
            intermediate_size: 2048,
            num_hidden_layers: 12,
            num_attention_heads: 8,
            max_position_embeddings: 77,
            hidden_act: "quick_gelu".to_owned(),
            layer_norm_eps: 1e-5,
            eos_token_id: None,
        }
    }
}

impl Default for VisionFile {
    fn default() -> Self {
        VisionFile {
            hidden_size: 768,
            intermediate_size: 3072,
            num_hidden_layers: 12,
            num_attention_heads: 12,
            num_channels: 3,
            image_size: 224,
            patch_size: 32,
            hidden_act: "quick_gelu".to_owned(),
            layer_norm_eps: 1e-5,
        }
    }
}

impl Default for PreprocessorFile {
    fn default() -> Self {
        PreprocessorFile {
            image_mean: [0.481_454_66, 0.457_827_5, 0.408_210_73],
            image_std: [0.268_629_54, 0.261_302_58, 0.275_777_11],
        }
    }
}

pub(super) fn first_projection() -> i64 {
    512
}

/// Value of `eos_token_id` in the first CLIPs' configurations, although their texts end with the vocabulary's
/// last token.
const MISNAMED_END: i64 = 2;

impl ConfigFile {
    fn into_config(self, preprocessor: PreprocessorFile, path: &Path) -> Result<ClipConfig> {
        if self.model_type != "clip" {
            return Err(field(path, "model_type", format!("is `{}`, must be `clip`", self.model_type)));
        }
        let ConfigFile { text_config, vision_config: vision, projection_dim, .. } = self;
        if vision.num_channels != 3 {
            let problem = format!("is {}, must be 3", vision.num_channels);
            return Err(field(path, "vision_config.num_channels", problem));
        }
        Ok(ClipConfig {
            text_config: text_config.into_config("text_config.", path)?,
            vision_config: TowerConfig {
                hidden_size: vision.hidden_size,
                intermediate_size: vision.intermediate_size,
                num_hidden_layers: vision.num_hidden_layers,
                num_attention_heads: vision.num_attention_heads,
                hidden_act: activation("vision_config.", &vision.hidden_act, path)?,
                layer_norm_eps: vision.layer_norm_eps,
            },
            projection_dim,
            image_size: vision.image_size,
            patch_size: vision.patch_size,
            pixels: [preprocessor.image_mean, preprocessor.image_std],
        })
    }
}

impl TextFile {
    /// `within` is the prefix of its fields' names.
    pub(super) fn into_config(self, within: &str, path: &Path) -> Result<TextConfig> {
        let end = self.eos_token_id.filter(|token| *token != MISNAMED_END);
        Ok(TextConfig {
            tower: TowerConfig {
                hidden_size: self.hidden_size,
                intermediate_size: self.intermediate_size,
                num_hidden_layers: self.num_hidden_layers,
                num_attention_heads: self.num_attention_heads,
                hidden_act: activation(within, &self.hidden_act, path)?,
                layer_norm_eps: self.layer_norm_eps,
            },
            vocab_size: self.vocab_size,
            max_position_embeddings: self.max_position_embeddings,
            eos_token_id: end.unwrap_or(self.vocab_size - 1),
        })
    }
}

fn activation(within: &str, name: &str, path: &Path) -> Result<Activation> {
    match name {
        "quick_gelu" => Ok(Activation::QuickGelu),
        "gelu" => Ok(Activation::Gelu),
        other => {
            let problem = format!("is `{other}`, must be quick_gelu or gelu");
            Err(field(path, format!("{within}hidden_act"), problem))
        }
    }
}

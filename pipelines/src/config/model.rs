//! The `model` section: a decoder made from scratch, or a published model's folder.

use std::path::PathBuf;

use serde::{Deserialize, Serialize};

use anyroll_models::LoraTarget;
use regex::Regex;

use super::diffusion::DitConfig;
use super::schema::{DecoderConfig, ModelConfig};

/// A model in a folder as Hugging Face publishes it, its tokenizer and its chat template with it.
#[derive(Clone, Debug, PartialEq)]
pub struct FolderConfig {
    /// The folder; a relative path starts at the current folder.
    pub path: PathBuf,
    /// Whether a prompt is a user's message in the model's chat template, or the text as it is. Default true.
    pub chat: bool,
    /// The system message before each prompt, if `chat`. Default: none, or what the template puts there itself.
    pub system_prompt: Option<String>,
    /// Train adapters and leave the model's own weights as they are. Default: train the weights.
    pub lora: Option<LoraConfig>,
}

/// Low-rank adapters beside the matrices of every layer. The reference of a KL term is then the model with its
/// adapters off, and not a copy.
#[derive(Clone, Debug, PartialEq, Deserialize, Serialize)]
#[serde(deny_unknown_fields)]
pub struct LoraConfig {
    /// The inner width of the adapters' products.
    pub rank: usize,
    /// The products are multiplied by alpha / rank; above 0. Default 2 x rank.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub alpha: Option<f64>,
    /// Which matrices have one: names such as `q_proj`, or patterns that match whole names, such as `(q|v)_proj` or
    /// `mlp[.].*`. Default: all.
    #[serde(default = "all_targets")]
    pub targets: Vec<String>,
    /// A folder with an adapter as PEFT saves it, to go on from; its rank, alpha and targets are this one's. Default:
    /// a new adapter, which changes nothing until it is trained.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub path: Option<PathBuf>,
}

impl LoraConfig {
    /// Its shape, or the entry of `targets` that is no pattern or matches nothing.
    pub fn shape(&self) -> Result<anyroll_models::LoraConfig, &str> {
        let mut targets = Vec::new();
        for entry in &self.targets {
            let pattern = Regex::new(&format!("^(?:{entry})$")).map_err(|_| entry.as_str())?;
            let matches = |target: &LoraTarget| {
                let name = target.name();
                pattern.is_match(name) || pattern.is_match(name.rsplit('.').next().unwrap_or(name))
            };
            let mut found = LoraTarget::ALL.into_iter().filter(matches).peekable();
            found.peek().ok_or(entry.as_str())?;
            targets.extend(found);
        }
        // In the order of the layer, each once.
        let targets = LoraTarget::ALL.into_iter().filter(|target| targets.contains(target)).collect();
        let alpha = self.alpha.unwrap_or(2.0 * self.rank as f64);
        Ok(anyroll_models::LoraConfig { rank: self.rank as i64, alpha, targets })
    }
}

fn all_targets() -> Vec<String> {
    vec![".*".to_owned()]
}

/// What `model:` may hold; one of the first three names the kind.
#[derive(Deserialize, Serialize)]
#[serde(deny_unknown_fields)]
pub(super) struct ModelFields {
    #[serde(default, skip_serializing_if = "Option::is_none")]
    decoder: Option<DecoderConfig>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    dit: Option<DitConfig>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    path: Option<PathBuf>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    chat: Option<bool>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    system_prompt: Option<String>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    lora: Option<LoraConfig>,
}

impl TryFrom<ModelFields> for ModelConfig {
    type Error = &'static str;

    fn try_from(fields: ModelFields) -> Result<Self, &'static str> {
        let ModelFields { decoder, dit, path, chat, system_prompt, lora } = fields;
        let of_folder = chat.is_some() || system_prompt.is_some() || lora.is_some();
        match (decoder, dit, path) {
            (None, None, Some(path)) => {
                Ok(Self::Folder(FolderConfig { path, chat: chat.unwrap_or(true), system_prompt, lora }))
            }
            _ if of_folder => Err("`chat`, `system_prompt` and `lora` go with `path`, a published model"),
            (Some(decoder), None, None) => Ok(Self::Decoder(decoder)),
            (None, Some(dit), None) => Ok(Self::Dit(dit)),
            _ => Err("expected exactly one of `decoder`, `path` and `dit`"),
        }
    }
}

impl From<ModelConfig> for ModelFields {
    fn from(model: ModelConfig) -> Self {
        let empty =
            Self { decoder: None, dit: None, path: None, chat: None, system_prompt: None, lora: None };
        match model {
            ModelConfig::Decoder(decoder) => Self { decoder: Some(decoder), ..empty },
            ModelConfig::Dit(dit) => Self { dit: Some(dit), ..empty },
            ModelConfig::Folder(FolderConfig { path, chat, system_prompt, lora }) => {
                Self { path: Some(path), chat: Some(chat), system_prompt, lora, ..empty }
            }
        }
    }
}

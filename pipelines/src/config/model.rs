//! The `model` section: a decoder made from scratch, or a published model's folder.

use std::path::PathBuf;

use serde::{Deserialize, Serialize};

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
}

/// What `model:` may hold; one of the first two names the kind.
#[derive(Deserialize, Serialize)]
#[serde(deny_unknown_fields)]
pub(super) struct ModelFields {
    #[serde(default, skip_serializing_if = "Option::is_none")]
    decoder: Option<DecoderConfig>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    path: Option<PathBuf>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    chat: Option<bool>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    system_prompt: Option<String>,
}

impl TryFrom<ModelFields> for ModelConfig {
    type Error = &'static str;

    fn try_from(fields: ModelFields) -> Result<Self, &'static str> {
        let ModelFields { decoder, path, chat, system_prompt } = fields;
        match (decoder, path) {
            (Some(decoder), None) if chat.is_none() && system_prompt.is_none() => Ok(Self::Decoder(decoder)),
            (Some(_), None) => {
                Err("`chat` and `system_prompt` go with `path`: a decoder has no chat template")
            }
            (None, Some(path)) => {
                Ok(Self::Folder(FolderConfig { path, chat: chat.unwrap_or(true), system_prompt }))
            }
            _ => Err("expected exactly one of `decoder` and `path`"),
        }
    }
}

impl From<ModelConfig> for ModelFields {
    fn from(model: ModelConfig) -> Self {
        let empty = Self { decoder: None, path: None, chat: None, system_prompt: None };
        match model {
            ModelConfig::Decoder(decoder) => Self { decoder: Some(decoder), ..empty },
            ModelConfig::Folder(FolderConfig { path, chat, system_prompt }) => {
                Self { path: Some(path), chat: Some(chat), system_prompt, ..empty }
            }
        }
    }
}

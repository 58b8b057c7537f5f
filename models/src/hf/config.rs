//! `config.json`: the architecture that it names, and the fields that families share.

use std::path::Path;

use serde::Deserialize;
use serde_json::{Map, Value};

use super::family::{FAMILIES, Family};
use super::{Error, Result, TokenIds, field};
use crate::ValueHead;

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
    fn suffix(self) -> &'static str {
        match self {
            Task::Language => "ForCausalLM",
            Task::Value(ValueHead::Number) => "ForSequenceClassification",
            Task::Value(ValueHead::Classes) => "ForTokenClassification",
        }
    }

    /// Returns the name of a family's architecture.
    pub(super) fn architecture(self, family: &Family) -> String {
        let infix = if self == Task::Language { "" } else { family.infix };
        format!("{}{infix}{}", family.name, self.suffix())
    }

    /// Lists the supported architectures.
    pub(super) fn architectures(self) -> String {
        FAMILIES.map(|family| self.architecture(family)).join(", ")
    }

    /// Returns the name for this task of the language model architecture `name`.
    pub(super) fn of_language(self, name: &str) -> String {
        let family = FAMILIES.into_iter().find(|family| Task::Language.architecture(family) == name);
        family.map_or_else(|| name.to_owned(), |family| self.architecture(family))
    }
}

/// The architecture named by a `config.json`. It is read first, since other kinds of models have other
/// fields.
#[derive(Debug, Deserialize)]
pub(super) struct Architectures {
    architectures: Option<Vec<String>>,
}

/// Fields of a `config.json` that families share.
#[derive(Debug, Deserialize)]
pub(super) struct ConfigFile {
    pub vocab_size: i64,
    pub hidden_size: i64,
    pub num_hidden_layers: usize,
    pub num_attention_heads: i64,
    pub num_key_value_heads: Option<i64>,
    pub head_dim: Option<i64>,
    pub intermediate_size: i64,
    pub max_position_embeddings: i64,
    pub original_max_position_embeddings: Option<f64>,
    pub rms_norm_eps: Option<f64>,
    pub rope_theta: Option<f64>,
    pub rope_scaling: Option<Map<String, Value>>,
    /// Newer files' replacement of `rope_theta` and `rope_scaling`.
    pub rope_parameters: Option<Map<String, Value>>,
    pub partial_rotary_factor: Option<f64>,
    /// Kind of each layer, in newer files.
    pub layer_types: Option<Vec<String>>,
    pub tie_word_embeddings: Option<bool>,
    pub initializer_range: Option<f64>,
    pub eos_token_id: Option<TokenIds>,
    /// Python code in the folder that computes the model in `transformers`.
    pub auto_map: Option<Value>,
    pub hidden_act: Option<String>,
    #[serde(default)]
    pub attention_bias: bool,
    #[serde(default)]
    pub mlp_bias: bool,
    /// All other fields, some of which a family reads.
    #[serde(flatten)]
    pub others: Map<String, Value>,
}

impl Architectures {
    /// Returns the head of a classifier: that of tokens if an architecture is one, else that of a sequence.
    pub fn value_head(&self) -> ValueHead {
        let suffix = Task::Value(ValueHead::Classes).suffix();
        let is_of_tokens = self.architectures.iter().flatten().any(|name| name.ends_with(suffix));
        if is_of_tokens { ValueHead::Classes } else { ValueHead::Number }
    }

    /// Returns the family of the file at `path`, whose model is for `task`.
    pub fn family(&self, path: &Path, task: Task) -> Result<&'static Family> {
        let named = self.architectures.as_deref().unwrap_or_default().join(", ");
        // A base model has no head: if the head is tied to the embedding, nothing is missing.
        let is_base = |family: &Family| {
            task == Task::Language && named == format!("{}{}Model", family.name, family.infix)
        };
        let is_it = |family: &&Family| named == task.architecture(family) || is_base(family);
        let mut refused = FAMILIES.into_iter().flat_map(|family| family.refused);
        if let Some((name, problem)) = refused.find(|(name, _)| *name == named) {
            return Err(field(path, "architectures", format!("are {name}, {problem}")));
        }
        FAMILIES.into_iter().find(is_it).ok_or_else(|| {
            let found = if named.is_empty() { "(none)".to_owned() } else { named };
            Error::Architecture { path: path.to_owned(), found, known: task.architectures() }
        })
    }
}

#[cfg(test)]
mod tests;

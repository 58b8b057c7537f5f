//! The `config.json` of a GGUF file's metadata.

use serde_json::{Map, Value as Json, json};

use super::super::config::Task;
use super::super::family::{FAMILIES, Family, Gguf};
use super::super::{Error, Result, field};
use super::file::{GgufFile, TensorInfo, Value};
use super::rotation;

/// Keys of an architecture that are read, or change nothing.
const KNOWN: [&str; 14] = [
    "vocab_size",
    "context_length",
    "embedding_length",
    "block_count",
    "feed_forward_length",
    "tensor_data_layout",
    "attention.head_count",
    "attention.head_count_kv",
    "attention.key_length",
    "attention.value_length",
    "attention.layer_norm_rms_epsilon",
    "rope.dimension_count",
    "rope.freq_base",
    "rope.scale_linear",
];

/// Tokens that end a completion, by their keys.
const ENDS: [&str; 3] = ["eos", "eot", "eom"];

/// Returns the `config.json` that a folder of the model would have.
pub(super) fn config_json(file: &GgufFile) -> Result<Map<String, Json>> {
    let keys = Keys::of(file)?;
    keys.refuse_unknown()?;
    let (family, _) = keys.family()?;
    let hidden_size = keys.required("embedding_length")?;
    let head_dim = match keys.integer("attention.key_length")? {
        Some(length) => length,
        None => hidden_size / keys.heads()?,
    };
    keys.refuse_other("attention.value_length", head_dim, "the length of keys")?;
    keys.refuse_other("rope.dimension_count", head_dim, "the length of keys, and heads are rotated whole")?;
    let max_length = keys.required("context_length")?;
    let embedding = keys.tensor("token_embd.weight");
    let embedding = embedding.ok_or_else(|| {
        let (path, name) = (file.path.clone(), "token_embd.weight".to_owned());
        Error::Tensor { path, name, problem: "is missing".to_owned() }
    })?;
    let ends: Vec<i64> =
        ENDS.iter().filter_map(|name| keys.token(name).transpose()).collect::<Result<_>>()?;
    let config = json!({
        "architectures": [Task::Language.architecture(family)],
        "model_type": family.model_type,
        "vocab_size": embedding.shape[0],
        "hidden_size": hidden_size,
        "num_hidden_layers": keys.required("block_count")?,
        "num_attention_heads": keys.heads()?,
        "num_key_value_heads": keys.kv_heads()?,
        "head_dim": head_dim,
        "intermediate_size": keys.required("feed_forward_length")?,
        "hidden_act": "silu",
        "max_position_embeddings": max_length,
        "rms_norm_eps": keys.number("attention.layer_norm_rms_epsilon")?.ok_or_else(|| {
            keys.wrong("attention.layer_norm_rms_epsilon", "is missing")
        })?,
        "rope_theta": keys.number("rope.freq_base")?.unwrap_or(10_000.0),
        "rope_scaling": rotation::scaling(&keys, head_dim)?,
        "tie_word_embeddings": keys.tensor("output.weight").is_none(),
        // Only in these two classes the fields are read.
        "attention_bias": keys.tensor("blk.0.attn_q.bias").is_some(),
        "mlp_bias": keys.tensor("blk.0.ffn_gate.bias").is_some(),
        "attention_dropout": 0.0,
        "bos_token_id": keys.token("bos")?,
        "eos_token_id": unique(ends),
        "pad_token_id": keys.token("padding")?,
    });
    let Json::Object(config) = config else { unreachable!("written as an object above") };
    Ok(config)
}

fn unique(mut tokens: Vec<i64>) -> Json {
    let mut seen = Vec::new();
    tokens.retain(|token| !seen.contains(token) && (seen.push(*token), true).1);
    match tokens[..] {
        [] => Json::Null,
        [only] => only.into(),
        _ => tokens.into(),
    }
}

/// The keys of a file's architecture.
pub(super) struct Keys<'a> {
    pub file: &'a GgufFile,
    architecture: &'a str,
}

impl<'a> Keys<'a> {
    /// Returns the keys of the architecture that the file names.
    pub fn of(file: &'a GgufFile) -> Result<Keys<'a>> {
        match file.metadata.get("general.architecture") {
            Some(Value::Text(architecture)) => Ok(Keys { file, architecture }),
            _ => Err(field(&file.path, "general.architecture", "is missing, or no text")),
        }
    }

    /// Returns the family that the file's architecture means.
    pub fn family(&self) -> Result<(&'static Family, &'static Gguf)> {
        let mut known: Vec<(&Family, &Gguf)> =
            FAMILIES.into_iter().filter_map(|family| Some((family, family.gguf.as_ref()?))).collect();
        known.sort_by_key(|(_, gguf)| gguf.name);
        known.iter().copied().find(|(_, gguf)| gguf.name == self.architecture).ok_or_else(|| {
            let known: Vec<&str> = known.iter().map(|(_, gguf)| gguf.name).collect();
            let known = format!("{} in a GGUF file", known.join(", "));
            Error::Architecture { path: self.file.path.clone(), found: self.architecture.to_owned(), known }
        })
    }

    /// Refuses keys of the architecture that are not read, unless they are off.
    fn refuse_unknown(&self) -> Result<()> {
        let prefix = format!("{}.", self.architecture);
        let is_off = |value: &Value| matches!(value, Value::Bool(false) | Value::Integer(0));
        let is_known = |name: &str| KNOWN.contains(&name) || rotation::SCALING.contains(&name);
        let mut unknown: Vec<&str> = self
            .file
            .metadata
            .iter()
            .filter_map(|(key, value)| key.strip_prefix(&prefix).filter(|_| !is_off(value)))
            .filter(|name| !is_known(name))
            .collect();
        unknown.sort_unstable();
        match unknown.first() {
            None => Ok(()),
            Some(name) => {
                Err(self
                    .wrong(name, "is set, which is not supported: give the folder of the published model"))
            }
        }
    }

    fn refuse_other(&self, name: &str, expected: i64, what: &str) -> Result<()> {
        match self.integer(name)? {
            Some(found) if found != expected => {
                Err(self.wrong(name, &format!("is {found}, must be {expected}, {what}")))
            }
            _ => Ok(()),
        }
    }

    /// Returns an error about the architecture's key `name`.
    pub fn wrong(&self, name: &str, problem: &str) -> Error {
        field(&self.file.path, format!("{}.{name}", self.architecture), problem)
    }

    pub fn value(&self, name: &str) -> Option<&'a Value> {
        self.file.metadata.get(&format!("{}.{name}", self.architecture))
    }

    fn integer(&self, name: &str) -> Result<Option<i64>> {
        match self.value(name) {
            None => Ok(None),
            Some(Value::Integer(value)) => Ok(Some(*value)),
            Some(_) => {
                Err(self.wrong(name, "is no integer; one that differs between layers is not supported"))
            }
        }
    }

    fn required(&self, name: &str) -> Result<i64> {
        match self.integer(name)? {
            Some(value @ 1..) => Ok(value),
            Some(value) => Err(self.wrong(name, &format!("is {value}, must be at least 1"))),
            None => Err(self.wrong(name, "is missing")),
        }
    }

    pub fn number(&self, name: &str) -> Result<Option<f64>> {
        match self.value(name) {
            None => Ok(None),
            Some(Value::Number(value)) => Ok(Some(*value)),
            Some(Value::Integer(value)) => Ok(Some(*value as f64)),
            Some(_) => Err(self.wrong(name, "is no number")),
        }
    }

    /// Returns the number of heads of queries.
    pub fn heads(&self) -> Result<i64> {
        self.required("attention.head_count")
    }

    /// Returns the number of heads of keys and values.
    pub fn kv_heads(&self) -> Result<i64> {
        match self.value("attention.head_count_kv") {
            None => self.heads(),
            Some(_) => self.required("attention.head_count_kv"),
        }
    }

    pub fn tensor(&self, name: &str) -> Option<&'a TensorInfo> {
        self.file.tensors.iter().find(|tensor| tensor.name == name)
    }

    fn token(&self, name: &str) -> Result<Option<i64>> {
        super::tokenizer::token_id(self.file, name)
    }
}

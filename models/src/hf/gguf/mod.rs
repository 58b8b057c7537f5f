//! GGUF files of llama.cpp, read as a published model: a configuration, named tensors and a tokenizer.
//!
//! [`GgufFile`] reads the header. Its metadata becomes the `config.json`, `tokenizer.json` and
//! `tokenizer_config.json` that a folder would have, and its tensors get a folder's names.

mod config;
mod file;
mod rotation;
mod tokenizer;

use std::fs::{self, File};
use std::io::Read;
use std::path::{Path, PathBuf};

use file::{GgufFile, MAGIC, Value};

use super::weights::{Place, WeightFiles};
use super::{Error, Result, field};

/// File of a tokenizer, which replaces the metadata's where it lies beside a GGUF file.
pub(super) const TOKENIZER: &str = "tokenizer.json";

/// A part of a tensor's name in a GGUF file, and in a folder.
const LAYER_NAMES: [(&str, &str); 11] = [
    ("attn_norm", "input_layernorm"),
    ("attn_q", "self_attn.q_proj"),
    ("attn_k", "self_attn.k_proj"),
    ("attn_v", "self_attn.v_proj"),
    ("attn_q_norm", "self_attn.q_norm"),
    ("attn_k_norm", "self_attn.k_norm"),
    ("attn_output", "self_attn.o_proj"),
    ("ffn_norm", "post_attention_layernorm"),
    ("ffn_gate", "mlp.gate_proj"),
    ("ffn_up", "mlp.up_proj"),
    ("ffn_down", "mlp.down_proj"),
];

/// Finds the GGUF file that `path` names: the file itself, or the only one in a folder without safetensors.
///
/// # Errors
/// [`Error::SeveralGguf`] for a folder of several, and no `config.json`.
pub(super) fn find(path: &Path) -> Result<Option<PathBuf>> {
    if path.is_file() {
        return Ok(is_gguf(path).then(|| path.to_owned()));
    }
    let entries = fs::read_dir(path).into_iter().flatten().flatten();
    let mut files: Vec<PathBuf> = entries.map(|entry| entry.path()).collect();
    let is_of_weights = |file: &PathBuf| file.to_string_lossy().contains(".safetensors");
    if files.iter().any(is_of_weights) {
        return Ok(None);
    }
    files.retain(|file| has_ending(file) && file.is_file());
    files.sort();
    match &files[..] {
        [] => Ok(None),
        [only] => Ok(Some(only.clone())),
        _ if path.join("config.json").exists() => Ok(None),
        _ => {
            let name = |file: &PathBuf| file.file_name().unwrap_or_default().to_string_lossy().into_owned();
            let files = files.iter().take(8).map(name).collect();
            Err(Error::SeveralGguf { path: path.to_owned(), files })
        }
    }
}

fn has_ending(path: &Path) -> bool {
    path.extension().is_some_and(|ending| ending.eq_ignore_ascii_case("gguf"))
}

fn is_gguf(path: &Path) -> bool {
    let mut start = [0; 4];
    has_ending(path)
        || File::open(path).and_then(|mut file| file.read_exact(&mut start)).is_ok_and(|()| start == *MAGIC)
}

/// Files that a folder would have, made of the metadata of the file at `path`. A tokenizer beside it replaces
/// that of the metadata.
///
/// # Errors
/// [`Error::Broken`], or [`Error::Field`] with the key of what is not supported.
pub(super) fn made_files(path: &Path) -> Result<Vec<(&'static str, Vec<u8>)>> {
    let file = open(path)?;
    let beside = |name: &str| path.with_file_name(name).is_file();
    let bytes = |value: serde_json::Value| serde_json::to_vec_pretty(&value).expect("plain data");
    let mut made = vec![("config.json", bytes(config::config_json(&file)?.into()))];
    if !beside(TOKENIZER) {
        made.push((TOKENIZER, bytes(tokenizer::tokenizer_json(&file)?)));
    }
    if !beside(TOKENIZER) || !beside("tokenizer_config.json") {
        made.push(("tokenizer_config.json", bytes(tokenizer::tokenizer_config_json(&file)?.into())));
    }
    Ok(made)
}

/// Opens the tensors of the file at `path`, under the names of a folder.
///
/// # Errors
/// [`Error::Broken`] or [`Error::Tensor`].
pub(super) fn weights(path: &Path) -> Result<WeightFiles> {
    let file = open(path)?;
    let quantized: Vec<String> = file
        .tensors
        .iter()
        .filter(|tensor| tensor.encoding.is_quantized())
        .map(|tensor| format!("{:?}", tensor.encoding))
        .collect();
    if let Some(kind) = most_frequent(quantized) {
        tracing::warn!(
            "{} has quantized weights, most in {kind}: training begins from these, and an export has not the \
             original's weights",
            path.display()
        );
    }
    let heads = config::Keys::of(&file)?;
    let is_in_pairs = heads.family()?.1.in_pairs;
    let mut places = Vec::new();
    for tensor in &file.tensors {
        let Some((name, part)) = folder_name(&tensor.name) else { continue };
        let heads = match part {
            "attn_q" if is_in_pairs => Some(heads.heads()?),
            "attn_k" if is_in_pairs => Some(heads.kv_heads()?),
            _ => None,
        };
        let head_rows = heads.map(|heads| tensor.shape[0] / heads);
        if let Some((heads, rows)) = heads.zip(head_rows)
            && (rows * heads != tensor.shape[0] || rows % 2 != 0)
        {
            let problem =
                format!("has {} rows, not an even number for each of {heads} heads", tensor.shape[0]);
            return Err(Error::Tensor { path: path.to_owned(), name: tensor.name.clone(), problem });
        }
        let paired_rows = head_rows.map(|rows| rows as usize);
        let (offset, encoding, shape) = (tensor.place.start, tensor.encoding, tensor.shape.clone());
        places.push((name, Place { file: 0, offset, encoding, shape, paired_rows }));
    }
    WeightFiles::of_places(path, file.file, places)
}

/// Opens the file at `path`, which must be a whole one.
fn open(path: &Path) -> Result<GgufFile> {
    let file = GgufFile::open(path)?;
    match file.metadata.get("split.count") {
        None | Some(Value::Integer(0 | 1)) => Ok(file),
        Some(_) => {
            let problem =
                "is not 1: join the parts first with llama.cpp's `llama-gguf-split --merge FIRST_PART FILE`";
            Err(field(path, "split.count", problem))
        }
    }
}

fn most_frequent(names: Vec<String>) -> Option<String> {
    let count = |name: &String| names.iter().filter(|it| *it == name).count();
    names.iter().max_by_key(|name| count(name)).cloned()
}

/// Returns a tensor's name in a folder, and its part of a layer; `None` for factors of rotations, which the
/// configuration has. An unknown name stays.
fn folder_name(name: &str) -> Option<(String, &str)> {
    let whole = |name: &str| Some((name.to_owned(), ""));
    match name {
        rotation::FACTORS => return None,
        "token_embd.weight" => return whole(super::EMBEDDING),
        "output_norm.weight" => return whole("model.norm.weight"),
        "output.weight" => return whole(super::HEAD),
        _ => {}
    }
    let parts: Vec<&str> = name.split('.').collect();
    let ["blk", layer, part, kind @ ("weight" | "bias")] = parts[..] else { return whole(name) };
    match LAYER_NAMES.iter().find(|(ours, _)| *ours == part) {
        Some((_, theirs)) => Some((format!("model.layers.{layer}.{theirs}.{kind}"), part)),
        None => whole(name),
    }
}

//! Tokenizer of a CLIP published as `vocab.json` and `merges.txt`, equal to `CLIPTokenizer` of
//! `transformers`: byte pairs of lower-case words (Radford et al., 2021).

use std::path::Path;

use serde_json::{Map, Value, json};

use super::TokenizerError;
use super::read;

/// Tokens at the start and the end of a text, unless `tokenizer_config.json` names others. The latter also
/// pads and stands for unknown text.
const START: &str = "<|startoftext|>";
const END: &str = "<|endoftext|>";

/// Regular expression of a word, a part of one, or punctuation.
const WORDS: &str =
    r"<\|startoftext\|>|<\|endoftext\|>|'s|'t|'re|'ve|'m|'ll|'d|[\p{L}]+|[\p{N}]|[^\s\p{L}\p{N}]+";

/// Builds the `tokenizer.json` that the folder `path` lacks, using its `tokenizer_config.json`, `config`.
pub(super) fn tokenizer_json(path: &Path, config: &Map<String, Value>) -> Result<Value, TokenizerError> {
    let file = path.join("vocab.json");
    let broken = |problem: String| TokenizerError::Broken { path: file.clone(), problem };
    let vocab: Map<String, Value> =
        serde_json::from_slice(&read(&file)?).map_err(|error| broken(error.to_string()))?;
    let merges = String::from_utf8_lossy(&read(&path.join("merges.txt"))?).into_owned();
    let merges: Vec<&str> =
        merges.lines().filter(|line| !line.starts_with("#version") && !line.is_empty()).collect();
    let added = added_tokens(config, &vocab).map_err(broken)?;
    let named = |name: &str, usual: &str| -> Result<Value, TokenizerError> {
        let token = text_of(config.get(name)).unwrap_or(usual);
        let id = vocab.get(token).ok_or_else(|| broken(format!("it has no `{token}`, the {name}")))?;
        Ok(json!([token, id]))
    };
    let bytes =
        json!({"type": "ByteLevel", "add_prefix_space": false, "trim_offsets": true, "use_regex": true});
    Ok(json!({
        "version": "1.0",
        "added_tokens": added,
        "normalizer": {"type": "Sequence", "normalizers": [
            {"type": "NFC"},
            {"type": "Replace", "pattern": {"Regex": r"\s+"}, "content": " "},
            {"type": "Lowercase"},
        ]},
        "pre_tokenizer": {"type": "Sequence", "pretokenizers": [
            {"type": "Split", "pattern": {"Regex": WORDS}, "behavior": "Removed", "invert": true},
            bytes,
        ]},
        "post_processor": {
            "type": "RobertaProcessing",
            "sep": named("eos_token", END)?,
            "cls": named("bos_token", START)?,
            "trim_offsets": false,
            "add_prefix_space": false,
        },
        "decoder": bytes,
        "model": {
            "type": "BPE",
            "dropout": null,
            "unk_token": text_of(config.get("unk_token")).unwrap_or(END),
            "continuing_subword_prefix": "",
            "end_of_word_suffix": "</w>",
            "fuse_unk": false,
            "byte_fallback": false,
            "ignore_merges": false,
            "vocab": vocab,
            "merges": merges,
        },
    }))
}

/// Tokens that are found before a text is split into words: the special ones and those of
/// `added_tokens_decoder`. The padding token counts as one even if it is an ordinary token, as in Stable
/// Diffusion 3's second tokenizer.
fn added_tokens(config: &Map<String, Value>, vocab: &Map<String, Value>) -> Result<Vec<Value>, String> {
    let mut added: Vec<(u64, Value)> = Vec::new();
    let mut add = |id: u64, content: &str, says: &Value| {
        let flag = |name: &str, usual: bool| says.get(name).and_then(Value::as_bool).unwrap_or(usual);
        if added.iter().all(|(other, _)| *other != id) {
            let token = json!({
                "id": id,
                "content": content,
                "single_word": flag("single_word", false),
                "lstrip": flag("lstrip", false),
                "rstrip": flag("rstrip", false),
                "normalized": flag("normalized", false),
                "special": flag("special", true),
            });
            added.push((id, token));
        }
    };
    for (id, token) in config.get("added_tokens_decoder").and_then(Value::as_object).into_iter().flatten() {
        let content = text_of(Some(token)).ok_or_else(|| format!("the added token {id} has no content"))?;
        add(id.parse().map_err(|_| format!("the added token `{content}` has no number"))?, content, token);
    }
    for (name, usual) in [("bos_token", START), ("eos_token", END), ("unk_token", END), ("pad_token", END)] {
        let token = config.get(name).unwrap_or(&Value::Null);
        let content = text_of(Some(token)).unwrap_or(usual);
        let id = vocab.get(content).and_then(Value::as_u64);
        add(id.ok_or_else(|| format!("it has no `{content}`, the {name}"))?, content, token);
    }
    added.sort_by_key(|(id, _)| *id);
    Ok(added.into_iter().map(|(_, token)| token).collect())
}

/// Text of a token, which is written as a string or as an object with further fields.
fn text_of(token: Option<&Value>) -> Option<&str> {
    token.map(|token| token.get("content").unwrap_or(token)).and_then(Value::as_str)
}

#[cfg(test)]
mod tests {
    use std::fs;

    use serde_json::json;

    use super::super::HfTokenizer;
    use super::*;

    #[test]
    fn texts_are_cut_as_by_transformers() {
        let golden = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../tests/golden/text_encoders/sd3");
        let texts = fs::read_to_string(golden.join("texts.jsonl")).unwrap();
        let wanted = tch::Tensor::read_safetensors(golden.join("encoders.safetensors")).unwrap();
        for (number, name) in ["tokenizer", "tokenizer_2"].into_iter().enumerate() {
            let tokenizer = HfTokenizer::open_clip(&golden.join(name)).unwrap();
            let wanted =
                &wanted.iter().find(|(tensor, _)| *tensor == format!("clip.{number}.tokens")).unwrap().1;
            let (end, most) = (wanted.max().int64_value(&[]), wanted.size()[1] as usize);
            assert_eq!(tokenizer.max_length(), Some(most));
            for (row, line) in texts.lines().enumerate() {
                let line: Value = serde_json::from_str(line).unwrap();
                let (mut found, _) =
                    tokenizer.encode_ending(line["prompt"].as_str().unwrap(), most, end).unwrap();
                found.resize(most, tokenizer.pad().unwrap());
                assert_eq!(found, Vec::<i64>::try_from(wanted.get(row as i64)).unwrap(), "{name}: {line}");
            }
        }
    }

    #[test]
    fn a_vocabulary_without_its_ends_is_refused() {
        let folder = tempfile::tempdir().unwrap();
        fs::write(folder.path().join("vocab.json"), json!({"a": 0, END: 1}).to_string()).unwrap();
        fs::write(folder.path().join("merges.txt"), "#version: 0.2\n").unwrap();
        let error = HfTokenizer::open_clip(folder.path()).unwrap_err().to_string();
        assert!(error.contains("vocab.json") && error.contains("no `<|startoftext|>`"), "{error}");
    }
}

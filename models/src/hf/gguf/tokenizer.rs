//! The `tokenizer.json` and `tokenizer_config.json` of a GGUF file's metadata.

use std::collections::HashMap;

use serde_json::{Map, Value as Json, json};

use super::super::{Error, Result, field};
use super::file::{GgufFile, Value};

/// Fix for a tokenizer that cannot be made of the metadata.
const MEND: &str = "put the published model's tokenizer.json beside the file, which then replaces it";

/// Split of words in the family of Llama 3.
const LLAMA3: &str = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+";
/// Split of words in the family of Qwen2.
const QWEN2: &str = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+";

/// Kinds of tokens in `tokenizer.ggml.token_type`.
const NORMAL: i64 = 1;
const UNKNOWN: i64 = 2;
const CONTROL: i64 = 3;
const USER_DEFINED: i64 = 4;
/// Rows of the embedding without a token.
const UNUSED: i64 = 5;

/// Returns the token of the key `tokenizer.ggml.NAME_token_id`.
pub(super) fn token_id(file: &GgufFile, name: &str) -> Result<Option<i64>> {
    let key = format!("tokenizer.ggml.{name}_token_id");
    match file.metadata.get(&key) {
        None => Ok(None),
        Some(Value::Integer(token @ 0..)) => Ok(Some(*token)),
        Some(_) => Err(field(&file.path, key, "is no token")),
    }
}

/// Returns the `tokenizer.json` of the metadata.
///
/// # Errors
/// [`Error::Field`] with the key of what is not supported, and the fix.
pub(super) fn tokenizer_json(file: &GgufFile) -> Result<Json> {
    let tokens = Tokens::of(file)?;
    match text(file, "tokenizer.ggml.model")? {
        Some("gpt2") => tokens.of_bytes(),
        Some("llama") => tokens.of_sentence_pieces(),
        other => {
            let found = other.map_or_else(|| "missing".to_owned(), |model| format!("`{model}`"));
            Err(tokens.refuse("model", &format!("is {found}, must be gpt2 or llama")))
        }
    }
}

/// Returns the `tokenizer_config.json` of the metadata: special tokens and chat templates.
pub(super) fn tokenizer_config_json(file: &GgufFile) -> Result<Map<String, Json>> {
    const NAMES: [(&str, &str); 4] =
        [("bos_token", "bos"), ("eos_token", "eos"), ("unk_token", "unknown"), ("pad_token", "padding")];
    const TEMPLATE: &str = "tokenizer.chat_template";
    let mut config = Map::new();
    config.insert("tokenizer_class".to_owned(), "PreTrainedTokenizerFast".into());
    config.insert("clean_up_tokenization_spaces".to_owned(), false.into());
    let tokens = match file.metadata.get("tokenizer.ggml.tokens") {
        Some(Value::Texts(tokens)) => tokens.as_slice(),
        _ => &[],
    };
    for (name, key) in NAMES {
        if let Some(token) = token_id(file, key)?.and_then(|id| tokens.get(id as usize)) {
            config.insert(name.to_owned(), token.as_str().into());
        }
    }
    let default = text(file, TEMPLATE)?;
    let tools = text(file, &format!("{TEMPLATE}.tool_use"))?;
    let named = |name: &str, template: &str| json!({"name": name, "template": template});
    let template = match (default, tools) {
        (None, None) => return Ok(config),
        (Some(default), None) => default.into(),
        (default, tools) => {
            let default = default.map(|template| named("default", template));
            let tools = tools.map(|template| named("tool_use", template));
            Json::Array(default.into_iter().chain(tools).collect())
        }
    };
    config.insert("chat_template".to_owned(), template);
    Ok(config)
}

/// Returns the text of a key.
fn text<'a>(file: &'a GgufFile, key: &str) -> Result<Option<&'a str>> {
    match file.metadata.get(key) {
        None => Ok(None),
        Some(Value::Text(text)) => Ok(Some(text)),
        Some(_) => Err(field(&file.path, key, "is no text")),
    }
}

/// The tokens of a file, with their kinds.
struct Tokens<'a> {
    file: &'a GgufFile,
    texts: &'a [String],
    /// A kind for each token.
    kinds: Vec<i64>,
}

impl<'a> Tokens<'a> {
    fn of(file: &'a GgufFile) -> Result<Tokens<'a>> {
        let refuse = |key: &str, problem: &str| Err(refused(file, key, problem));
        let texts = match file.metadata.get("tokenizer.ggml.tokens") {
            Some(Value::Texts(texts)) => texts.as_slice(),
            _ => return refuse("tokens", "is missing, or no list of texts"),
        };
        let kinds = match file.metadata.get("tokenizer.ggml.token_type") {
            None => vec![NORMAL; texts.len()],
            Some(Value::Integers(kinds)) if kinds.len() == texts.len() => kinds.clone(),
            Some(_) => return refuse("token_type", "has not an integer for each token"),
        };
        let tokens = Tokens { file, texts, kinds };
        let mut seen = HashMap::new();
        let again = tokens.used().find(|(id, text, _)| seen.insert(*text, *id).is_some());
        match again {
            None => Ok(tokens),
            Some((id, text, _)) => refuse("tokens", &format!("has {text:?} twice, the second time as {id}")),
        }
    }

    fn refuse(&self, key: &str, problem: &str) -> Error {
        refused(self.file, key, problem)
    }

    /// Tokens that a text may have: id, text and kind.
    fn used(&self) -> impl Iterator<Item = (usize, &'a str, i64)> + '_ {
        let all = self.texts.iter().zip(&self.kinds).enumerate();
        all.map(|(id, (text, kind))| (id, text.as_str(), *kind)).filter(|(_, _, kind)| *kind != UNUSED)
    }

    fn vocabulary(&self) -> Map<String, Json> {
        self.used().map(|(id, text, _)| (text.to_owned(), id.into())).collect()
    }

    /// A tokenizer of bytes, as GPT-2's.
    fn of_bytes(&self) -> Result<Json> {
        let bytes = |use_regex: bool| json!({"type": "ByteLevel", "add_prefix_space": false, "trim_offsets": true, "use_regex": use_regex});
        let in_order = |first: Json, last: Json| json!({"type": "Sequence", "pretokenizers": [first, last]});
        let split = |pattern: &str| json!({"type": "Split", "pattern": {"Regex": pattern}, "behavior": "Isolated", "invert": false});
        let pre = text(self.file, "tokenizer.ggml.pre")?;
        let (words, is_of_llama3, normalizer) = match pre {
            Some("gpt-2") => (bytes(true), false, Json::Null),
            Some("smollm") => (
                in_order(json!({"type": "Digits", "individual_digits": true}), bytes(true)),
                false,
                Json::Null,
            ),
            Some("llama-bpe" | "llama3" | "llama-v3") => {
                (in_order(split(LLAMA3), bytes(false)), true, Json::Null)
            }
            Some("qwen2" | "deepseek-r1-qwen") => {
                (in_order(split(QWEN2), bytes(false)), false, json!({"type": "NFC"}))
            }
            other => {
                let found = other.map_or_else(|| "missing".to_owned(), |pre| format!("`{pre}`"));
                return Err(
                    self.refuse("pre", &format!("is {found}, must be gpt-2, smollm, llama-bpe or qwen2"))
                );
            }
        };
        let merges = match self.file.metadata.get("tokenizer.ggml.merges") {
            Some(Value::Texts(merges)) => merges,
            _ => return Err(self.refuse("merges", "is missing, or no list of texts")),
        };
        let model = json!({"ignore_merges": is_of_llama3, "vocab": self.vocabulary(), "merges": merges});
        self.whole(
            model,
            json!({"normalizer": normalizer, "pre_tokenizer": words, "decoder": bytes(true)}),
            is_of_llama3,
        )
    }

    /// A tokenizer of SentencePiece's kind BPE, whose file has scores in place of merges.
    fn of_sentence_pieces(&self) -> Result<Json> {
        if self.flag("remove_extra_whitespaces")? == Some(true) {
            return Err(self.refuse("remove_extra_whitespaces", "is true, which is not supported"));
        }
        let scores = match self.file.metadata.get("tokenizer.ggml.scores") {
            Some(Value::Numbers(scores)) if scores.len() == self.texts.len() => scores,
            _ => return Err(self.refuse("scores", "has not a number for each token")),
        };
        let unknown = self.used().find(|(.., kind)| *kind == UNKNOWN).map(|(_, text, _)| text);
        let replace =
            |from: &str, to: &str| json!({"type": "Replace", "pattern": {"String": from}, "content": to});
        let is_prefixed = self.flag("add_space_prefix")?.unwrap_or(true);
        let prefix = is_prefixed.then(|| json!({"type": "Prepend", "prepend": "▁"}));
        let normalizers: Vec<Json> = prefix.into_iter().chain([replace(" ", "▁")]).collect();
        let mut decoders = vec![replace("▁", " "), json!({"type": "ByteFallback"}), json!({"type": "Fuse"})];
        if is_prefixed {
            decoders.push(json!({"type": "Strip", "content": " ", "start": 1, "stop": 0}));
        }
        let model = json!({
            "unk_token": unknown,
            "fuse_unk": true,
            "byte_fallback": true,
            "vocab": self.vocabulary(),
            "merges": self.merges(scores),
        });
        let around = json!({
            "normalizer": {"type": "Sequence", "normalizers": normalizers},
            "pre_tokenizer": null,
            "decoder": {"type": "Sequence", "decoders": decoders},
        });
        self.whole(model, around, true)
    }

    /// Merges that the scores mean: each cut of a token into two tokens, the best score first, then the longest
    /// first part, as `transformers` derives them.
    fn merges(&self, scores: &[f32]) -> Vec<[&'a str; 2]> {
        let is_text = |kind: i64| matches!(kind, NORMAL | USER_DEFINED);
        let ids: HashMap<&str, usize> =
            self.used().filter(|(.., kind)| is_text(*kind)).map(|(id, text, _)| (text, id)).collect();
        let mut found = Vec::new();
        for (id, text, _) in self.used().filter(|(.., kind)| is_text(*kind)) {
            let cuts = text.char_indices().skip(1).map(|(at, _)| text.split_at(at));
            let mut cuts: Vec<_> = cuts
                .filter_map(|(left, right)| Some(((*ids.get(left)?, *ids.get(right)?), left, right)))
                .collect();
            cuts.sort_unstable_by_key(|(ids, ..)| *ids);
            found.extend(cuts.into_iter().map(|(_, left, right)| (scores[id], left, right)));
        }
        let length = |text: &str| text.chars().count();
        found.sort_by(|(score, left, right), (other, first, second)| {
            let lengths = (length(first), length(second)).cmp(&(length(left), length(right)));
            other.total_cmp(score).then(lengths)
        });
        found.into_iter().map(|(_, left, right)| [left, right]).collect()
    }

    /// Joins a model with its normalizer, splitter and decoder, the added tokens, and the tokens around a text.
    fn whole(&self, model: Json, around: Json, adds_bos: bool) -> Result<Json> {
        let added = |(id, text, kind): (usize, &str, i64)| {
            let special = matches!(kind, CONTROL | UNKNOWN);
            let flags = json!({"single_word": false, "lstrip": false, "rstrip": false, "normalized": false});
            let mut token = json!({"id": id, "content": text, "special": special});
            extend(&mut token, flags);
            (special || kind == USER_DEFINED).then_some(token)
        };
        let mut whole = json!({
            "version": "1.0",
            "truncation": null,
            "padding": null,
            "added_tokens": self.used().filter_map(added).collect::<Vec<_>>(),
            "post_processor": self.around_texts(adds_bos)?,
            "model": {
                "type": "BPE",
                "dropout": null,
                "unk_token": null,
                "continuing_subword_prefix": null,
                "end_of_word_suffix": null,
                "fuse_unk": false,
                "byte_fallback": false,
                "ignore_merges": false,
            },
        });
        extend(&mut whole["model"], model);
        extend(&mut whole, around);
        Ok(whole)
    }

    /// Returns the step that puts the first and the last token around a text, if the file asks for one.
    fn around_texts(&self, adds_bos: bool) -> Result<Json> {
        let token = |flag: &str, silent: bool, name: &str| -> Result<Option<(i64, &str)>> {
            if !self.flag(flag)?.unwrap_or(silent) {
                return Ok(None);
            }
            let found = token_id(self.file, name)?;
            let found = found.and_then(|id| Some((id, self.texts.get(id as usize)?.as_str())));
            found
                .map(Some)
                .ok_or_else(|| self.refuse(&format!("{name}_token_id"), "is no token, but is added to texts"))
        };
        let (first, last) = (token("add_bos_token", adds_bos, "bos")?, token("add_eos_token", false, "eos")?);
        if first.is_none() && last.is_none() {
            return Ok(Json::Null);
        }
        let placed = |token: Option<(i64, &str)>| {
            token.map(|(_, text)| json!({"SpecialToken": {"id": text, "type_id": 0}}))
        };
        let sequence = |name: &str| {
            let text = json!({"Sequence": {"id": name, "type_id": 0}});
            placed(first).into_iter().chain([text]).chain(placed(last)).collect::<Vec<_>>()
        };
        let pair = [sequence("A"), sequence("B")].concat();
        let tokens = [first, last].into_iter().flatten();
        let tokens: Map<String, Json> = tokens
            .map(|(id, text)| (text.to_owned(), json!({"id": text, "ids": [id], "tokens": [text]})))
            .collect();
        Ok(json!({
            "type": "TemplateProcessing",
            "single": sequence("A"),
            "pair": pair,
            "special_tokens": tokens,
        }))
    }

    fn flag(&self, name: &str) -> Result<Option<bool>> {
        match self.file.metadata.get(&format!("tokenizer.ggml.{name}")) {
            None => Ok(None),
            Some(Value::Bool(flag)) => Ok(Some(*flag)),
            Some(_) => Err(self.refuse(name, "is neither true nor false")),
        }
    }
}

fn refused(file: &GgufFile, key: &str, problem: &str) -> Error {
    field(&file.path, format!("tokenizer.ggml.{key}"), format!("{problem}: {MEND}"))
}

/// Adds the fields of an object to another.
fn extend(object: &mut Json, fields: Json) {
    if let (Some(object), Json::Object(fields)) = (object.as_object_mut(), fields) {
        object.extend(fields);
    }
}

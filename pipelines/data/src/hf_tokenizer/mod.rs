//! Tokenizer of a published model's folder: `tokenizer.json`, with the special tokens and the chat template
//! of other files.

mod clip;

use std::fs;
use std::path::{Path, PathBuf};

use anyroll_models::hf::{self, PublishedFiles, is_lfs_pointer};
use serde_json::{Map, Value, json};
use tokenizers::AddedToken;

use super::chat_template::{ChatTemplate, Conversation};
use super::panics::caught;
use super::token_bytes::{Pieces, TokenBytes};
use super::{Record, UnknownCharacter, steps};

/// A published model's tokenizer with its chat template.
#[derive(Debug)]
pub struct HfTokenizer {
    path: PathBuf,
    /// The file with the tokens.
    file: PathBuf,
    tokenizer: tokenizers::Tokenizer,
    /// The file with the chat template.
    template_file: PathBuf,
    template: Option<ChatTemplate>,
    /// Template for conversations with tools, if there is a separate one.
    tool_template: Option<ChatTemplate>,
    eos: Option<i64>,
    pad: Option<i64>,
    max_length: Option<usize>,
    /// Tokens that stand for pictures and sound.
    other_media: Vec<String>,
}

/// An error of a tokenizer, or of a text that it cannot encode.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum TokenizerError {
    /// A file is missing or cannot be read.
    #[error("cannot read {}", path.display())]
    Read {
        /// The file.
        path: PathBuf,
        /// Cause.
        source: std::io::Error,
    },
    /// A file is invalid.
    #[error("{} is invalid: {problem}", path.display())]
    Broken {
        /// The file.
        path: PathBuf,
        /// The problem.
        problem: String,
    },
    /// The model's folder or GGUF file cannot be read.
    #[error(transparent)]
    Model(#[from] hf::Error),
    /// The folder has the pieces in an unsupported format.
    #[error(
        "{} has a {pieces} but no tokenizer.json, which is required: create it with \
         `AutoTokenizer.from_pretrained(FOLDER).save_pretrained(FOLDER)` of transformers", path.display()
    )]
    SentencePiece {
        /// The folder.
        path: PathBuf,
        /// Name of the file with the pieces.
        pieces: &'static str,
    },
    /// The model has no chat template.
    #[error(
        "{} has no chat template: give texts instead of messages, set `model.chat: false`, or leave out `--chat`",
        path.display()
    )]
    NoTemplate {
        /// The model's folder.
        path: PathBuf,
    },
    /// The chat template has no place for a message after one of the assistant's.
    #[error(
        "the chat template of {} ends the assistant's message with no token that ends a completion, or omits a message \
         of the role `{role}`",
        path.display()
    )]
    NoTurnEnd {
        /// The model's folder.
        path: PathBuf,
        /// Role of that message.
        role: String,
    },
    /// A record's prompt is messages, but the model does not use a chat template.
    #[error(
        "the prompt of {record} is messages, which need a model with a chat template and `model.chat: true`, or `--chat`"
    )]
    Messages {
        /// The record.
        record: String,
    },
    /// The chat template renders one of the assistant's messages differently from the model's output.
    #[error(
        "message {message} of {record} is rendered by the chat template differently from the model's output, and cannot be \
         trained on: write `turns: last`, or remove the record"
    )]
    Turn {
        /// The record.
        record: String,
        /// Number of the message, from 1.
        message: usize,
    },
    /// No file names a token that ends a completion.
    #[error("{} names no eos_token_id in generation_config.json or config.json", path.display())]
    NoStop {
        /// The model's folder.
        path: PathBuf,
    },
    /// The token that ends a completion is not in the model's vocabulary.
    #[error(
        "{} names {token} as eos_token_id in generation_config.json or config.json, but the model has tokens from 0 to {}",
        path.display(), vocab_size - 1
    )]
    NoSuchStop {
        /// The model's folder.
        path: PathBuf,
        /// The token.
        token: i64,
        /// Size of the vocabulary.
        vocab_size: i64,
    },
    /// A record has a character outside the vocabulary.
    #[error(transparent)]
    Character(#[from] UnknownCharacter),
    /// The chat template is not valid Jinja, or too large.
    #[error("the chat template in {} cannot be read", path.display())]
    TemplateSyntax {
        /// The file with the template.
        path: PathBuf,
        /// The line and the problem.
        source: minijinja::Error,
    },
    /// A token has no row in the model's embedding.
    #[error(
        "{} has token {token}, `{text}`, but the model's embedding has only {vocab_size} rows: resize the embedding, or \
         remove the token", path.display()
    )]
    NoRow {
        /// The file with the tokens.
        path: PathBuf,
        /// The token.
        token: i64,
        /// Its text.
        text: String,
        /// Rows of the embedding.
        vocab_size: i64,
    },
    /// A file is not fetched yet.
    #[error("{} is a Git LFS pointer, not the file itself: fetch it with `git lfs pull`", path.display())]
    Pointer {
        /// The file.
        path: PathBuf,
    },
    /// The chat template refuses the messages, or a render exceeds its bounds.
    #[error("the chat template in {} refuses the messages", path.display())]
    Template {
        /// The file with the template.
        path: PathBuf,
        /// The exception that it raised.
        source: minijinja::Error,
    },
    /// The text between steps has no token, at which a step could be scored.
    #[error("{} gives the step separator {separator:?} no token: choose another `step_separator`", path.display())]
    NoSeparator {
        /// The file with the tokens.
        path: PathBuf,
        /// The text.
        separator: String,
    },
    /// The tokenizer fails on a text or on tokens.
    #[error("the tokenizer of {} failed: {problem}", path.display())]
    Tokenize {
        /// The file with the tokens.
        path: PathBuf,
        /// Cause.
        problem: String,
    },
}

/// Names of tokens that stand for other media than text.
const OTHER_MEDIA: [&str; 3] = ["image_token", "audio_token", "video_token"];

/// Special tokens that chat templates use by these names.
const SPECIAL_TOKENS: [&str; 4] = ["bos_token", "eos_token", "unk_token", "pad_token"];

impl HfTokenizer {
    /// Reads `tokenizer.json`, `tokenizer_config.json` and `chat_template.jinja` or `.json` in the folder `path`; only the
    /// first is required. A GGUF file's metadata means the first two.
    ///
    /// # Errors
    /// The file that cannot be used, with the cause.
    pub fn open(path: &Path) -> Result<HfTokenizer, TokenizerError> {
        let files = PublishedFiles::open(path)?;
        let has = |name: &&str| files.has(name);
        let pieces = ["spiece.model", "tokenizer.model"].into_iter().find(has);
        if let Some(pieces) = pieces.filter(|_| !files.has("tokenizer.json")) {
            return Err(TokenizerError::SentencePiece { path: path.to_owned(), pieces });
        }
        let config = optional_json(&files, "tokenizer_config.json")?;
        Self::of(&files, &config, &files.read("tokenizer.json")?, files.place("tokenizer.json"))
    }

    /// [`Self::open`] for the folder of a CLIP, which may have `vocab.json` and `merges.txt` instead of
    /// `tokenizer.json`.
    ///
    /// # Errors
    /// The file that cannot be used, with the cause.
    pub fn open_clip(path: &Path) -> Result<HfTokenizer, TokenizerError> {
        let (whole, vocab) = (path.join("tokenizer.json"), path.join("vocab.json"));
        if whole.exists() || !vocab.exists() {
            return Self::open(path);
        }
        let files = PublishedFiles::open(path)?;
        let config = optional_json(&files, "tokenizer_config.json")?;
        let made = clip::tokenizer_json(path, &config)?;
        let made = serde_json::to_vec(&made).expect("plain data");
        Self::of(&files, &config, &made, vocab)
    }

    /// Creates a tokenizer from `tokenizer`, the content of `file` in the format of `tokenizer.json`, and
    /// `config`. The chat template may be one of `files`.
    fn of(
        files: &PublishedFiles,
        config: &Map<String, Value>,
        tokenizer: &[u8],
        file: PathBuf,
    ) -> Result<HfTokenizer, TokenizerError> {
        let broken = |error: tokenizers::Error| {
            let problem = error.to_string();
            TokenizerError::Broken { path: file.clone(), problem }
        };
        let loaded = caught(|| loaded(tokenizer, config)).unwrap_or_else(|panic| Err(panic.into()));
        let tokenizer = loaded.map_err(broken)?;
        let mut special_tokens = Map::new();
        for name in SPECIAL_TOKENS {
            if let Some(token) = config.get(name).and_then(token_text) {
                special_tokens.insert(name.to_owned(), token.into());
            }
        }
        let id_of = |name: &str| {
            let token = special_tokens.get(name).and_then(Value::as_str)?;
            tokenizer.token_to_id(token).map(i64::from)
        };
        let (eos, pad) = (id_of("eos_token"), id_of("pad_token"));
        // A number out of range means that there is no limit.
        let max_length = config.get("model_max_length").and_then(Value::as_u64).map(|most| most as usize);
        let name = |name: &str| files.place(name);
        let (template_file, source, tool_source) = match files.has("chat_template.jinja") {
            true => {
                let source = String::from_utf8_lossy(&files.read("chat_template.jinja")?).into_owned();
                (name("chat_template.jinja"), Some(source), None)
            }
            false => {
                // A processor's file, of models that read pictures too.
                let file = optional_json(files, "chat_template.json")?;
                let is_there = file.contains_key("chat_template");
                let (config, name) = match is_there {
                    true => (&file, name("chat_template.json")),
                    false => (config, name("tokenizer_config.json")),
                };
                (name, template_of(config, "default"), template_of(config, "tool_use"))
            }
        };
        let compiled = |source: Option<String>| {
            let template = source.map(|source| ChatTemplate::new(source, special_tokens.clone())).transpose();
            template.map_err(|source| TokenizerError::TemplateSyntax { path: template_file.clone(), source })
        };
        let (template, tool_template) = (compiled(source)?, compiled(tool_source)?);
        let others = OTHER_MEDIA.iter().filter_map(|name| token_text(config.get(*name)?));
        let other_media = others.map(str::to_owned).collect();
        let path = files.path().to_owned();
        Ok(HfTokenizer {
            path,
            file,
            tokenizer,
            template_file,
            template,
            tool_template,
            eos,
            pad,
            max_length,
            other_media,
        })
    }

    /// Checks that each token has a row in an embedding of `vocab_size` rows. Tokens of pictures and sound have
    /// none in models of text alone.
    ///
    /// # Errors
    /// [`TokenizerError::NoRow`].
    pub fn fits(&self, vocab_size: i64) -> Result<(), TokenizerError> {
        let has_no_row =
            |(text, token): &(String, i64)| *token >= vocab_size && !self.other_media.contains(text);
        match self.vocabulary().into_iter().find(has_no_row) {
            None => Ok(()),
            Some((text, token)) => {
                Err(TokenizerError::NoRow { path: self.file.clone(), token, text, vocab_size })
            }
        }
    }

    /// Returns true if there is a chat template, so that messages can be encoded.
    pub fn has_chat_template(&self) -> bool {
        self.template.is_some()
    }

    /// The token that ends a text, if `tokenizer_config.json` names one.
    pub fn eos(&self) -> Option<i64> {
        self.eos
    }

    /// The padding token, if `tokenizer_config.json` names one.
    pub fn pad(&self) -> Option<i64> {
        self.pad
    }

    /// The most tokens of a text, if `tokenizer_config.json` has a limit.
    pub fn max_length(&self) -> Option<usize> {
        self.max_length
    }

    /// Number of tokens, including added ones.
    pub fn vocab_size(&self) -> usize {
        self.tokenizer.get_vocab_size(true)
    }

    /// Every token with its text, including added ones, sorted by id.
    pub fn vocabulary(&self) -> Vec<(String, i64)> {
        let all = self.tokenizer.get_vocab(true).into_iter();
        let mut all: Vec<_> = all.map(|(text, token)| (text, i64::from(token))).collect();
        all.sort_unstable_by_key(|(_, token)| *token);
        all
    }

    /// Content of every token, indexed by id; an unused id has an empty text.
    ///
    /// # Errors
    /// The reason why the bytes of tokens are unknown.
    pub(super) fn token_bytes(&self) -> Result<Vec<TokenBytes>, String> {
        let decoder =
            serde_json::to_value(self.tokenizer.get_decoder()).map_err(|error| error.to_string())?;
        let pieces = Pieces::of(&decoder)?;
        let added = self.tokenizer.get_added_tokens_decoder();
        let vocabulary = self.vocabulary();
        let count = vocabulary.last().map_or(0, |(_, last)| *last as usize + 1);
        let mut all = vec![TokenBytes::Text(Vec::new()); count];
        for (text, token) in vocabulary {
            all[token as usize] = match added.get(&(token as u32)) {
                Some(token) if token.special => TokenBytes::Special(text),
                Some(_) => TokenBytes::Text(text.into_bytes()),
                None => TokenBytes::Text(pieces.bytes(&text).unwrap_or_default()),
            };
        }
        Ok(all)
    }

    /// The token with this text.
    pub fn token(&self, text: &str) -> Option<i64> {
        self.tokenizer.token_to_id(text).map(i64::from)
    }

    /// The special token with this text.
    pub fn special_token(&self, text: &str) -> Option<i64> {
        let is_special = |id: &u32| {
            let added = self.tokenizer.get_added_tokens_decoder();
            added.get(id).is_some_and(|token| token.special)
        };
        self.tokenizer.token_to_id(text).filter(is_special).map(i64::from)
    }

    /// Returns true if the text contains a special token, as one in a chat template does.
    pub fn has_special_token(&self, text: &str) -> bool {
        let added = self.tokenizer.get_added_tokens_decoder();
        added.values().any(|token| token.special && text.contains(&token.content))
    }

    /// Encodes a text; with `special`, adds the tokens that the tokenizer puts around every text.
    pub fn encode(&self, text: &str, special: bool) -> Result<Vec<i64>, TokenizerError> {
        let encoding = caught(|| self.tokenizer.encode_fast(text, special));
        let encoding =
            encoding.unwrap_or_else(|panic| Err(panic.into())).map_err(|error| self.failed(&*error))?;
        Ok(encoding.get_ids().iter().copied().map(i64::from).collect())
    }

    /// Encodes a text with the tokens around it, truncated to `most` tokens that end with `end`. Returns true
    /// if it was truncated.
    pub fn encode_ending(
        &self,
        text: &str,
        most: usize,
        end: i64,
    ) -> Result<(Vec<i64>, bool), TokenizerError> {
        let mut tokens = self.encode(text, true)?;
        let is_cut = tokens.len() > most;
        tokens.truncate(most);
        if tokens.last() != Some(&end) {
            tokens.truncate(most - 1);
            tokens.push(end);
        }
        Ok((tokens, is_cut))
    }

    /// Encodes a record's prompt with a completion for a reward model. With `chat` that is the conversation
    /// in the chat template, else both texts and, if the completion is `finished`, the end token.
    pub fn encode_whole(
        &self,
        record: &Record,
        completion: &str,
        chat: bool,
        finished: bool,
    ) -> Result<Vec<i64>, TokenizerError> {
        if chat {
            let mut messages = record.conversation();
            messages.push(json!({"role": "assistant", "content": completion}));
            let conversation =
                Conversation { messages: &messages, tools: None, add_generation_prompt: false };
            return self.encode_chat(conversation, &Map::new());
        }
        let mut tokens = self.encode(&format!("{}{completion}", record.prompt), true)?;
        tokens.extend(self.eos().filter(|_| finished));
        Ok(tokens)
    }

    /// Encodes a record's prompt and a `completion` for a process reward model: the prompt, with `chat` in the chat
    /// template, then each step with `separator` after it. Returns the tokens, and for each step their number up to
    /// the end of its separator. A blank part between separators is no step.
    pub fn encode_in_steps(
        &self,
        record: &Record,
        completion: &str,
        separator: &str,
        chat: bool,
    ) -> Result<(Vec<i64>, Vec<usize>), TokenizerError> {
        let parts = steps::parts(completion, separator);
        let (tokens, ends) = self.encode_parts(record, &parts, separator, chat)?;
        let of_steps = parts.iter().zip(ends).filter(|(part, _)| !steps::is_blank(part));
        Ok((tokens, of_steps.map(|(_, end)| end).collect()))
    }

    /// [`Self::encode_in_steps`] for parts that are divided already. Every text is encoded by itself, as in TRL.
    pub(super) fn encode_parts(
        &self,
        record: &Record,
        parts: &[&str],
        separator: &str,
        chat: bool,
    ) -> Result<(Vec<i64>, Vec<usize>), TokenizerError> {
        let mut tokens = if chat {
            let messages = record.conversation();
            let conversation = Conversation { messages: &messages, tools: None, add_generation_prompt: true };
            self.encode_chat(conversation, &Map::new())?
        } else {
            self.encode(&record.prompt, true)?
        };
        let after = self.encode(separator, false)?;
        if after.is_empty() {
            let separator = separator.to_owned();
            return Err(TokenizerError::NoSeparator { path: self.file.clone(), separator });
        }
        let mut ends = Vec::with_capacity(parts.len());
        for part in parts {
            tokens.extend(self.encode(part, false)?);
            tokens.extend(&after);
            ends.push(tokens.len());
        }
        Ok((tokens, ends))
    }

    /// Encodes a conversation.
    pub fn encode_chat(
        &self,
        conversation: Conversation,
        variables: &Map<String, Value>,
    ) -> Result<Vec<i64>, TokenizerError> {
        // The rendered text already contains the special tokens.
        self.encode(&self.render_chat(conversation, variables)?, false)
    }

    /// Renders a conversation.
    pub fn render_chat(
        &self,
        conversation: Conversation,
        variables: &Map<String, Value>,
    ) -> Result<String, TokenizerError> {
        let for_tools = self.tool_template.as_ref().filter(|_| conversation.tools.is_some());
        let Some(template) = for_tools.or(self.template.as_ref()) else {
            return Err(TokenizerError::NoTemplate { path: self.path.clone() });
        };
        template
            .render(conversation, variables)
            .map_err(|source| TokenizerError::Template { path: self.template_file.clone(), source })
    }

    /// Decodes tokens, without special ones. Tokens unknown to the tokenizer have no text, since a model's
    /// vocabulary may be larger.
    pub fn decode(&self, tokens: &[i64]) -> Result<String, TokenizerError> {
        let ids: Vec<u32> = tokens.iter().filter_map(|&token| u32::try_from(token).ok()).collect();
        let text = caught(|| self.tokenizer.decode(&ids, true));
        text.unwrap_or_else(|panic| Err(panic.into())).map_err(|error| self.failed(&*error))
    }

    fn failed(&self, error: &dyn std::error::Error) -> TokenizerError {
        TokenizerError::Tokenize { path: self.file.clone(), problem: error.to_string() }
    }
}

/// Reads the content of a `tokenizer.json`, with the tokens that only `config` names.
fn loaded(content: &[u8], config: &Map<String, Value>) -> Result<tokenizers::Tokenizer, tokenizers::Error> {
    let mut tokenizer = tokenizers::Tokenizer::from_bytes(content)?;
    // Files keep the settings of the tokenizer's last use, which `transformers` resets as well.
    tokenizer.with_padding(None).with_truncation(None)?;
    for token in named_tokens(config) {
        if tokenizer.token_to_id(&token.content).is_none() {
            tokenizer.add_tokens([token])?;
        }
    }
    Ok(tokenizer)
}

/// Text of a token written as a string, or as an object with further fields.
fn token_text(token: &Value) -> Option<&str> {
    token.get("content").unwrap_or(token).as_str()
}

/// Tokens named in a `tokenizer_config.json`. Those that `tokenizer.json` lacks are appended in the order of
/// transformers: numbered ones by id, then special ones in this order.
fn named_tokens(config: &Map<String, Value>) -> Vec<AddedToken> {
    const NAMED: [&str; 7] =
        ["bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token"];
    const LISTED: [&str; 2] = ["additional_special_tokens", "extra_special_tokens"];
    let numbered = config.get("added_tokens_decoder").and_then(Value::as_object).into_iter().flatten();
    let numbered = numbered.filter_map(|(id, token)| Some((id.parse::<u32>().ok()?, token)));
    let mut numbered: Vec<(u32, &Value)> = numbered.collect();
    numbered.sort_unstable_by_key(|(id, _)| *id);
    let numbered = numbered.into_iter().filter_map(|(_, token)| added_token(token, false));
    let named = NAMED.iter().filter_map(|name| config.get(*name));
    let listed = LISTED.iter().filter_map(|name| config.get(*name)?.as_array()).flatten();
    numbered.chain(named.chain(listed).filter_map(|token| added_token(token, true))).collect()
}

/// Reads a token written as a string, or as an object with further fields.
fn added_token(token: &Value, special: bool) -> Option<AddedToken> {
    let says = |name: &str| token.get(name).and_then(Value::as_bool);
    let content = token.get("content").unwrap_or(token).as_str()?;
    let mut added = AddedToken::from(content, says("special").unwrap_or(special));
    added.single_word = says("single_word").unwrap_or(added.single_word);
    added.lstrip = says("lstrip").unwrap_or(added.lstrip);
    added.rstrip = says("rstrip").unwrap_or(added.rstrip);
    added.normalized = says("normalized").unwrap_or(added.normalized);
    Some(added)
}

/// A template of a `tokenizer_config.json`: a single string is the default, in a list each has a name.
fn template_of(config: &Map<String, Value>, name: &str) -> Option<String> {
    let template = match config.get("chat_template")? {
        Value::Array(named) => named.iter().find(|entry| entry["name"] == name)?.get("template")?,
        template => Some(template).filter(|_| name == "default")?,
    };
    template.as_str().map(str::to_owned)
}

fn optional_json(files: &PublishedFiles, name: &str) -> Result<Map<String, Value>, TokenizerError> {
    if !files.has(name) {
        return Ok(Map::new());
    }
    serde_json::from_slice(&files.read(name)?).map_err(|error| {
        let (path, problem) = (files.place(name), error.to_string());
        TokenizerError::Broken { path, problem }
    })
}

pub(super) fn read(path: &Path) -> Result<Vec<u8>, TokenizerError> {
    let content = fs::read(path).map_err(|source| TokenizerError::Read { path: path.to_owned(), source })?;
    if is_lfs_pointer(&content) {
        return Err(TokenizerError::Pointer { path: path.to_owned() });
    }
    Ok(content)
}

#[cfg(test)]
mod tests;

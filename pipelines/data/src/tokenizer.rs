//! The tokenizer of a model, with the encoding of records.

use std::ops::Range;

use anyroll_config::{FolderConfig, Speaker};
use anyroll_models::hf::ModelFolder;
use serde_json::{Map, Value, json};

use super::chat_template::Conversation;
use super::{CharTokenizer, HfTokenizer, Record, TokenBytes, TokenizerError};

/// Encodes records and decodes completions.
#[derive(Debug)]
pub enum Tokenizer {
    /// One token per character of the training records.
    Characters(CharTokenizer),
    /// Tokenizer of a published model's folder.
    Folder(Box<FolderTokenizer>),
}

/// A published model's tokenizer, with its options for prompts.
#[derive(Debug)]
pub struct FolderTokenizer {
    tokenizer: HfTokenizer,
    stop_tokens: Vec<i64>,
    config: FolderConfig,
}

impl Tokenizer {
    /// Opens the tokenizer of a model's folder.
    ///
    /// # Errors
    /// The file that cannot be used, or a missing chat template that the config asks for.
    pub fn of_folder(folder: &ModelFolder, config: &FolderConfig) -> Result<Tokenizer, TokenizerError> {
        let tokenizer = HfTokenizer::open(folder.path())?;
        if config.chat && !tokenizer.has_chat_template() {
            return Err(TokenizerError::NoTemplate { path: folder.path().to_owned() });
        }
        let path = || folder.path().to_owned();
        let vocab_size = folder.decoder_config().vocab_size;
        tokenizer.fits(vocab_size)?;
        let is_there = |token: &i64| (0..vocab_size).contains(token);
        let mut stop_tokens = folder.stop_tokens().to_vec();
        if let Some(&token) = stop_tokens.iter().find(|token| !is_there(token)) {
            return Err(TokenizerError::NoSuchStop { path: path(), token, vocab_size });
        }
        // Chat models end a turn with a token that `generation_config.json` may leave out.
        stop_tokens.extend(tokenizer.eos().filter(|eos| is_there(eos) && !stop_tokens.contains(eos)));
        if stop_tokens.is_empty() {
            return Err(TokenizerError::NoStop { path: path() });
        }
        Ok(Tokenizer::Folder(Box::new(FolderTokenizer { tokenizer, stop_tokens, config: config.clone() })))
    }

    /// Every token with its text.
    pub fn vocabulary(&self) -> Box<dyn Iterator<Item = (String, i64)> + '_> {
        match self {
            Tokenizer::Characters(tokenizer) => Box::new(tokenizer.vocabulary()),
            Tokenizer::Folder(folder) => Box::new(folder.tokenizer.vocabulary().into_iter()),
        }
    }

    /// Content of every token, indexed by id. Tokens that end a completion count as special, whatever their
    /// text is.
    ///
    /// # Errors
    /// The reason why the bytes of tokens are unknown.
    pub fn token_bytes(&self) -> Result<Vec<TokenBytes>, String> {
        let mut all = match self {
            Tokenizer::Characters(tokenizer) => tokenizer.token_bytes(),
            Tokenizer::Folder(folder) => folder.tokenizer.token_bytes()?,
        };
        for stop in self.stop_tokens() {
            if let Some(token @ TokenBytes::Text(_)) = all.get_mut(stop as usize) {
                *token = TokenBytes::Special(format!("end {stop}"));
            }
        }
        Ok(all)
    }

    /// Tokens that end a completion; gold answers end with the first.
    pub fn stop_tokens(&self) -> Vec<i64> {
        match self {
            Tokenizer::Characters(tokenizer) => vec![tokenizer.eos()],
            Tokenizer::Folder(folder) => folder.stop_tokens.clone(),
        }
    }

    /// Encodes a record's prompt; a plain text without a prompt has no tokens.
    pub fn encode_prompt(&self, record: &Record) -> Result<Vec<i64>, TokenizerError> {
        if record.is_text() {
            return Ok(Vec::new());
        }
        match self {
            Tokenizer::Characters(_) if !record.messages.is_empty() => {
                Err(TokenizerError::Messages { record: record.id.clone() })
            }
            Tokenizer::Characters(tokenizer) => Ok(tokenizer.encode_prompt(record)?),
            Tokenizer::Folder(folder) => folder.encode_prompt(record),
        }
    }

    /// Encodes a text without a chat template.
    pub fn encode_text(&self, text: &str) -> Result<Vec<i64>, TokenizerError> {
        match self {
            Tokenizer::Characters(tokenizer) => {
                let (id, prompt) = ("text".to_owned(), text.to_owned());
                Ok(tokenizer.encode_prompt(&Record { id, prompt, ..Record::default() })?)
            }
            Tokenizer::Folder(folder) => folder.tokenizer.encode(text, true),
        }
    }

    /// Encodes a conversation, up to the start of the assistant's next message.
    ///
    /// # Errors
    /// [`TokenizerError::NoTemplate`] without a chat template, or an error of the template.
    pub fn encode_messages(
        &self,
        messages: &[Value],
        tools: Option<&[Value]>,
        variables: &Map<String, Value>,
    ) -> Result<Vec<i64>, TokenizerError> {
        let Tokenizer::Folder(folder) = self else {
            return Err(TokenizerError::NoTemplate { path: "a model of single characters".into() });
        };
        folder.encode_messages(messages, tools, variables)
    }

    /// Returns true if prompts use a chat template.
    pub fn is_of_chat(&self) -> bool {
        matches!(self, Tokenizer::Folder(folder) if folder.config.chat)
    }

    /// Returns true if there is a chat template and prompts stay plain texts.
    pub fn has_unused_template(&self) -> bool {
        matches!(self, Tokenizer::Folder(folder) if !folder.config.chat && folder.tokenizer.has_chat_template())
    }

    /// Role of an environment's observations, unless `asked` sets one.
    pub fn speaker(&self, asked: Option<Speaker>) -> Speaker {
        asked.unwrap_or(if self.is_of_chat() { Speaker::User } else { Speaker::None })
    }

    /// Encodes an observation after a turn whose last token is `last`, up to the start of the next turn. With
    /// a `role` it is a message in the chat template, preceded by the end of the turn if that is missing.
    /// Without one it is plain text.
    ///
    /// # Errors
    /// An unknown character, or a template without a place for it.
    /// A character that the tokenizer does not know, or a template that has no place for it.
    pub fn encode_observation(
        &self,
        text: &str,
        role: Option<&str>,
        last: i64,
    ) -> Result<Vec<i64>, TokenizerError> {
        match (self, role) {
            (Tokenizer::Folder(folder), Some(role)) => folder.encode_message(text, role, last),
            (Tokenizer::Folder(folder), None) => folder.tokenizer.encode(text, false),
            (Tokenizer::Characters(_), _) => self.encode_text(text),
        }
    }

    /// Encodes a record's answer with an end token: a completion with full reward. A text without a prompt
    /// starts with the tokenizer's start token, and an existing end token is not repeated.
    pub fn encode_answer(&self, record: &Record) -> Result<Vec<i64>, TokenizerError> {
        match self {
            Tokenizer::Characters(tokenizer) => Ok(tokenizer.encode_answer(record)?),
            Tokenizer::Folder(folder) if record.is_text() => folder.encode_text(&record.answer),
            Tokenizer::Folder(folder) => folder.encode_answer(&record.answer),
        }
    }

    /// Encodes a record's prompt and answer. Returns the ranges of the assistant's messages with their end
    /// tokens: those in the prompt, then the answer.
    ///
    /// # Errors
    /// Those of [`Self::encode_prompt`], or [`TokenizerError::Turn`].
    pub fn encode_turns(&self, record: &Record) -> Result<(Vec<i64>, Vec<Range<usize>>), TokenizerError> {
        let (mut tokens, answer) = (self.encode_prompt(record)?, self.encode_answer(record)?);
        let mut turns = match self {
            Tokenizer::Characters(_) => Vec::new(),
            Tokenizer::Folder(folder) => folder.turns_of_prompt(record, &tokens)?,
        };
        turns.push(tokens.len()..tokens.len() + answer.len());
        tokens.extend(answer);
        Ok((tokens, turns))
    }

    /// Encodes a record's prompt and answer with their end, in the form that reward models read.
    pub fn encode_whole(&self, record: &Record) -> Result<Vec<i64>, TokenizerError> {
        match self {
            Tokenizer::Characters(_) => {
                Ok([self.encode_prompt(record)?, self.encode_answer(record)?].concat())
            }
            Tokenizer::Folder(folder) => {
                folder.tokenizer.encode_whole(record, &record.answer, folder.config.chat, true)
            }
        }
    }

    /// Encodes a record's prompt and its steps, each with `separator` after it, in the form that process reward models
    /// read. Returns the tokens, and for each step their number up to the end of its separator.
    ///
    /// # Errors
    /// The errors of [`Self::encode_prompt`], or a separator without a token.
    pub fn encode_steps(
        &self,
        record: &Record,
        separator: &str,
    ) -> Result<(Vec<i64>, Vec<usize>), TokenizerError> {
        match self {
            Tokenizer::Characters(_) => {
                let mut tokens = self.encode_prompt(record)?;
                let mut ends = Vec::with_capacity(record.steps.len());
                for step in &record.steps {
                    tokens.extend(self.encode_text(&format!("{}{separator}", step.text))?);
                    ends.push(tokens.len());
                }
                Ok((tokens, ends))
            }
            Tokenizer::Folder(folder) if !record.messages.is_empty() && !folder.config.chat => {
                Err(TokenizerError::Messages { record: record.id.clone() })
            }
            Tokenizer::Folder(folder) => {
                let parts: Vec<&str> = record.steps.iter().map(|step| &*step.text).collect();
                folder.tokenizer.encode_parts(record, &parts, separator, folder.config.chat)
            }
        }
    }

    /// The special token with this text, which [`Self::decode`] omits.
    pub fn special_token(&self, text: &str) -> Option<i64> {
        match self {
            Tokenizer::Characters(_) => None,
            Tokenizer::Folder(folder) => folder.tokenizer.special_token(text),
        }
    }

    /// Decodes tokens; special tokens have no text.
    pub fn decode(&self, tokens: &[i64]) -> String {
        match self {
            Tokenizer::Characters(tokenizer) => tokenizer.decode(tokens),
            Tokenizer::Folder(folder) => {
                folder.tokenizer.decode(tokens).expect("the pieces of known tokens join to a text")
            }
        }
    }
}

impl FolderTokenizer {
    fn encode_prompt(&self, record: &Record) -> Result<Vec<i64>, TokenizerError> {
        let is_text = record.messages.is_empty();
        match (self.config.chat, is_text) {
            (false, true) => return self.tokenizer.encode(&record.prompt, true),
            (false, false) => return Err(TokenizerError::Messages { record: record.id.clone() }),
            (true, _) => {}
        }
        self.encode_messages(&self.conversation(record), None, &Map::new())
    }

    fn encode_messages(
        &self,
        messages: &[Value],
        tools: Option<&[Value]>,
        variables: &Map<String, Value>,
    ) -> Result<Vec<i64>, TokenizerError> {
        let conversation = Conversation { messages, tools, add_generation_prompt: true };
        self.tokenizer.encode_chat(conversation, variables)
    }

    /// Encodes a message after one of the assistant's, in the template's format.
    fn encode_message(&self, text: &str, role: &str, last: i64) -> Result<Vec<i64>, TokenizerError> {
        const TURN: &str = "anyroll's turn";
        let messages = [("user", "?"), ("assistant", TURN), (role, text)];
        let messages = messages.map(|(role, content)| json!({"role": role, "content": content}));
        let conversation = Conversation { messages: &messages, tools: None, add_generation_prompt: true };
        let rendered = self.tokenizer.render_chat(conversation, &Map::new())?;
        let no_end = || TokenizerError::NoTurnEnd { path: self.config.path.clone(), role: role.to_owned() };
        let (_, behind) = rendered
            .split_once(TURN)
            .filter(|(_, behind)| behind.contains(text.trim()))
            .ok_or_else(no_end)?;
        let mut tokens = self.tokenizer.encode(behind, false)?;
        if !tokens.first().is_some_and(|token| self.stop_tokens.contains(token)) {
            return Err(no_end());
        }
        if self.stop_tokens.contains(&last) {
            tokens.remove(0); // the turn has one of its own
        }
        Ok(tokens)
    }

    fn encode_answer(&self, text: &str) -> Result<Vec<i64>, TokenizerError> {
        let mut tokens = self.tokenizer.encode(text, false)?;
        tokens.push(self.stop_tokens[0]);
        Ok(tokens)
    }

    fn encode_text(&self, text: &str) -> Result<Vec<i64>, TokenizerError> {
        let mut tokens = self.tokenizer.encode(text, true)?;
        if tokens.last().is_none_or(|last| !self.stop_tokens.contains(last)) {
            tokens.push(self.stop_tokens[0]);
        }
        Ok(tokens)
    }

    /// A record's prompt as messages.
    fn conversation(&self, record: &Record) -> Vec<Value> {
        let mut messages = record.conversation();
        // A system message in the conversation takes precedence.
        if let Some(text) = &self.config.system_prompt
            && messages[0]["role"] != "system"
        {
            messages.insert(0, json!({"role": "system", "content": text}));
        }
        messages
    }

    /// Ranges of the assistant's messages in `prompt`, the tokens of the record's prompt, as the model would
    /// have written them. A message that starts the conversation is not one, since it answers nothing.
    fn turns_of_prompt(&self, record: &Record, prompt: &[i64]) -> Result<Vec<Range<usize>>, TokenizerError> {
        let messages = if self.config.chat { self.conversation(record) } else { Vec::new() };
        let mut turns = Vec::new();
        for (number, message) in messages.iter().enumerate().skip(1) {
            if message["role"] != "assistant" {
                continue;
            }
            let before = self.encode_messages(&messages[..number], None, &Map::new())?;
            let said = self.encode_answer(message["content"].as_str().unwrap_or_default())?;
            let turn = before.len()..before.len() + said.len();
            if !prompt.starts_with(&before) || prompt.get(turn.clone()) != Some(&said[..]) {
                return Err(TokenizerError::Turn { record: record.id.clone(), message: number + 1 });
            }
            turns.push(turn);
        }
        Ok(turns)
    }
}

#[cfg(test)]
mod tests {
    use std::{fs, path::Path};

    use super::*;

    /// Turns are the model's own tokens. Between them is the text of the whole conversation in the template,
    /// as in `transformers`.
    #[test]
    fn what_an_environment_says_lies_between_turns_as_in_the_whole_conversation() {
        let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../tests/golden/tiny_model");
        let config = FolderConfig { path: path.clone(), chat: true, system_prompt: None, lora: None };
        let tokenizer = Tokenizer::of_folder(&ModelFolder::open(&path).unwrap(), &config).unwrap();
        let [first, said] = ["What is 2 + 2?", "It is\n4"].map(str::to_owned);
        let record = Record { prompt: first.clone(), ..Record::default() };
        let answer = Record { answer: said.clone(), ..record.clone() };
        for (role, hint) in [("user", "no,\nhigher"), ("tool", "{\"sum\": 4}"), ("user", "anyroll's turn")] {
            let messages = [("user", &*first), ("assistant", &said), (role, hint)];
            let messages = messages.map(|(role, content)| json!({"role": role, "content": content}));
            let whole = tokenizer.encode_messages(&messages, None, &Map::new()).unwrap();
            let mut turn = tokenizer.encode_answer(&answer).unwrap();
            let mut parts = tokenizer.encode_prompt(&record).unwrap();
            let behind =
                |turn: &[i64]| tokenizer.encode_observation(hint, Some(role), *turn.last().unwrap()).unwrap();
            parts.extend([&turn[..], &behind(&turn)].concat());
            assert_eq!(parts, whole, "{hint}");
            // A turn ended by a stop string has no end token.
            let end = turn.pop().unwrap();
            assert_eq!(behind(&turn)[0], end);
        }
        assert_eq!(tokenizer.encode_observation("4", None, 0).unwrap(), tokenizer.encode_text("4").unwrap());
    }

    #[test]
    fn an_end_that_the_model_cannot_write_is_refused() {
        let folder = tempfile::tempdir().unwrap();
        for entry in
            fs::read_dir(Path::new(env!("CARGO_MANIFEST_DIR")).join("../../tests/golden/tiny_model")).unwrap()
        {
            let entry = entry.unwrap();
            fs::copy(entry.path(), folder.path().join(entry.file_name())).unwrap();
        }
        let chat = FolderConfig { path: folder.path().into(), chat: true, system_prompt: None, lora: None };
        let open = |stops: Value| {
            let text = json!({"eos_token_id": stops}).to_string();
            fs::write(folder.path().join("generation_config.json"), text).unwrap();
            Tokenizer::of_folder(&ModelFolder::open(folder.path()).unwrap(), &chat)
        };
        assert_eq!(open(json!([5, 320])).unwrap().stop_tokens(), [5, 320, 321]);
        let error = open(json!([5, 328])).unwrap_err().to_string();
        assert!(error.contains("names 328 as eos_token_id") && error.contains("from 0 to 327"), "{error}");
        // The tokenizer's own end is enough; without one there is none anywhere.
        assert_eq!(open(json!(null)).unwrap().stop_tokens(), [321]);
        let file = folder.path().join("tokenizer_config.json");
        let mut tokenizer: Value = serde_json::from_slice(&fs::read(&file).unwrap()).unwrap();
        tokenizer["eos_token"] = Value::Null;
        fs::write(&file, tokenizer.to_string()).unwrap();
        let model = folder.path().join("config.json");
        let mut config: Value = serde_json::from_slice(&fs::read(&model).unwrap()).unwrap();
        config["eos_token_id"] = Value::Null;
        fs::write(&model, config.to_string()).unwrap();
        let error = open(json!(null)).unwrap_err().to_string();
        assert!(error.contains("names no eos_token_id in generation_config.json or config.json"), "{error}");
    }
}

//! Records to tokens, by whichever tokenizer the model has.

use std::ops::Range;

use anyroll_models::hf::ModelFolder;
use serde_json::{Map, Value, json};

use super::chat_template::Conversation;
use super::{CharTokenizer, HfTokenizer, Record, TokenBytes, TokenizerError};
use crate::config::{FolderConfig, Speaker};

/// What turns records into tokens and completions into text.
#[derive(Debug)]
pub enum Tokenizer {
    /// A token a character of the training records.
    Characters(CharTokenizer),
    /// That of a model's folder.
    Folder(Box<FolderTokenizer>),
}

/// A published model's tokenizer, and how prompts are put to it.
#[derive(Debug)]
pub struct FolderTokenizer {
    tokenizer: HfTokenizer,
    stop_tokens: Vec<i64>,
    config: FolderConfig,
}

impl Tokenizer {
    /// The tokenizer in the folder of a model.
    ///
    /// # Errors
    /// The file that cannot be used, or a chat template that is asked for and not there.
    pub fn of_folder(folder: &ModelFolder, config: &FolderConfig) -> Result<Tokenizer, TokenizerError> {
        let tokenizer = HfTokenizer::open(folder.path())?;
        if config.chat && !tokenizer.has_chat_template() {
            return Err(TokenizerError::NoTemplate { path: folder.path().to_owned() });
        }
        let path = || folder.path().to_owned();
        let vocab_size = folder.decoder_config().vocab_size;
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

    /// Every token by its text.
    pub fn vocabulary(&self) -> Box<dyn Iterator<Item = (String, i64)> + '_> {
        match self {
            Tokenizer::Characters(tokenizer) => Box::new(tokenizer.vocabulary()),
            Tokenizer::Folder(folder) => Box::new(folder.tokenizer.vocabulary().into_iter()),
        }
    }

    /// What every token is, in the order of their numbers. Tokens that end a completion are special, whatever they are written as.
    ///
    /// # Errors
    /// Why the bytes of tokens are not known.
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

    /// The tokens that end a completion; a gold answer ends with the first.
    pub fn stop_tokens(&self) -> Vec<i64> {
        match self {
            Tokenizer::Characters(tokenizer) => vec![tokenizer.eos()],
            Tokenizer::Folder(folder) => folder.stop_tokens.clone(),
        }
    }

    /// The tokens of a record's prompt: none of a text by itself.
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

    /// The tokens of a text as it stands.
    pub fn encode_text(&self, text: &str) -> Result<Vec<i64>, TokenizerError> {
        match self {
            Tokenizer::Characters(tokenizer) => {
                let (id, prompt) = ("text".to_owned(), text.to_owned());
                Ok(tokenizer.encode_prompt(&Record { id, prompt, ..Record::default() })?)
            }
            Tokenizer::Folder(folder) => folder.tokenizer.encode(text, true),
        }
    }

    /// The tokens of a conversation, up to where the assistant's next message begins.
    ///
    /// # Errors
    /// [`TokenizerError::NoTemplate`] where there is no chat template, or the template's own.
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

    /// Whether prompts go through a chat template.
    pub fn is_of_chat(&self) -> bool {
        matches!(self, Tokenizer::Folder(folder) if folder.config.chat)
    }

    /// As whose message an environment's words are read, if `asked` does not say it.
    pub fn speaker(&self, asked: Option<Speaker>) -> Speaker {
        asked.unwrap_or(if self.is_of_chat() { Speaker::User } else { Speaker::None })
    }

    /// The tokens of what an environment says behind a turn whose last token is `last`, up to where the next turn begins: a
    /// message of `role` in the chat template, behind what ends the turn if that is not there; without a role the text as it
    /// stands.
    ///
    /// # Errors
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

    /// The tokens of a record's answer and an end: the completion that earns the reward. A text by itself begins as the
    /// tokenizer begins texts, and one that has an end gets no second.
    pub fn encode_answer(&self, record: &Record) -> Result<Vec<i64>, TokenizerError> {
        match self {
            Tokenizer::Characters(tokenizer) => Ok(tokenizer.encode_answer(record)?),
            Tokenizer::Folder(folder) if record.is_text() => folder.encode_text(&record.answer),
            Tokenizer::Folder(folder) => folder.encode_answer(&record.answer),
        }
    }

    /// The tokens of a record's prompt and answer, and where the assistant's messages lie among them, ends included: those of
    /// the prompt, and behind them the answer.
    ///
    /// # Errors
    /// As [`Self::encode_prompt`], or [`TokenizerError::Turn`].
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

    /// The tokens of a record's prompt with its answer and what ends them, as reward models read a text.
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

    /// The special token that is written so, which no text of tokens shows.
    pub fn special_token(&self, text: &str) -> Option<i64> {
        match self {
            Tokenizer::Characters(_) => None,
            Tokenizer::Folder(folder) => folder.tokenizer.special_token(text),
        }
    }

    /// The text of tokens; special tokens have none.
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

    /// A message behind one of the assistant's, as the template has it behind any.
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
        // A conversation that brings a system prompt of its own keeps it.
        if let Some(text) = &self.config.system_prompt
            && messages[0]["role"] != "system"
        {
            messages.insert(0, json!({"role": "system", "content": text}));
        }
        messages
    }

    /// Where the assistant's messages lie in the prompt of a record, whose tokens are `prompt`: as the model would have
    /// written them behind the messages before them. One that begins a conversation answers nothing.
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

    /// Turns as the model writes them, and between them what the template has there of the whole conversation, which reads
    /// as in `transformers`.
    #[test]
    fn what_an_environment_says_lies_between_turns_as_in_the_whole_conversation() {
        let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("../tests/golden/tiny_model");
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
            // A turn that a stop string ended has no end of its own.
            let end = turn.pop().unwrap();
            assert_eq!(behind(&turn)[0], end);
        }
        assert_eq!(tokenizer.encode_observation("4", None, 0).unwrap(), tokenizer.encode_text("4").unwrap());
    }

    #[test]
    fn an_end_that_the_model_cannot_write_is_refused() {
        let folder = tempfile::tempdir().unwrap();
        for entry in
            fs::read_dir(Path::new(env!("CARGO_MANIFEST_DIR")).join("../tests/golden/tiny_model")).unwrap()
        {
            let entry = entry.unwrap();
            fs::copy(entry.path(), folder.path().join(entry.file_name())).unwrap();
        }
        let config = FolderConfig { path: folder.path().into(), chat: true, system_prompt: None, lora: None };
        let open = |stops: Value| {
            let text = json!({"eos_token_id": stops}).to_string();
            fs::write(folder.path().join("generation_config.json"), text).unwrap();
            Tokenizer::of_folder(&ModelFolder::open(folder.path()).unwrap(), &config)
        };
        assert_eq!(open(json!([5, 320])).unwrap().stop_tokens(), [5, 320, 321]);
        let error = open(json!([5, 328])).unwrap_err().to_string();
        assert!(error.contains("names 328 as eos_token_id") && error.contains("from 0 to 327"), "{error}");
    }
}

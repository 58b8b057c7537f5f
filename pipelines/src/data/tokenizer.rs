//! Records to tokens, by whichever tokenizer the model has.

use anyroll_models::hf::ModelFolder;
use serde_json::{Map, Value, json};

use super::chat_template::Conversation;
use super::{CharTokenizer, HfTokenizer, Record, TokenizerError};
use crate::config::FolderConfig;

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
        let mut stop_tokens = folder.stop_tokens().to_vec();
        // Chat models end a turn with a token that `generation_config.json` may leave out.
        stop_tokens.extend(tokenizer.eos().filter(|eos| !stop_tokens.contains(eos)));
        if stop_tokens.is_empty() {
            return Err(TokenizerError::NoStop { path: folder.path().to_owned() });
        }
        Ok(Tokenizer::Folder(Box::new(FolderTokenizer { tokenizer, stop_tokens, config: config.clone() })))
    }

    /// The tokens that end a completion; a gold answer ends with the first.
    pub fn stop_tokens(&self) -> Vec<i64> {
        match self {
            Tokenizer::Characters(tokenizer) => vec![tokenizer.eos()],
            Tokenizer::Folder(folder) => folder.stop_tokens.clone(),
        }
    }

    /// The tokens of a record's prompt.
    pub fn encode_prompt(&self, record: &Record) -> Result<Vec<i64>, TokenizerError> {
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
    ) -> Result<Vec<i64>, TokenizerError> {
        let Tokenizer::Folder(folder) = self else {
            return Err(TokenizerError::NoTemplate { path: "a model of single characters".into() });
        };
        let conversation = Conversation { messages, tools, add_generation_prompt: true };
        folder.tokenizer.encode_chat(conversation, &Map::new())
    }

    /// The tokens of a record's answer and an end: the completion that earns the reward.
    pub fn encode_answer(&self, record: &Record) -> Result<Vec<i64>, TokenizerError> {
        match self {
            Tokenizer::Characters(tokenizer) => Ok(tokenizer.encode_answer(record)?),
            Tokenizer::Folder(folder) => {
                let mut tokens = folder.tokenizer.encode(&record.answer, false)?;
                tokens.push(folder.stop_tokens[0]);
                Ok(tokens)
            }
        }
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
        let mut messages = record.conversation();
        // A conversation that brings a system prompt of its own keeps it.
        if let Some(text) = &self.config.system_prompt
            && messages[0]["role"] != "system"
        {
            messages.insert(0, json!({"role": "system", "content": text}));
        }
        let conversation = Conversation { messages: &messages, tools: None, add_generation_prompt: true };
        self.tokenizer.encode_chat(conversation, &Map::new())
    }
}

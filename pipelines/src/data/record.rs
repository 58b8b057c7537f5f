//! A prompt with what somebody has written to it.

use serde_json::{Map, Value, json};

use crate::config::Keep;

/// A prompt and the answer that is right.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Record {
    /// Names the record in logs: the prompt's number for a made one, `line 12` or `row 12` for one from a file, with the
    /// file's name before it where there are several.
    pub id: String,
    /// What the model reads.
    pub prompt: String,
    /// The prompt as messages with `role` and `content`, for a model's chat template; empty if it is a plain text.
    pub messages: Vec<Value>,
    /// What it should write, without an end mark.
    pub answer: String,
    /// A worse answer to compare with, if there is one.
    pub rejected: Option<String>,
    /// Whether the answer is as it should be, if somebody has judged it by itself.
    pub desirable: Option<bool>,
    /// Which of a mix's sources it is from; empty without a mix.
    pub domain: String,
    /// What else the file says of it, for rewards that read it.
    pub columns: Map<String, Value>,
    /// What its tokens are cut to, if they are too many.
    pub cut: Option<Cut>,
}

/// What the tokens of a record are cut to.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Cut {
    /// How many are left, above 0.
    pub tokens: usize,
    /// Which.
    pub keep: Keep,
}

impl Record {
    /// The same with the worse answer in the better one's place.
    pub fn rejected(&self) -> Option<Record> {
        self.rejected.clone().map(|answer| Record { answer, rejected: None, ..self.clone() })
    }

    /// The same with `text` at the end of its prompt, in a conversation at the end of its last message; `None` if that is no
    /// text.
    pub fn followed_by(&self, text: &str) -> Option<Record> {
        let mut record = self.clone();
        record.prompt += text;
        if let Some(last) = record.messages.last_mut() {
            let Some(Value::String(content)) = last.get_mut("content") else { return None };
            content.push_str(text);
        }
        Some(record)
    }

    /// Whether it is a text by itself, an answer to nothing.
    pub fn is_text(&self) -> bool {
        self.prompt.is_empty() && self.messages.is_empty()
    }

    /// The text by which it is held out or not: its prompt, if it has one.
    pub fn key(&self) -> &str {
        if self.is_text() { &self.answer } else { &self.prompt }
    }

    /// Whether what the model writes can be compared with its answer.
    pub fn is_to_complete(&self) -> bool {
        !self.is_text() && self.desirable != Some(false)
    }

    /// Its better answer alone, or its worse one.
    pub(super) fn judged(self, desirable: bool) -> Record {
        let worse = self.rejected.unwrap_or_default();
        let answer = if desirable { self.answer } else { worse };
        Record { answer, rejected: None, desirable: Some(desirable), ..self }
    }

    /// Each of a pair's answers by itself.
    pub(super) fn unpaired(self) -> Vec<Record> {
        match self.rejected {
            Some(_) => vec![self.clone().judged(true), self.judged(false)],
            None => vec![self],
        }
    }

    /// The prompt as messages: its own, or one of the user's.
    pub fn conversation(&self) -> Vec<Value> {
        match self.messages.is_empty() {
            true => vec![json!({"role": "user", "content": self.prompt})],
            false => self.messages.clone(),
        }
    }
}

//! A prompt with its answers.

use anyroll_config::Keep;
use serde_json::{Map, Value, json};

/// A prompt and its right answer.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Record {
    /// Name of the record in logs: the prompt's number for a generated one, `line 12` or `row 12` for one
    /// from a file. With several files, the file's name comes first.
    pub id: String,
    /// The prompt as text.
    pub prompt: String,
    /// The prompt as messages with `role` and `content`, for a model's chat template; empty if it is plain
    /// text.
    pub messages: Vec<Value>,
    /// The gold answer, without an end token; of a solution in steps all of them, each with its separator.
    pub answer: String,
    /// A worse answer for a preference pair.
    pub rejected: Option<String>,
    /// Label of the answer, for objectives on single answers.
    pub desirable: Option<bool>,
    /// Reward of the answer, for objectives that learn values.
    pub reward: Option<f64>,
    /// Labelled steps of a solution, for process reward models.
    pub steps: Vec<Step>,
    /// Source in a mix; empty without a mix.
    pub domain: String,
    /// Further columns of the file, for rewards that read them.
    pub columns: Map<String, Value>,
    /// Length to truncate the record to, if it is too long.
    pub cut: Option<Cut>,
}

/// A labelled step of a solution.
#[derive(Clone, Debug, PartialEq)]
pub struct Step {
    /// Text without the separator.
    pub text: String,
    /// Probability that it is right: 1 for a right step, 0 for a wrong one.
    pub label: f64,
}

/// Truncation of a record.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Cut {
    /// Tokens to keep, above 0.
    pub tokens: usize,
    /// End to keep.
    pub keep: Keep,
}

impl Record {
    /// The record with the worse answer in place of the better one.
    pub fn rejected(&self) -> Option<Record> {
        self.rejected.clone().map(|answer| Record { answer, rejected: None, ..self.clone() })
    }

    /// The record with `text` appended to its prompt, in a conversation to the last message; `None` if that
    /// message has no text.
    pub fn followed_by(&self, text: &str) -> Option<Record> {
        let mut record = self.clone();
        record.prompt += text;
        if let Some(last) = record.messages.last_mut() {
            let Some(Value::String(content)) = last.get_mut("content") else { return None };
            content.push_str(text);
        }
        Some(record)
    }

    /// Returns true if it is a plain text without a prompt.
    pub fn is_text(&self) -> bool {
        self.prompt.is_empty() && self.messages.is_empty()
    }

    /// Text whose hash decides whether it is held out: its prompt, if it has one.
    pub fn key(&self) -> &str {
        if self.is_text() { &self.answer } else { &self.prompt }
    }

    /// Returns true if a completion of its prompt can be compared with its answer.
    pub fn is_to_complete(&self) -> bool {
        !self.is_text() && self.desirable != Some(false)
    }

    /// The record with one of its two answers, labelled.
    pub(super) fn judged(self, desirable: bool) -> Record {
        let worse = self.rejected.unwrap_or_default();
        let answer = if desirable { self.answer } else { worse };
        Record { answer, rejected: None, desirable: Some(desirable), ..self }
    }

    /// The two answers of a pair as separate, labelled records.
    pub(super) fn unpaired(self) -> Vec<Record> {
        match self.rejected {
            Some(_) => vec![self.clone().judged(true), self.judged(false)],
            None => vec![self],
        }
    }

    /// The prompt as messages: its own, or one user message.
    pub fn conversation(&self) -> Vec<Value> {
        match self.messages.is_empty() {
            true => vec![json!({"role": "user", "content": self.prompt})],
            false => self.messages.clone(),
        }
    }
}

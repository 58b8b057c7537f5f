//! What clients ask for, in the words of OpenAI's interface, and what it comes to.

use std::sync::Arc;

use anyroll_models::{
    Request, SamplingParams,
    generation::{Completion, Sample},
};
use serde::Deserialize;
use serde_json::Value;

use super::App;
use crate::{error_chain::one_line, inference::stop_condition};

/// `POST /v1/completions`.
#[derive(Debug, Deserialize)]
pub(super) struct CompletionBody {
    prompt: Prompt,
    #[serde(flatten)]
    pub common: Common,
}

/// `POST /v1/chat/completions`.
#[derive(Debug, Deserialize)]
pub(super) struct ChatBody {
    messages: Vec<Value>,
    tools: Option<Vec<Value>>,
    #[serde(flatten)]
    pub common: Common,
}

/// What both have.
#[derive(Debug, Deserialize)]
pub(super) struct Common {
    /// There is one; what a client calls it is not looked at.
    #[serde(rename = "model")]
    _model: Option<String>,
    max_tokens: Option<usize>,
    max_completion_tokens: Option<usize>,
    temperature: Option<f64>,
    top_p: Option<f64>,
    top_k: Option<usize>,
    min_p: Option<f64>,
    repetition_penalty: Option<f64>,
    n: Option<usize>,
    stop: Option<Stop>,
    seed: Option<u64>,
    #[serde(default)]
    pub stream: bool,
    /// `true`, or a number above 0 as completions have it: the log-prob of each token.
    logprobs: Option<Value>,
    /// Whatever else there is: refused, since it would not be done.
    #[serde(flatten)]
    others: serde_json::Map<String, Value>,
}

#[derive(Debug, Deserialize)]
#[serde(untagged)]
enum Prompt {
    Text(String),
    Tokens(Vec<i64>),
}

#[derive(Debug, Deserialize)]
#[serde(untagged)]
enum Stop {
    One(String),
    Several(Vec<String>),
}

/// Fields that change nothing if they have this value, or that only name things.
const IDLE: [(&str, &[&str]); 5] = [
    ("user", &[]),
    ("frequency_penalty", &["0", "0.0"]),
    ("presence_penalty", &["0", "0.0"]),
    ("stream_options", &[]),
    ("echo", &["false"]),
];
const DEFAULT_MAX_TOKENS: usize = 256;

/// A request, and how its answer is told.
pub(super) struct Asked {
    pub request: Request,
    pub stops: Arc<[String]>,
    pub stream: bool,
    pub logprobs: bool,
}

impl CompletionBody {
    pub fn asked(self, app: &App) -> Result<Asked, String> {
        let prompt = match self.prompt {
            Prompt::Text(text) => app.tokenizer.encode_text(&text).map_err(|error| one_line(&error))?,
            Prompt::Tokens(tokens) => tokens,
        };
        self.common.asked(app, prompt)
    }
}

impl ChatBody {
    pub fn asked(self, app: &App) -> Result<Asked, String> {
        let prompt = app.tokenizer.encode_messages(&self.messages, self.tools.as_deref());
        self.common.asked(app, prompt.map_err(|error| one_line(&error))?)
    }
}

impl Common {
    fn asked(self, app: &App, prompt: Vec<i64>) -> Result<Asked, String> {
        for (field, value) in &self.others {
            let idle = IDLE.iter().find(|(name, _)| name == field);
            if !idle
                .is_some_and(|(_, values)| values.is_empty() || values.contains(&value.to_string().as_str()))
            {
                return Err(format!("`{field}` is not there: leave it out"));
            }
        }
        if let Some(token) = prompt.iter().find(|&&token| token < 0 || token >= app.vocab_size) {
            return Err(format!("`prompt` has token {token}, and there are {}", app.vocab_size));
        }
        let room = app.max_length.saturating_sub(prompt.len()).max(1);
        let max_new_tokens =
            self.max_completion_tokens.or(self.max_tokens).unwrap_or(DEFAULT_MAX_TOKENS.min(room));
        let params = SamplingParams {
            temperature: self.temperature.unwrap_or(1.0),
            top_k: self.top_k.unwrap_or(0),
            top_p: self.top_p.unwrap_or(1.0),
            min_p: self.min_p.unwrap_or(0.0),
            repetition_penalty: self.repetition_penalty.unwrap_or(1.0),
            max_new_tokens,
            stop_tokens: app.tokenizer.stop_tokens(),
        };
        let stops: Arc<[String]> = match self.stop {
            None => [].into(),
            Some(Stop::One(stop)) => [stop].into(),
            Some(Stop::Several(stops)) => stops.into(),
        };
        if stops.iter().any(String::is_empty) {
            return Err("`stop` has an empty text, with which every completion would end".to_owned());
        }
        let seed = self.seed.unwrap_or_else(|| app.next_seed());
        let sample = |number| Sample { seed: seed.wrapping_add(number), begun: Completion::default() };
        let samples = (0..self.n.unwrap_or(1) as u64).map(sample).collect();
        let stop = stop_condition(&app.tokenizer, &stops);
        let logprobs = match self.logprobs {
            None | Some(Value::Null | Value::Bool(false)) => false,
            Some(Value::Bool(true)) => true,
            Some(number) => number.as_u64().is_some_and(|number| number > 0),
        };
        let request = Request { prompt, params: Arc::new(params), stop, samples };
        Ok(Asked { request, stops, stream: self.stream, logprobs })
    }
}

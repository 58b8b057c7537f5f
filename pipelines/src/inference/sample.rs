//! A completion, sampled or on its way.

use anyroll_models::{
    Completion, Sequence,
    generation::{Ending, PolicySpan},
};
use serde::{Deserialize, Serialize};

use crate::data::Tokenizer;

/// A completion, sampled or on its way.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Sample {
    /// Prompt, then completion, with its end token or stop string if it has one.
    pub tokens: Vec<i64>,
    /// Tokens of the prompt.
    pub prompt_len: usize,
    /// Log-prob of each completion token when it was sampled: log softmax(logits / temperature), before all that
    /// else changes the odds.
    pub logprobs: Vec<f32>,
    /// Which weights sampled the completion's tokens, in their order.
    pub policies: Vec<PolicySpan>,
    /// Why it ended; `None` while it has not.
    pub ending: Option<Ending>,
}

impl Sample {
    /// A prompt with nothing behind it yet.
    pub fn begin(prompt: Vec<i64>) -> Self {
        let prompt_len = prompt.len();
        Self { tokens: prompt, prompt_len, logprobs: Vec::new(), policies: Vec::new(), ending: None }
    }

    /// Whether it ended by itself.
    pub fn finished(&self) -> bool {
        self.ending == Some(Ending::Stop)
    }

    /// The tokens before the completion.
    pub fn prompt(&self) -> &[i64] {
        &self.tokens[..self.prompt_len]
    }

    /// What the engine is to go on with.
    pub fn begun(&self) -> Completion {
        let (logprobs, policies) = (self.logprobs.clone(), self.policies.clone());
        let tokens = self.tokens[self.prompt_len..].to_vec();
        Completion { tokens, logprobs, policies, ..Completion::default() }
    }

    /// Takes what the engine has made of it.
    pub fn go_on(&mut self, completion: Completion) {
        self.tokens.truncate(self.prompt_len);
        self.tokens.extend(completion.tokens);
        (self.logprobs, self.policies) = (completion.logprobs, completion.policies);
        self.ending = completion.ending;
    }

    /// Tokens of the completion.
    pub fn completion_len(&self) -> usize {
        self.tokens.len() - self.prompt_len
    }

    /// The completion's text, without its end.
    pub fn text(&self, tokenizer: &Tokenizer) -> String {
        tokenizer.decode(&self.tokens[self.prompt_len..])
    }

    /// As the model trains on it.
    pub fn sequence(&self) -> Sequence<'_> {
        Sequence { tokens: &self.tokens, prompt_len: self.prompt_len }
    }
}

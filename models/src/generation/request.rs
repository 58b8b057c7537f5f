//! What is asked of the engine, and what comes back.

use std::{fmt, sync::Arc};

use serde::{Deserialize, Serialize};

use super::{Format, SampleId, SamplingParams, sampling::Sampled};

/// A prompt and the completions that are wanted of it. The prompt runs once for all of them.
#[derive(Clone, Debug)]
pub struct Request {
    /// At least one token.
    pub prompt: Vec<i64>,
    /// How all of them are sampled.
    pub params: Arc<SamplingParams>,
    /// What ends a completion beside `params`; `None`: nothing.
    pub stop: Option<StopCondition>,
    /// What each of them is held to; `None`: nothing.
    pub format: Option<Format>,
    /// The completions.
    pub samples: Vec<Sample>,
}

/// One completion that is wanted.
#[derive(Clone, Debug, Default)]
pub struct Sample {
    /// Its random numbers follow from this and from the index of each token.
    pub seed: u64,
    /// What there is of it: empty, or a completion that was aborted and now goes on, be it with other weights.
    pub begun: Completion,
    /// Whether keys and values stay when it ends, until another sample follows it, it is [released](super::Engine::release), or
    /// something else needs the room.
    pub keep: bool,
    /// A sample of the same engine that was to be kept, and whose tokens, those that came of it included, are what the prompt
    /// begins with: what is kept of it does not run again.
    pub follows: Option<SampleId>,
}

/// Told a completion's tokens after each new one, says whether it ends there: for stop strings, which need a
/// tokenizer.
#[derive(Clone)]
pub struct StopCondition(pub Arc<Ends>);

/// Whether a completion ends with these tokens.
type Ends = dyn Fn(&[i64]) -> bool + Send + Sync;

impl fmt::Debug for StopCondition {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("StopCondition")
    }
}

/// What a prompt was continued with.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Completion {
    /// The new tokens, a stop token included.
    pub tokens: Vec<i64>,
    /// The log-probability of each under softmax(logits / temperature) over the whole vocabulary, as the
    /// training forward computes it: `top_k`, `top_p`, `min_p`, `repetition_penalty` and [`Request::format`] are not in it,
    /// and at temperature 0 it is that of temperature 1.
    pub logprobs: Vec<f32>,
    /// At the place of each token the likeliest ones, from the likeliest on, with their log-probabilities as in `logprobs`; as
    /// many as [`SamplingParams::likeliest`] says. Empty if that is 0.
    pub likeliest: Vec<Vec<(i64, f32)>>,
    /// Which weights sampled it, in the order of the tokens.
    pub policies: Vec<PolicySpan>,
    /// Why it ended; `None` while it has not, or was aborted.
    pub ending: Option<Ending>,
}

/// Tokens in a row that the same weights sampled.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct PolicySpan {
    /// The version that the engine was given with its weights.
    pub version: u64,
    /// How many tokens.
    pub tokens: usize,
}

/// Why a completion ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum Ending {
    /// It has its stop token, or met its stop condition.
    Stop,
    /// It has all the tokens that it may have.
    Length,
    /// What it is held to cannot say how it goes on.
    Broken,
}

impl Completion {
    /// Whether it ended by itself, and not for its length.
    pub fn finished(&self) -> bool {
        self.ending == Some(Ending::Stop)
    }

    pub(super) fn push(&mut self, Sampled { token, logprob, likeliest }: Sampled, version: u64) {
        self.tokens.push(token);
        self.logprobs.push(logprob);
        if !likeliest.is_empty() {
            self.likeliest.push(likeliest);
        }
        match self.policies.last_mut() {
            Some(span) if span.version == version => span.tokens += 1,
            _ => self.policies.push(PolicySpan { version, tokens: 1 }),
        }
    }
}

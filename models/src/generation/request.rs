//! Requests to the engine, and their results.

use std::{fmt, sync::Arc};

use serde::{Deserialize, Serialize};

use super::{Format, SampleId, SamplingParams, sampling::Sampled};
use crate::Routes;

/// A prompt and its requested completions. The prompt runs once for all of them.
#[derive(Clone, Debug)]
pub struct Request {
    /// Prompt tokens, at least one.
    pub prompt: Vec<i64>,
    /// Sampling parameters of all completions.
    pub params: Arc<SamplingParams>,
    /// Further condition that ends a completion, in addition to `params`.
    pub stop: Option<StopCondition>,
    /// Format that each completion must follow.
    pub format: Option<Format>,
    /// The requested completions.
    pub samples: Vec<Sample>,
}

/// A requested completion.
#[derive(Clone, Debug, Default)]
pub struct Sample {
    /// Seed. The random numbers follow from it and the index of each token.
    pub seed: u64,
    /// Completion so far: empty, or an aborted completion to continue, possibly with other weights.
    pub begun: Completion,
    /// True if keys and values stay cached when the sample ends. They stay until another sample follows it,
    /// it is [released](super::Engine::release), or the room is needed.
    pub keep: bool,
    /// A kept sample of the same engine whose tokens, including its completion, the prompt begins with. Its
    /// cached tokens do not run again.
    pub follows: Option<SampleId>,
}

/// Receives a completion's tokens after each new token, and returns true if it ends there: for stop strings,
/// which need a tokenizer.
#[derive(Clone)]
pub struct StopCondition(pub Arc<Ends>);

/// Returns true if a completion ends with these tokens.
type Ends = dyn Fn(&[i64]) -> bool + Send + Sync;

impl fmt::Debug for StopCondition {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("StopCondition")
    }
}

/// Completion of a prompt.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Completion {
    /// New tokens, including a stop token.
    pub tokens: Vec<i64>,
    /// Log-probability of each token under softmax(logits / temperature) over the whole vocabulary, as the
    /// training forward computes it. `top_k`, `top_p`, `min_p`, `repetition_penalty` and [`Request::format`]
    /// have no effect on it; at temperature 0 it is that of temperature 1.
    pub logprobs: Vec<f32>,
    /// Most likely tokens at each position, in descending order, with log-probabilities as in `logprobs`.
    /// [`SamplingParams::top_logprobs`] sets their number; empty if that is 0.
    pub top_logprobs: Vec<Vec<(i64, f32)>>,
    /// Experts of the tokens of prompt and completion that have run, if the engine [records
    /// them](super::Engine::recording_routes). The last token of a completion is never run. A token keeps those of the
    /// pass that ran it first, with the weights of that time.
    pub routes: Routes,
    /// Policy versions that sampled the tokens, in order.
    pub policies: Vec<PolicySpan>,
    /// Reason for the end; `None` before the end or after an abort.
    pub ending: Option<Ending>,
}

/// Consecutive tokens sampled with the same weights.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct PolicySpan {
    /// Version that the engine received with its weights.
    pub version: u64,
    /// Number of tokens.
    pub tokens: usize,
}

/// Reason for the end of a completion.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum Ending {
    /// A stop token or a stop condition.
    Stop,
    /// The maximum number of tokens.
    Length,
    /// The format could not compute the next tokens.
    Broken,
}

impl Completion {
    /// Returns true if it ended by itself and not at its maximum length.
    pub fn finished(&self) -> bool {
        self.ending == Some(Ending::Stop)
    }

    pub(super) fn push(&mut self, sampled: Sampled, version: u64) {
        let Sampled { token, logprob, top_logprobs, route } = sampled;
        self.routes.append(&route);
        self.tokens.push(token);
        self.logprobs.push(logprob);
        if !top_logprobs.is_empty() {
            self.top_logprobs.push(top_logprobs);
        }
        match self.policies.last_mut() {
            Some(span) if span.version == version => span.tokens += 1,
            _ => self.policies.push(PolicySpan { version, tokens: 1 }),
        }
    }
}

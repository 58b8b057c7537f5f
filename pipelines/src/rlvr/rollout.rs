//! What is known of a completion.

use std::sync::Arc;

use anyroll_models::{
    Completion, PackedBatch, Sequence,
    generation::{Ending, PolicySpan},
};
use serde::{Deserialize, Serialize};

use super::Setup;
use crate::{
    Result,
    data::{Record, Tokenizer, stream},
    reward::Case,
};

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
        Completion { tokens: self.tokens[self.prompt_len..].to_vec(), logprobs, policies, ending: None }
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

impl Setup {
    /// Packs samples for a forward pass of the policy.
    pub fn pack(&self, samples: &[Sample]) -> Result<PackedBatch> {
        self.pack_for(self.device, samples)
    }

    /// Packs samples for a forward pass of a model on `device`.
    pub fn pack_for(&self, device: tch::Device, samples: &[Sample]) -> Result<PackedBatch> {
        let sequences: Vec<Sequence> = samples.iter().map(Sample::sequence).collect();
        let pack =
            if self.rlvr.share_prompts == Some(true) { PackedBatch::sharing } else { PackedBatch::new };
        Ok(pack(&sequences, self.rlvr.rollout.temperature, device)?)
    }

    /// `batch` to train on for the `pass`-th time: what adapters drop of a sequence follows from its number in that
    /// pass, over all ranks.
    pub fn to_train(
        &self,
        batch: PackedBatch,
        purpose: Purpose,
        pass: u64,
        numbers: impl IntoIterator<Item = usize>,
    ) -> Result<PackedBatch> {
        if !self.model.drops() {
            return Ok(batch);
        }
        let keys: Vec<u64> =
            numbers.into_iter().map(|number| sample_seed(purpose, self.seed, pass, number)).collect();
        Ok(batch.with_dropout(&keys)?)
    }
}

/// A completion as rewards see it.
pub fn case(tokenizer: &Tokenizer, record: &Arc<Record>, sample: &Sample) -> Case {
    let (tokens, finished) = (sample.completion_len(), sample.finished());
    Case { record: record.clone(), text: sample.text(tokenizer), tokens, finished }
}

/// The seed of one sample: a function of the run's seed, of what it is sampled for, and of its number there.
pub fn sample_seed(purpose: Purpose, seed: u64, step: u64, number: usize) -> u64 {
    use rand_chacha::rand_core::Rng;
    stream(purpose as u64, seed ^ step.rotate_left(32), number as u64).next_u64()
}

/// What numbers are drawn for: each has random ones of its own.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Purpose {
    /// To train on.
    Rollout = 0x726f_6c6c,
    /// To measure.
    Evaluation = 0x6576_616c,
    /// What adapters drop of a completion that is trained on.
    Dropout = 0x6472_6f70,
    /// The same of an answer in the warm-up.
    WarmupDropout = 0x7764_7270,
}

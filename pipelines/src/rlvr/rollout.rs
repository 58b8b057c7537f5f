//! Sampling completions with the policy, and what is known of each.

use anyroll_models::{Completion, KvCache, PackedBatch, SamplingParams, Sequence, generate};
use anyroll_strategy::Weights;
use tch::Tensor;

use super::Setup;
use crate::{
    Result,
    data::{Record, stream},
    reward,
};

/// A sampled completion.
#[derive(Clone, Debug, PartialEq)]
pub struct Sample {
    /// Prompt, then completion, with its end token if it has one.
    pub tokens: Vec<i64>,
    /// Tokens of the prompt.
    pub prompt_len: usize,
    /// Log-prob of each completion token when it was sampled: log softmax(logits / temperature), before top-k and
    /// top-p.
    pub logprobs: Vec<f32>,
    /// Whether it ended by itself.
    pub finished: bool,
}

impl Sample {
    /// Tokens of the completion.
    pub fn completion_len(&self) -> usize {
        self.tokens.len() - self.prompt_len
    }

    /// As rewards see it, its completion being `text`.
    pub fn completion<'a>(&self, text: &'a str) -> reward::Completion<'a> {
        reward::Completion { text, tokens: Some(self.completion_len()), finished: self.finished }
    }

    /// As the model trains on it.
    pub fn sequence(&self) -> Sequence<'_> {
        Sequence { tokens: &self.tokens, prompt_len: self.prompt_len }
    }
}

/// How to sample.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Sampling {
    /// Divides the logits; 0 takes the likeliest token.
    pub temperature: f64,
    /// Keeps the likeliest so many; 0 keeps all.
    pub top_k: usize,
    /// Keeps the likeliest that make up this probability.
    pub top_p: f64,
}

impl Setup {
    /// One completion a record, sampled with the seed beside it. Records come in batches of
    /// `rollout.batch_size`: the bits of a sample may depend on its batch's size, so the size must not depend on
    /// the number of ranks.
    pub fn sample(&self, weights: &Weights, asked: &[(&Record, u64)], how: Sampling) -> Result<Vec<Sample>> {
        let rollout = &self.rlvr.rollout;
        let mut samples = Vec::with_capacity(asked.len());
        for batch in asked.chunks(rollout.batch_size) {
            let prompts: Result<Vec<Vec<i64>>, _> =
                batch.iter().map(|(record, _)| self.tokenizer.encode_prompt(record)).collect();
            let prompts = prompts?;
            let seeds: Vec<u64> = batch.iter().map(|(_, seed)| *seed).collect();
            let completions = self.generate(weights, &prompts, &seeds, how)?;
            for (prompt, completion) in prompts.into_iter().zip(completions) {
                let prompt_len = prompt.len();
                let mut tokens = prompt;
                tokens.extend(&completion.tokens);
                let (logprobs, finished) = (completion.logprobs, completion.finished);
                samples.push(Sample { tokens, prompt_len, logprobs, finished });
            }
        }
        Ok(samples)
    }

    /// The cache lives no longer than this: in training there is none.
    fn generate(
        &self,
        weights: &Weights,
        prompts: &[Vec<i64>],
        seeds: &[u64],
        how: Sampling,
    ) -> Result<Vec<Completion>> {
        let max_new_tokens = self.rlvr.rollout.max_new_tokens;
        let Sampling { temperature, top_k, top_p } = how;
        let stop_tokens = self.tokenizer.stop_tokens();
        let params = SamplingParams { temperature, top_k, top_p, max_new_tokens, stop_tokens };
        let longest = prompts.iter().map(Vec::len).max().unwrap_or(0) + max_new_tokens;
        let kind = weights[0][0].kind();
        let mut cache = KvCache::new(self.model.config(), prompts.len(), longest, kind, self.device)?;
        let units: Vec<&[Tensor]> = weights.iter().map(Vec::as_slice).collect();
        Ok(generate(&self.model, &units, prompts, &params, seeds, &mut cache)?)
    }

    /// The completion's text, without its end.
    pub fn text(&self, sample: &Sample) -> Result<String> {
        Ok(self.tokenizer.decode(&sample.tokens[sample.prompt_len..])?)
    }

    /// Packs samples for a forward pass.
    pub fn pack(&self, samples: &[Sample]) -> Result<PackedBatch> {
        let sequences: Vec<Sequence> = samples.iter().map(Sample::sequence).collect();
        Ok(PackedBatch::new(&sequences, self.rlvr.rollout.temperature, self.device)?)
    }
}

/// The seed of one sample: a function of the run's seed, of what it is sampled for, and of its number there.
pub fn sample_seed(purpose: Purpose, seed: u64, step: u64, number: usize) -> u64 {
    use rand_chacha::rand_core::Rng;
    stream(purpose as u64, seed ^ step.rotate_left(32), number as u64).next_u64()
}

/// What samples are drawn for: each has random numbers of its own.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Purpose {
    /// To train on.
    Rollout = 0x726f_6c6c,
    /// To measure.
    Evaluation = 0x6576_616c,
}

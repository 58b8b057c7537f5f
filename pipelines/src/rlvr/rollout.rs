//! Sampling completions with the policy, and what is known of each.

use std::sync::Arc;

use anyroll_models::{Completion, PackedBatch, Request, SamplingParams, Sequence, generation};
use anyroll_strategy::Weights;
use serde::{Deserialize, Serialize};

use super::Setup;
use crate::{
    Result,
    data::{Record, stream},
    inference::{Room, stop_condition},
};

/// A sampled completion.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Sample {
    /// Prompt, then completion, with its end token or stop string if it has one.
    pub tokens: Vec<i64>,
    /// Tokens of the prompt.
    pub prompt_len: usize,
    /// Log-prob of each completion token when it was sampled: log softmax(logits / temperature), before all that
    /// else changes the odds.
    pub logprobs: Vec<f32>,
    /// Whether it ended by itself.
    pub finished: bool,
}

impl Sample {
    /// Tokens of the completion.
    pub fn completion_len(&self) -> usize {
        self.tokens.len() - self.prompt_len
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
    /// Keeps those with this part of the likeliest one's probability; 0 keeps all.
    pub min_p: f64,
    /// Makes what was there before less likely; 1 does not.
    pub repetition_penalty: f64,
}

impl Sampling {
    /// The likeliest token, always.
    pub const GREEDY: Self = Self { temperature: 0.0, ..Self::FREE };
    /// As the model says.
    pub const FREE: Self =
        Self { temperature: 1.0, top_k: 0, top_p: 1.0, min_p: 0.0, repetition_penalty: 1.0 };
}

/// A completion that is wanted.
#[derive(Clone, Copy, Debug)]
pub struct Asked<'a> {
    /// Of this record's prompt.
    pub record: &'a Record,
    /// Its random numbers.
    pub seed: u64,
    /// How it is sampled.
    pub how: Sampling,
}

impl Setup {
    /// The completions that are asked for, `rollout.batch_size` of them at a time. Those of equal records stand side by
    /// side. `version` is that of the weights. `done` is told of each sample, by its number, as soon as it is there.
    pub fn sample(
        &self,
        weights: &Weights,
        version: u64,
        asked: &[Asked],
        mut done: impl FnMut(usize, &Sample),
    ) -> Result<Vec<Sample>> {
        let prompts: Result<Vec<Vec<i64>>, _> =
            asked.iter().map(|asked| self.tokenizer.encode_prompt(asked.record)).collect();
        let prompts = prompts?;
        let longest = prompts.iter().map(Vec::len).max().unwrap_or(0);
        let rollout = &self.rlvr.rollout;
        let room = Room {
            sequences: rollout.batch_size.min(asked.len()).max(1),
            longest: longest + rollout.max_new_tokens,
            memory: rollout.kv_cache.memory,
        };
        // Its cache lives no longer than this: in training there is none.
        let mut engine = room.engine(&self.model, weights, version, &self.compute)?;
        let stop = stop_condition(&self.tokenizer, &rollout.stop);
        let wanted: Vec<(&Vec<i64>, &Asked)> = prompts.iter().zip(asked).collect();
        for group in wanted.chunk_by(|(a, how_a), (b, how_b)| a == b && how_a.how == how_b.how) {
            let sample = |seed| generation::Sample { seed, begun: Completion::default() };
            let samples = group.iter().map(|(_, asked)| sample(asked.seed)).collect();
            let (prompt, params) = (group[0].0.clone(), Arc::new(self.params(group[0].1.how)));
            engine.submit(Request { prompt, params, stop: stop.clone(), samples })?;
        }
        let mut samples: Vec<Option<Sample>> = vec![None; prompts.len()];
        engine.run(|id, completion| {
            let finished = completion.finished();
            let prompt = &prompts[id as usize];
            let tokens = [&prompt[..], &completion.tokens].concat();
            let sample = Sample { tokens, prompt_len: prompt.len(), logprobs: completion.logprobs, finished };
            done(id as usize, &sample);
            samples[id as usize] = Some(sample);
        })?;
        Ok(samples.into_iter().map(|sample| sample.expect("the engine ends every sample")).collect())
    }

    fn params(&self, how: Sampling) -> SamplingParams {
        let Sampling { temperature, top_k, top_p, min_p, repetition_penalty } = how;
        let (max_new_tokens, stop_tokens) = (self.rlvr.rollout.max_new_tokens, self.tokenizer.stop_tokens());
        SamplingParams { temperature, top_k, top_p, min_p, repetition_penalty, max_new_tokens, stop_tokens }
    }

    /// The completion's text, without its end.
    pub fn text(&self, sample: &Sample) -> String {
        self.tokenizer.decode(&sample.tokens[sample.prompt_len..])
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

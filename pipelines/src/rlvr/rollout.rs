//! Sampling completions with the policy, and what is known of each.

use std::ops::ControlFlow;
use std::sync::Arc;

use anyroll_models::{
    Completion, PackedBatch, Request, SamplingParams, Sequence,
    generation::{self, Ending, PolicySpan},
};
use anyroll_strategy::Weights;
use serde::{Deserialize, Serialize};

use super::Setup;
use crate::{
    Result,
    data::stream,
    inference::{Room, stop_condition},
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

    fn prompt(&self) -> &[i64] {
        &self.tokens[..self.prompt_len]
    }

    /// What the engine is to go on with.
    fn begun(&self) -> Completion {
        let (logprobs, policies) = (self.logprobs.clone(), self.policies.clone());
        Completion { tokens: self.tokens[self.prompt_len..].to_vec(), logprobs, policies, ending: None }
    }

    /// Takes what the engine has made of it.
    fn go_on(&mut self, completion: Completion) {
        self.tokens.truncate(self.prompt_len);
        self.tokens.extend(completion.tokens);
        (self.logprobs, self.policies) = (completion.logprobs, completion.policies);
        self.ending = completion.ending;
    }

    /// Tokens of the completion.
    pub fn completion_len(&self) -> usize {
        self.tokens.len() - self.prompt_len
    }

    /// As the model trains on it.
    pub fn sequence(&self) -> Sequence<'_> {
        Sequence { tokens: &self.tokens, prompt_len: self.prompt_len }
    }
}

/// What came of the completions that were asked for.
#[derive(Clone, Debug)]
pub struct Sampled {
    /// In the order in which they were asked for.
    pub samples: Vec<Sample>,
    /// How often the engine went through the model for them: of each live sequence a token or, where the host looks only
    /// now and then, a few.
    pub passes: usize,
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
#[derive(Clone, Debug)]
pub struct Asked {
    /// Its prompt, and what there is of it.
    pub sample: Sample,
    /// Its random numbers.
    pub seed: u64,
    /// How it is sampled.
    pub how: Sampling,
}

impl Setup {
    /// The completions that are asked for, `rollout.batch_size` of them at a time. Those of equal prompts stand side by
    /// side. `version` is that of the weights. `done` is told of each sample, by its number, as soon as it has ended;
    /// once it breaks, what has not ended is left as it is.
    pub fn sample(
        &self,
        weights: &Weights,
        version: u64,
        asked: &[Asked],
        mut done: impl FnMut(usize, &Sample) -> ControlFlow<()>,
    ) -> Result<Sampled> {
        let longest = asked.iter().map(|asked| asked.sample.prompt_len).max().unwrap_or(0);
        let rollout = &self.rlvr.rollout;
        let room = Room {
            sequences: rollout.batch_size.min(asked.len()).max(1),
            longest: longest + rollout.max_new_tokens,
            memory: rollout.kv_cache.memory,
        };
        // Its cache lives no longer than this: in training there is none.
        let mut engine = room.engine(&self.model, weights, version, &self.compute)?;
        let stop = stop_condition(&self.tokenizer, &rollout.stop);
        for group in asked.chunk_by(|a, b| a.sample.prompt() == b.sample.prompt() && a.how == b.how) {
            let sample = |asked: &Asked| generation::Sample { seed: asked.seed, begun: asked.sample.begun() };
            let samples = group.iter().map(sample).collect();
            let (prompt, params) = (group[0].sample.prompt().to_vec(), Arc::new(self.params(group[0].how)));
            engine.submit(Request { prompt, params, stop: stop.clone(), samples })?;
        }
        let mut samples: Vec<Sample> = asked.iter().map(|asked| asked.sample.clone()).collect();
        let (mut enough, mut passes) = (false, 0);
        while !enough && !engine.is_idle() {
            passes += 1;
            for (id, completion) in engine.step()? {
                let sample = &mut samples[id as usize];
                sample.go_on(completion);
                enough |= done(id as usize, sample).is_break();
            }
        }
        for (id, sample) in (0..).zip(&mut samples).filter(|(_, sample)| sample.ending.is_none()) {
            sample.go_on(engine.abort(id).expect("it has not ended"));
        }
        Ok(Sampled { samples, passes })
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

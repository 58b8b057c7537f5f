//! Sampling completions with some weights on one device.

use std::ops::ControlFlow;
use std::sync::Arc;

use anyroll_backends::Stream;
use anyroll_models::{Decoder, Request, SamplingParams, generation};
use anyroll_strategy::Weights;

use super::{Room, Sample, stop_condition};
use crate::{Result, data::Tokenizer};

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

/// What samples on a device.
#[derive(Debug)]
pub struct Sampler {
    /// A model on the device.
    pub model: Arc<Decoder>,
    /// The stream on which libtorch computes there.
    pub compute: Stream,
    /// Text to tokens.
    pub tokenizer: Arc<Tokenizer>,
    /// Tokens of the longest completion, its end included.
    pub max_new_tokens: usize,
    /// Sequences at a time; as one ends, the next takes its place.
    pub batch_size: usize,
    /// Texts that end a completion.
    pub stop: Vec<String>,
    /// The most that the cache takes, as a part of the device's free memory.
    pub cache_memory: f64,
    /// The math's CPU threads while it samples; `None` leaves them as they are.
    pub threads: Option<usize>,
}

/// CPU threads of this process's math, until it is dropped.
struct Threads {
    before: i32,
}

impl Threads {
    fn set(threads: usize) -> Self {
        let before = tch::get_num_threads();
        tch::set_num_threads(threads as i32);
        Self { before }
    }
}

impl Drop for Threads {
    fn drop(&mut self) {
        tch::set_num_threads(self.before);
    }
}

impl Sampler {
    /// The completions that are asked for, `batch_size` of them at a time. Those of equal prompts stand side by
    /// side. `version` is that of the weights. After each pass `look` gets the samples, and the numbers of those that
    /// ended in it; once it breaks, what has not ended is left as it is.
    pub fn sample(
        &self,
        weights: &Weights,
        version: u64,
        asked: &[Asked],
        mut look: impl FnMut(&[Sample], &[usize]) -> ControlFlow<()>,
    ) -> Result<Sampled> {
        let _threads = self.threads.map(Threads::set);
        // Its cache lives no longer than this: in training there is none.
        let mut engine = self.room(asked).engine(&self.model, weights, version, &self.compute)?;
        let stop = stop_condition(&self.tokenizer, &self.stop);
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
            let mut ended = Vec::new();
            for (id, completion) in engine.step()? {
                samples[id as usize].go_on(completion);
                ended.push(id as usize);
            }
            enough = look(&samples, &ended).is_break();
        }
        for (id, sample) in (0..).zip(&mut samples).filter(|(_, sample)| sample.ending.is_none()) {
            sample.go_on(engine.abort(id).expect("it has not ended"));
        }
        Ok(Sampled { samples, passes })
    }

    /// What it takes to sample these.
    pub fn room(&self, asked: &[Asked]) -> Room {
        let longest = asked.iter().map(|asked| asked.sample.prompt_len).max().unwrap_or(0);
        Room {
            sequences: self.batch_size.min(asked.len()).max(1),
            longest: longest + self.max_new_tokens,
            memory: self.cache_memory,
        }
    }

    fn params(&self, how: Sampling) -> SamplingParams {
        let Sampling { temperature, top_k, top_p, min_p, repetition_penalty } = how;
        let (max_new_tokens, stop_tokens) = (self.max_new_tokens, self.tokenizer.stop_tokens());
        SamplingParams {
            temperature,
            top_k,
            top_p,
            min_p,
            repetition_penalty,
            max_new_tokens,
            stop_tokens,
            likeliest: 0,
        }
    }
}

//! Sampling completions with some weights on one device.

use std::ops::ControlFlow;
use std::sync::Arc;

use anyroll_backends::{BackendKind, Stream};
use anyroll_models::{
    Decoder, Engine, Request, SamplingParams, generation,
    generation::{SampleId, StopCondition},
};
use anyroll_strategy::Weights;

use super::{AnswersTurns, Room, Sample, stop_condition};
use crate::{Result, data::Tokenizer, train::turn_seed};

/// What came of the completions that were asked for.
#[derive(Clone, Debug)]
pub struct Sampled {
    /// In the order in which they were asked for.
    pub samples: Vec<Sample>,
    /// How often the engine went through the model for them: of each live sequence a token or, where the host looks only
    /// now and then, a few.
    pub passes: usize,
    /// Tokens of contexts that did not run again from one turn to the next, since their keys and values had been kept.
    pub kept_tokens: u64,
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

    /// The same for an engine, for completions of so many tokens at most, which any of `stop_tokens` ends.
    pub fn params(self, max_new_tokens: usize, stop_tokens: Vec<i64>) -> SamplingParams {
        let Self { temperature, top_k, top_p, min_p, repetition_penalty } = self;
        SamplingParams {
            temperature,
            top_k,
            top_p,
            min_p,
            repetition_penalty,
            max_new_tokens,
            stop_tokens,
            ..SamplingParams::default()
        }
    }
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
    /// Tokens of the longest completion, its end included; of all turns and all between them.
    pub max_new_tokens: usize,
    /// Tokens of the longest turn, its end included; nothing but `max_new_tokens` bounds it if there is none.
    pub max_turn_tokens: Option<usize>,
    /// Sequences at a time; as one ends, the next takes its place.
    pub batch_size: usize,
    /// Texts that end a completion.
    pub stop: Vec<String>,
    /// The most that the cache takes, as a part of the device's free memory.
    pub cache_memory: f64,
    /// The math's CPU threads while it samples; `None` leaves them as they are.
    pub threads: Option<usize>,
}

/// Tokens of a context that is kept between turns where kernels are launched: attention of what follows launches its own for
/// each layer of each sample, which takes longer than to run a few tokens more.
const LEAST_KEPT: usize = 512;

/// What was asked for, and which of it each of the engine's samples is a turn of.
struct Turns<'a> {
    asked: &'a [Asked],
    /// The most tokens of each sample, its prompt included.
    limits: Vec<usize>,
    stop: Option<StopCondition>,
    /// By the engine's ids.
    of_ids: Vec<usize>,
    /// The engine's id of the last turn of each sample, once it has one.
    last: Vec<Option<SampleId>>,
    /// From how many tokens of a context on what is cached of a turn is kept for the next one; `None`: never.
    keep_from: Option<usize>,
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
    ///
    /// With `episodes` each completion is one of several turns. What is asked of the engine is a turn, with all that is before
    /// it as the prompt. While an environment thinks, its sample has no place in the batch; its keys and values stay as long as
    /// nobody needs the room, and otherwise what there is of it runs through the model again when it goes on.
    pub fn sample(
        &self,
        weights: &Weights,
        version: u64,
        asked: &[Asked],
        mut episodes: Option<Box<dyn AnswersTurns + '_>>,
        mut look: impl FnMut(&[Sample], &[usize]) -> ControlFlow<()>,
    ) -> Result<Sampled> {
        let _threads = self.threads.map(Threads::set);
        // Its cache lives no longer than this: in training there is none.
        let mut engine = self.room(asked).engine(&self.model, weights, version, &self.compute)?;
        let mut turns = Turns {
            asked,
            limits: self.limits(asked),
            stop: stop_condition(&self.tokenizer, &self.stop),
            of_ids: Vec::new(),
            last: vec![None; asked.len()],
            keep_from: episodes.is_some().then(|| self.keep_from()),
        };
        let mut samples: Vec<Sample> = asked.iter().map(|asked| asked.sample.clone()).collect();
        if episodes.is_none() {
            self.submit(&mut engine, &mut turns, &samples, &(0..asked.len()).collect::<Vec<_>>())?;
        }
        let (mut enough, mut passes) = (false, 0);
        while !(enough || engine.is_idle() && episodes.as_ref().is_none_or(|it| it.is_idle())) {
            let mut ended = Vec::new();
            if let Some(episodes) = &mut episodes {
                let replies = episodes.listen(&mut samples, &turns.limits, engine.is_idle());
                self.submit(&mut engine, &mut turns, &samples, &replies.next)?;
                ended = replies.ended;
                ended.iter().filter_map(|&number| turns.last[number]).for_each(|id| engine.release(id));
            }
            passes += usize::from(!engine.is_idle());
            for (id, completion) in engine.step()? {
                let number = turns.of_ids[id as usize];
                samples[number].go_on(completion);
                match &mut episodes {
                    Some(episodes) => episodes.tell(number, &mut samples[number]),
                    None => ended.push(number),
                }
            }
            enough = look(&samples, &ended).is_break();
        }
        for (id, &number) in (0..).zip(&turns.of_ids) {
            let sample = &mut samples[number];
            if sample.ending.is_none()
                && let Some(turn) = engine.abort(id)
            {
                sample.go_on(turn);
            }
        }
        Ok(Sampled { samples, passes, kept_tokens: engine.load().reused_tokens })
    }

    /// Asks the engine for the next turns of the samples with these numbers.
    fn submit(
        &self,
        engine: &mut Engine,
        turns: &mut Turns,
        samples: &[Sample],
        numbers: &[usize],
    ) -> Result<()> {
        let Turns { asked, limits, stop, of_ids, last, keep_from } = turns;
        let tokens = |number: usize| {
            let left = limits[number] - samples[number].context_len();
            self.max_turn_tokens.map_or(left, |most| left.min(most))
        };
        let alike = |&a: &usize, &b: &usize| {
            (samples[a].context(), asked[a].how, tokens(a)) == (samples[b].context(), asked[b].how, tokens(b))
        };
        for group in numbers.chunk_by(alike) {
            let first = group[0];
            let sample = |&number: &usize| {
                let turn = samples[number].turns().len() - 1;
                let (seed, begun) = (turn_seed(asked[number].seed, turn), samples[number].begun());
                let keep = keep_from.is_some_and(|least| samples[number].context_len() >= least);
                generation::Sample { seed, begun, keep, follows: last[number] }
            };
            let ids = engine.submit(Request {
                prompt: samples[first].context().to_vec(),
                params: Arc::new(asked[first].how.params(tokens(first), self.tokenizer.stop_tokens())),
                stop: stop.clone(),
                format: None,
                samples: group.iter().map(sample).collect(),
            })?;
            of_ids.extend(group);
            ids.zip(group).for_each(|(id, &number)| last[number] = Some(id));
        }
        Ok(())
    }

    /// From how many tokens on a context is kept between turns.
    fn keep_from(&self) -> usize {
        if self.compute.device().id().backend == BackendKind::Cpu { 0 } else { LEAST_KEPT }
    }

    /// The most tokens of each sample, its prompt included.
    fn limits(&self, asked: &[Asked]) -> Vec<usize> {
        asked.iter().map(|asked| asked.sample.prompt_len + self.max_new_tokens).collect()
    }

    /// What it takes to sample these.
    pub fn room(&self, asked: &[Asked]) -> Room {
        Room {
            sequences: self.batch_size.min(asked.len()).max(1),
            longest: self.limits(asked).into_iter().max().unwrap_or(self.max_new_tokens),
            memory: self.cache_memory,
        }
    }
}

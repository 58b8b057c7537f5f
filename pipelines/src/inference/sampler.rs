//! Sampling of completions on one device.

use std::ops::ControlFlow;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use anyroll_backends::{BackendKind, Stream};
use anyroll_data::Tokenizer;
use anyroll_models::{
    Decoder, Engine, KeptSteps, Request, SamplingParams, generation,
    generation::{Load, SampleId, Speculated, Speculation, StopCondition},
};
use anyroll_strategy::Weights;
use serde::{Deserialize, Serialize};

use super::{AnswersTurns, Capacity, Sample, stop_condition};
use crate::{Result, train::turn_seed};

/// Result of sampling.
#[derive(Clone, Debug)]
pub struct Sampled {
    /// Samples in the order of the requests.
    pub samples: Vec<Sample>,
    /// Number of forward passes of the engine: one per token of the live sequences, or per few tokens if the
    /// host checks less often.
    pub passes: usize,
    /// Context tokens that were not recomputed between turns, since their keys and values were kept.
    pub kept_tokens: u64,
    /// Proposals, and what became of them.
    pub speculated: Speculated,
}

impl Sampled {
    /// Samples as they were before any work.
    pub fn none_of(samples: Vec<Sample>) -> Self {
        Self { samples, passes: 0, kept_tokens: 0, speculated: Speculated::default() }
    }
}

/// Sampling parameters.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
pub struct Sampling {
    /// Divisor of the logits; 0 always takes the most likely token.
    pub temperature: f64,
    /// Number of most likely tokens to keep; 0 keeps all.
    pub top_k: usize,
    /// Probability that the kept, most likely tokens together must reach.
    pub top_p: f64,
    /// Smallest probability of a kept token, as a fraction of the most likely one's; 0 keeps all.
    pub min_p: f64,
    /// Factor that makes tokens that occurred before less likely; 1 turns it off.
    pub repetition_penalty: f64,
}

impl Sampling {
    /// Always takes the most likely token.
    pub const GREEDY: Self = Self { temperature: 0.0, ..Self::FREE };
    /// The model's own distribution.
    pub const FREE: Self =
        Self { temperature: 1.0, top_k: 0, top_p: 1.0, min_p: 0.0, repetition_penalty: 1.0 };

    /// Parameters of an engine for completions of at most `max_new_tokens`, which any of `stop_tokens` ends.
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

/// A requested completion.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct SampleRequest {
    /// Its prompt, and its tokens so far.
    pub sample: Sample,
    /// Seed of its random numbers.
    pub seed: u64,
    /// Its sampling parameters.
    pub how: Sampling,
    /// Most tokens of the completion, including its end; for several turns the total, with the observations.
    pub max_new_tokens: usize,
}

/// A sampler on a device.
#[derive(Debug)]
pub struct Sampler {
    /// The model on the device.
    pub model: Arc<Decoder>,
    /// The device's compute stream of libtorch.
    pub compute: Stream,
    /// Tokenizer.
    pub tokenizer: Arc<Tokenizer>,
    /// Most tokens of a turn, including its end; `None` for no limit but that of the completion.
    pub max_turn_tokens: Option<usize>,
    /// Sequences in flight; when one ends, the next takes its slot.
    pub batch_size: usize,
    /// Texts that end a completion.
    pub stop: Vec<String>,
    /// Fraction of the device's free memory that the cache may take.
    pub cache_memory: f64,
    /// CPU threads during sampling; `None` leaves them unchanged.
    pub threads: Option<usize>,
    /// True if samples carry the experts of their tokens: see [`Sample::routes`].
    pub records_routing: bool,
    /// Speculation, if there is any.
    pub speculation: Option<Speculation>,
    /// Recorded steps of the last call, for the next one.
    pub kept: Mutex<Option<KeptSteps>>,
}

/// Least context for which the KV cache is kept between turns on devices that launch kernels. Attention over
/// a kept context has extra launches per layer and sample, which take longer than recomputing a few tokens.
const LEAST_KEPT: usize = 512;

/// Requests, with the engine's samples that are their turns.
struct Turns<'a> {
    asked: &'a [SampleRequest],
    /// Most tokens of each sample, prompt included.
    limits: Vec<usize>,
    stop: Option<StopCondition>,
    /// Sample numbers by engine id.
    of_ids: Vec<usize>,
    /// Engine id of each sample's last turn, if it has one.
    last: Vec<Option<SampleId>>,
    /// Least context for which a turn's cache is kept; `None` for never.
    keep_from: Option<usize>,
}

/// CPU threads of this process's math, restored on drop.
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
    /// Samples the requested completions, `batch_size` at a time; equal prompts must be adjacent. `version` is that
    /// of the weights. After each pass `look` gets the samples, and the indices of those that ended in the pass. If
    /// `look` breaks, unfinished samples are left as they are.
    ///
    /// With `episodes` a completion has several turns, each a request to the engine with everything before it
    /// as the prompt. While an environment computes, its sample has no slot in the batch. Its keys and values
    /// stay as long as there is space, and otherwise are recomputed when it continues.
    pub fn sample(
        &self,
        weights: &Weights,
        version: u64,
        asked: &[SampleRequest],
        mut episodes: Option<Box<dyn AnswersTurns + '_>>,
        mut look: impl FnMut(&[Sample], &[usize]) -> ControlFlow<()>,
    ) -> Result<Sampled> {
        let _threads = self.threads.map(Threads::set);
        // A large cache has memory no longer than this call: training has none.
        let kept = self.kept().take();
        let capacity = self.capacity(asked);
        let engine = capacity.engine(&self.model, weights, version, &self.compute, kept)?;
        let mut engine = if self.records_routing { engine.recording_routes()? } else { engine };
        let mut turns = Turns {
            asked,
            limits: limits(asked),
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
        let Load { reused_tokens: kept_tokens, speculated, .. } = engine.load();
        if capacity.is_met_by(&engine) {
            *self.kept() = engine.into_kept()?;
        }
        Ok(Sampled { samples, passes, kept_tokens, speculated })
    }

    fn kept(&self) -> MutexGuard<'_, Option<KeptSteps>> {
        self.kept.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Submits the next turns of the samples with these numbers.
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

    /// Least context that is kept between turns.
    fn keep_from(&self) -> usize {
        if self.compute.device().id().backend == BackendKind::CPU { 0 } else { LEAST_KEPT }
    }

    /// Capacity needed to sample these.
    pub fn capacity(&self, asked: &[SampleRequest]) -> Capacity {
        Capacity {
            sequences: self.batch_size.min(asked.len()).max(1),
            longest: limits(asked).into_iter().max().unwrap_or(1),
            memory: self.cache_memory,
            speculation: self.speculation,
        }
    }
}

/// Most tokens of each sample, prompt included.
fn limits(asked: &[SampleRequest]) -> Vec<usize> {
    asked.iter().map(|asked| asked.sample.prompt_len + asked.max_new_tokens).collect()
}

//! The engine on the policy's device, for rollout and evaluation.

use std::{ops::ControlFlow, sync::Arc};

use anyroll_backends::Stream;
use anyroll_config::RolloutConfig;
use anyroll_data::{Record, Tokenizer};
use anyroll_models::Decoder;
use anyroll_strategy::{Weights, Zero};
use serde::{Deserialize, Serialize};

use crate::{
    Result,
    environment::Environment,
    inference::{AnswersTurns, Sample, SampleRequest, Sampled, Sampler, Sampling},
    train::Exchange,
};

/// A sampler, with the environment that answers the policy's turns, if there is one.
pub struct Engine {
    /// The sampler.
    pub sampler: Sampler,
    /// The environment, if there is one.
    pub environment: Option<Environment>,
    /// The policy's model, if its adapters are merged for sampling.
    pub merged: Option<Arc<Decoder>>,
    /// The ranks that sample together, if there are several; there is no environment then.
    pub together: Option<Together>,
}

/// Ranks that sample together: each runs the requests of all of them, with its part of the weights.
pub struct Together {
    /// This rank's part of the policy's model, with its adapters.
    pub part: Arc<Decoder>,
    /// Exchange between the ranks.
    pub exchange: Exchange,
}

impl Engine {
    /// The policy's weights for the sampler. With merged adapters they include a copy of the matrices with adapters,
    /// which lives as long as the weights.
    pub fn weights(&self, policy: &mut Zero<Decoder>) -> Result<Weights> {
        if let Some(Together { part, exchange }) = &self.together {
            let weights =
                policy.weights_in_parts(exchange.world_size(), |unit, whole| part.own_part(unit, whole))?;
            return Ok(if self.merged.is_some() { part.merge(weights)? } else { weights });
        }
        let Some(model) = &self.merged else { return Ok(policy.weights()?) };
        let weights = policy.weights_with_own(|unit, param| model.merges_into(unit, param))?;
        Ok(model.merge(weights)?)
    }

    /// Samples with `weights` of step `version`; `records` are those of the requests. `look` gets the samples, and
    /// the indices of those that have just ended. Ranks that sample together call this at once, and `look` does not
    /// break.
    pub fn sample<'a>(
        &self,
        weights: &Weights,
        version: u64,
        asked: &[SampleRequest],
        records: impl IntoIterator<Item = &'a Arc<Record>>,
        look: impl FnMut(&[Sample], &[usize]) -> ControlFlow<()>,
    ) -> Result<Sampled> {
        if let Some(Together { exchange, .. }) = &self.together {
            return self.sample_together(exchange, (weights, version), asked, look);
        }
        let records = || records.into_iter().cloned().collect();
        let environment = self.environment.as_ref();
        let episodes = environment.map(|it| Box::new(it.episodes(records())) as Box<dyn AnswersTurns + '_>);
        self.sampler.sample(weights, version, asked, episodes, look)
    }

    /// Samples the requests of all ranks of `exchange`. Returns the samples of this rank's.
    fn sample_together(
        &self,
        exchange: &Exchange,
        (weights, version): (&Weights, u64),
        asked: &[SampleRequest],
        mut look: impl FnMut(&[Sample], &[usize]) -> ControlFlow<()>,
    ) -> Result<Sampled> {
        let of_ranks = exchange.gather_rows(&asked.iter().map(Asked::of).collect::<Vec<_>>())?;
        let first = of_ranks[..exchange.rank()].iter().map(Vec::len).sum::<usize>();
        let own = first..first + asked.len();
        let all: Vec<SampleRequest> = of_ranks.into_iter().flatten().map(SampleRequest::from).collect();
        let mut sampled = self.sampler.sample(weights, version, &all, None, |samples, ended| {
            let ended = ended.iter().filter(|number| own.contains(number)).map(|number| number - first);
            let more = look(&samples[own.clone()], &ended.collect::<Vec<_>>());
            assert!(more.is_continue(), "ranks that sample together stop at the same sample");
            more
        })?;
        sampled.samples = sampled.samples.drain(own).collect();
        Ok(sampled)
    }
}

/// A request as ranks send it to each other: for a completion that has not begun.
#[derive(Serialize, Deserialize)]
struct Asked {
    prompt: Vec<i64>,
    seed: u64,
    how: Sampling,
    max_new_tokens: usize,
}

impl Asked {
    fn of(SampleRequest { sample, seed, how, max_new_tokens }: &SampleRequest) -> Self {
        assert_eq!(sample.tokens.len(), sample.prompt_len, "a completion in flight has a rank of its own");
        Self { prompt: sample.tokens.clone(), seed: *seed, how: *how, max_new_tokens: *max_new_tokens }
    }
}

impl From<Asked> for SampleRequest {
    fn from(Asked { prompt, seed, how, max_new_tokens }: Asked) -> Self {
        Self { sample: Sample::begin(prompt), seed, how, max_new_tokens }
    }
}

/// Creates the sampler of `model` with the options of `rollout`.
pub fn sampler(
    rollout: &RolloutConfig,
    model: Arc<Decoder>,
    compute: Stream,
    tokenizer: Arc<Tokenizer>,
    threads: Option<usize>,
) -> Sampler {
    Sampler {
        model,
        compute,
        tokenizer,
        max_turn_tokens: rollout.environment.as_ref().and_then(|environment| environment.max_turn_tokens),
        batch_size: rollout.batch_size * rollout.tensor_parallel,
        stop: rollout.stop.clone(),
        cache_memory: rollout.kv_cache.memory,
        threads,
    }
}

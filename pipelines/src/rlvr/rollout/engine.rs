//! The engine on the policy's device, for rollout and evaluation.

use std::{
    ops::ControlFlow,
    sync::{Arc, Mutex},
};

use anyroll_backends::Stream;
use anyroll_config::{RolloutConfig, SpeculationConfig};
use anyroll_data::{Record, Tokenizer};
use anyroll_models::{Decoder, Model};
use anyroll_strategy::{Weights, Zero};
use serde::{Deserialize, Serialize};
use tch::Tensor;

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
    /// True if the layers' matrices are in 8 bits for sampling.
    pub in_eight_bits: bool,
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
    /// which lives as long as the weights. Matrices in 8 bits are rounded from the present ones, unit by unit. Ranks that
    /// sample together merge all adapters before.
    pub fn weights(&self, policy: &mut Zero<Decoder>) -> Result<Weights> {
        let weights = match (&self.merged, &self.together) {
            (None, None) if !self.in_eight_bits => return Ok(policy.weights()?),
            (None, _) => {
                let made = |unit, whole, element| self.made_bytes(unit, whole, element);
                return Ok(policy.weights_made(made, |unit, whole| self.made(unit, whole))?);
            }
            (Some(_), Some(Together { part, exchange })) => {
                let made = |_, whole, _| Some(whole / exchange.world_size());
                part.merge(policy.weights_made(made, |unit, whole| part.own_part(unit, whole))?)?
            }
            (Some(model), None) if self.in_eight_bits => return self.merged_in_eight_bits(model, policy),
            (Some(model), None) => {
                model.merge(policy.weights_with_own(|unit, param| model.merges_into(unit, param))?)?
            }
        };
        Ok(if self.in_eight_bits { self.sampler.model.all_in_eight_bits(weights)? } else { weights })
    }

    /// The policy's weights with merged adapters, whose matrices are in 8 bits. Merges and rounds one unit at a time.
    fn merged_in_eight_bits(&self, model: &Decoder, policy: &mut Zero<Decoder>) -> Result<Weights> {
        let units = 0..self.sampler.model.units().len();
        let adapters = units.clone().map(|unit| model.adapters_of(unit).map(|own| policy.unit_weights(own)));
        let adapters = adapters.map(Option::transpose).collect::<std::result::Result<Vec<_>, _>>()?;
        let make = |unit: usize, whole: &[Tensor]| match adapters.get(unit) {
            Some(Some(adapters)) => self.made(unit, &model.merge_unit(unit, whole, adapters)?),
            _ => self.made(unit, whole),
        };
        let mut weights =
            policy.weights_made(|unit, whole, element| self.made_bytes(unit, whole, element), make)?;
        weights.truncate(units.len());
        Ok(weights)
    }

    /// The sampler's weights of a unit without adapters to merge: this rank's part of the `whole` ones, in 8 bits if it
    /// samples with them.
    fn made(&self, unit: usize, whole: &[Tensor]) -> anyroll_models::Result<Vec<Tensor>> {
        let model = &self.sampler.model;
        match &self.together {
            Some(Together { part, .. }) if self.in_eight_bits => {
                model.in_eight_bits(unit, &part.own_part(unit, whole)?)
            }
            Some(Together { part, .. }) => part.own_part(unit, whole),
            None => model.in_eight_bits(unit, whole),
        }
    }

    /// The bytes of these weights, from those of the whole unit and of one element.
    fn made_bytes(&self, unit: usize, whole: usize, element: usize) -> Option<usize> {
        let ranks = self.together.as_ref().map(|together| together.exchange.world_size());
        sampled_bytes(&self.sampler.model, (ranks, self.in_eight_bits), unit, [whole, element])
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

/// The bytes that sampling allocates for a unit of so many bytes, of elements of so many: by several ranks together, or with
/// weights in 8 bits, or both. `None` if it samples with the unit as it is.
pub fn sampled_bytes(
    model: &Decoder,
    (ranks, in_eight_bits): (Option<usize>, bool),
    unit: usize,
    [whole, element]: [usize; 2],
) -> Option<usize> {
    let narrow = if in_eight_bits { model.eight_bit_bytes(unit, element) } else { None };
    match ranks {
        Some(ranks) => Some(narrow.unwrap_or(whole) / ranks),
        None => narrow,
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
        records_routing: rollout.replay_routing,
        speculation: rollout.speculation.map(SpeculationConfig::speculation),
        kept: Mutex::default(),
    }
}

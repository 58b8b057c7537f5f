//! The engine on the policy's device, for rollout and evaluation.

use std::{ops::ControlFlow, sync::Arc};

use anyroll_backends::Stream;
use anyroll_config::RolloutConfig;
use anyroll_data::{Record, Tokenizer};
use anyroll_models::Decoder;
use anyroll_strategy::{Weights, Zero};

use crate::{
    Result,
    environment::Environment,
    inference::{AnswersTurns, Sample, SampleRequest, Sampled, Sampler},
};

/// A sampler, with the environment that answers the policy's turns, if there is one.
pub struct Engine {
    /// The sampler.
    pub sampler: Sampler,
    /// The environment, if there is one.
    pub environment: Option<Environment>,
    /// The policy's model, if its adapters are merged for sampling.
    pub merged: Option<Arc<Decoder>>,
}

impl Engine {
    /// The policy's weights for the sampler. With merged adapters they include a copy of the matrices with adapters,
    /// which lives as long as the weights.
    pub fn weights(&self, policy: &mut Zero<Decoder>) -> Result<Weights> {
        let Some(model) = &self.merged else { return Ok(policy.weights()?) };
        let weights = policy.weights_with_own(|unit, param| model.merges_into(unit, param))?;
        Ok(model.merge(weights)?)
    }

    /// Samples with `weights` of step `version`; `records` are those of the requests. `look` gets the samples, and
    /// the indices of those that have just ended.
    pub fn sample<'a>(
        &self,
        weights: &Weights,
        version: u64,
        asked: &[SampleRequest],
        records: impl IntoIterator<Item = &'a Arc<Record>>,
        look: impl FnMut(&[Sample], &[usize]) -> ControlFlow<()>,
    ) -> Result<Sampled> {
        let records = || records.into_iter().cloned().collect();
        let environment = self.environment.as_ref();
        let episodes = environment.map(|it| Box::new(it.episodes(records())) as Box<dyn AnswersTurns + '_>);
        self.sampler.sample(weights, version, asked, episodes, look)
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
        batch_size: rollout.batch_size,
        stop: rollout.stop.clone(),
        cache_memory: rollout.kv_cache.memory,
        threads,
    }
}

//! Packing of completions into batches.

use anyroll_config::RlvrConfig;
use anyroll_models::{Decoder, PackedBatch, RouteShape, Sequence, targets_in};

use crate::{
    Result,
    inference::Sample,
    run::Run,
    train::{Purpose, sample_seed},
};

/// Packing of samples into batches.
#[derive(Clone, Copy, Debug)]
pub struct Packing {
    /// True if a prompt that adjacent samples share is computed once.
    pub share_prompts: bool,
    /// Divides the logits.
    pub temperature: f64,
    /// True if samples have several turns, with an environment's observations between them.
    pub has_turns: bool,
    /// True if the policy's adapters have dropout in training.
    pub drops: bool,
    /// Sizes of a token's routes, if the policy's training takes those of sampling.
    pub routes: Option<RouteShape>,
    /// The run's seed.
    pub seed: u64,
}

impl Packing {
    /// Creates the packing from `config`, a section of `run`.
    pub fn new(run: &Run, config: &RlvrConfig, policy: &Decoder) -> Self {
        Self {
            share_prompts: run.shares_prompts,
            temperature: config.rollout.temperature,
            has_turns: config.rollout.environment.is_some(),
            drops: policy.drops(),
            routes: if config.rollout.replay_routing { policy.route_shape() } else { None },
            seed: run.config.seed,
        }
    }

    /// Packs samples for a forward pass of a model on `device`.
    pub fn pack(&self, device: tch::Device, samples: &[Sample]) -> Result<PackedBatch> {
        let sequences: Vec<Sequence> = samples.iter().map(Sample::sequence).collect();
        let pack = if self.share_prompts { PackedBatch::sharing } else { PackedBatch::new };
        let packed = pack(&sequences, self.temperature, device)?;
        if !self.has_turns {
            return Ok(packed);
        }
        // Observations of an environment are read and not learnt, so they are not targets.
        let turns: Vec<_> = samples.iter().map(Sample::turns).collect();
        let turns = sequences.into_iter().zip(turns.iter().map(Vec::as_slice));
        Ok(packed.keeping(&targets_in(turns))?)
    }

    /// Packs samples for a forward pass of the policy, which sends their tokens to the experts of sampling if it replays
    /// these.
    pub fn pack_for_policy(&self, device: tch::Device, samples: &[Sample]) -> Result<PackedBatch> {
        let packed = self.pack(device, samples)?;
        let Some(shape) = self.routes else { return Ok(packed) };
        Ok(packed.with_routes(&samples.iter().map(|sample| &sample.routes).collect::<Vec<_>>(), shape)?)
    }

    /// Packs samples for the `pass`-th training pass. Dropout of a sample depends on its index in that pass, over all
    /// ranks.
    pub fn pack_to_train(
        &self,
        device: tch::Device,
        samples: &[Sample],
        pass: u64,
        numbers: &[usize],
    ) -> Result<PackedBatch> {
        let batch = self.pack_for_policy(device, samples)?;
        if !self.drops {
            return Ok(batch);
        }
        let key = |&number: &usize| sample_seed(Purpose::Dropout, self.seed, pass, number);
        Ok(batch.with_dropout(&numbers.iter().map(key).collect::<Vec<u64>>())?)
    }
}

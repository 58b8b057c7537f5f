//! The memory of reward models.

use anyroll_backends::DType;
use anyroll_config::RewardModelConfig;
use anyroll_models::{PackedSize, Runs, ValueModel};
use anyroll_reward::OpenModel;
use anyroll_strategy::plan::{Held, Ranks, held, scoring_activations};

use super::{
    away, on_host,
    texts::{parameters, part},
};
use crate::{Result, run::Strategy, train::zero_config};

/// A reward model.
pub(super) struct RewardModel {
    /// A rank's part of it, on devices.
    model: ValueModel,
    /// Number of parameters of all of it.
    parameters: usize,
    dtype: DType,
    batch_size: usize,
}

/// Parts of a reward model on a device.
pub(super) struct RewardHeld {
    /// Held at all times.
    pub(super) stays: Held,
    /// Loaded in addition while it scores.
    pub(super) comes: Held,
}

impl RewardModel {
    /// Creates the planner's part of the model of `config`, whose folder was `opened`.
    pub(super) fn new(config: &RewardModelConfig, opened: &OpenModel, policy: &Strategy) -> Result<Self> {
        let whole = opened.model(tch::Device::Cpu)?;
        let parameters = parameters(&whole);
        Ok(Self {
            model: part(whole, policy)?,
            parameters,
            dtype: config.dtype.dtype(),
            batch_size: config.batch_size,
        })
    }

    /// Parts on the device of a rank that holds it under `strategy`.
    pub(super) fn held(&self, strategy: &Strategy, ranks: Ranks) -> RewardHeld {
        let all = held(&self.model, zero_config(strategy), false, ranks);
        let stays = away(strategy, &all);
        let (weights, gathered) = (all.weights - stays.weights, all.gathered - stays.gathered);
        RewardHeld { stays, comes: Held { weights, gathered, ..Held::default() } }
    }

    /// Host memory per rank: the whole model if `strategy` is `None`.
    pub(super) fn host_bytes(&self, strategy: Option<&Strategy>, ranks: Ranks) -> usize {
        let Some(strategy) = strategy else {
            return self.parameters * self.dtype.size_bytes();
        };
        on_host(strategy, &held(&self.model, zero_config(strategy), false, ranks))
    }

    /// Activations of scoring a rank's sequences of these lengths.
    pub(super) fn activations(
        &self,
        (sequences, prompt, completion): (usize, usize, usize),
        on_host: bool,
    ) -> usize {
        let size = PackedSize::uniform(self.batch_size.min(sequences), prompt, completion);
        scoring_activations(&self.model, &size, Runs { dtype: self.dtype, on_host })
    }
}

//! The memory of reward models.

use anyroll_backends::DType;
use anyroll_models::{Model, PackedSize, Runs, ValueModel};
use anyroll_strategy::plan::{Held, Ranks, held, scoring_activations};

use super::{away, on_host};
use crate::{
    Error, Result,
    config::{RewardModelConfig, StrategyConfig},
    reward,
    train::zero_config,
};

/// A reward model.
pub(super) struct RewardModel {
    model: ValueModel,
    dtype: DType,
    batch_size: usize,
}

/// What of one is on a device.
pub(super) struct RewardHeld {
    /// At all times.
    pub(super) stays: Held,
    /// Beside it while it scores.
    pub(super) comes: Held,
}

impl RewardModel {
    /// That of `config`.
    pub(super) fn open(config: &RewardModelConfig) -> Result<Self> {
        let reward::OpenModel { folder, .. } =
            reward::Model::open(config).map_err(|failure| Error::Start { name: "model".into(), failure })?;
        let model = ValueModel::new(folder.decoder_config().clone(), tch::Device::Cpu)?;
        Ok(Self { model, dtype: config.dtype.dtype(), batch_size: config.batch_size })
    }

    /// What of it is on the device of a rank that holds it as `strategy` says.
    pub(super) fn held(&self, strategy: &StrategyConfig, ranks: Ranks) -> RewardHeld {
        let all = held(&self.model, zero_config(strategy), false, ranks);
        let stays = away(strategy, &all);
        let (weights, gathered) = (all.weights - stays.weights, all.gathered - stays.gathered);
        RewardHeld { stays, comes: Held { weights, gathered, ..Held::default() } }
    }

    /// What the host holds of it for a rank: all of it, where no strategy says otherwise.
    pub(super) fn host_bytes(&self, strategy: Option<&StrategyConfig>, ranks: Ranks) -> usize {
        let Some(strategy) = strategy else {
            let params = self.model.units().iter().flat_map(|unit| &unit.params);
            return params.map(|param| param.elements()).sum::<usize>() * self.dtype.size_bytes();
        };
        on_host(strategy, &held(&self.model, zero_config(strategy), false, ranks))
    }

    /// Its activations, of which a rank has it score so many sequences of these lengths.
    pub(super) fn activations(
        &self,
        (sequences, prompt, completion): (usize, usize, usize),
        on_host: bool,
    ) -> usize {
        let size = PackedSize::uniform(self.batch_size.min(sequences), prompt, completion);
        scoring_activations(&self.model, &size, Runs { dtype: self.dtype, on_host })
    }
}

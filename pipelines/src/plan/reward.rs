//! The memory of reward models.

use anyroll_backends::DType;
use anyroll_models::{Model, PackedSize, Runs, ValueModel};
use anyroll_strategy::plan::{Held, Ranks, held, scoring_activations};

use super::{away, on_host};
use crate::{Result, config::RewardModelConfig, reward::OpenModel, run::Strategy, train::zero_config};

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
    /// The model of `config`, whose folder was `opened`.
    pub(super) fn new(config: &RewardModelConfig, opened: &OpenModel) -> Result<Self> {
        let model = ValueModel::new(opened.folder.decoder_config().clone(), tch::Device::Cpu)?;
        Ok(Self { model, dtype: config.dtype.dtype(), batch_size: config.batch_size })
    }

    /// What of it is on the device of a rank that holds it as `strategy` says.
    pub(super) fn held(&self, strategy: &Strategy, ranks: Ranks) -> RewardHeld {
        let all = held(&self.model, zero_config(strategy), false, ranks);
        let stays = away(strategy, &all);
        let (weights, gathered) = (all.weights - stays.weights, all.gathered - stays.gathered);
        RewardHeld { stays, comes: Held { weights, gathered, ..Held::default() } }
    }

    /// What the host holds of it for a rank: all of it, where no strategy says otherwise.
    pub(super) fn host_bytes(&self, strategy: Option<&Strategy>, ranks: Ranks) -> usize {
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

//! The memory of reward models.

use anyroll_models::{Model, PackedSize, Runs, ValueModel};
use anyroll_strategy::plan::{Held, Ranks, held, scoring_activations};

use super::{away, on_host as host_bytes_of};
use crate::{
    Error, Result,
    config::{RewardModelConfig, Role, Run},
    reward,
    train::zero_config,
};

/// A reward model on the policy's devices, or on the host.
pub(super) struct RewardModel {
    model: ValueModel,
    runs: Runs,
    batch_size: usize,
    /// Whether it computes where the policy does.
    on_policys_device: bool,
    /// What of it is on the device at all times.
    pub(super) stays: Held,
    /// What is there beside it while it scores.
    pub(super) comes: Held,
    /// What the host holds.
    pub(super) host_bytes: usize,
}

impl RewardModel {
    /// That of `config`, which the ranks hold as `role` says, or each has on the host; `None` if it has devices of its own.
    pub(super) fn open(
        config: &RewardModelConfig,
        role: Option<&Role>,
        run: &Run,
        (ranks, on_host): (Ranks, bool),
    ) -> Result<Option<Self>> {
        if role.is_some_and(|role| !role.is_with(&run.policy)) {
            return Ok(None);
        }
        let (folder, _) =
            reward::Model::open(config).map_err(|failure| Error::Start { name: "model".into(), failure })?;
        let model = ValueModel::new(folder.decoder_config().clone(), tch::Device::Cpu)?;
        let runs = Runs { dtype: config.dtype.dtype(), on_host: role.is_none() || on_host };
        let (stays, comes, host_bytes) = match role {
            None => (Held::default(), Held::default(), whole_bytes(&model, runs)),
            Some(role) => {
                let all = held(&model, zero_config(&role.strategy), false, ranks);
                let stays = away(&role.strategy, &all);
                let (weights, gathered) = (all.weights - stays.weights, all.gathered - stays.gathered);
                let host_bytes = host_bytes_of(&role.strategy, &all);
                (stays, Held { weights, gathered, ..Held::default() }, host_bytes)
            }
        };
        let (batch_size, on_policys_device) = (config.batch_size, role.is_some() || on_host);
        Ok(Some(Self { model, runs, batch_size, on_policys_device, stays, comes, host_bytes }))
    }

    /// Its activations on the policy's device, of which a rank has it score so many sequences of these lengths; `None` if it
    /// computes elsewhere.
    pub(super) fn activations(&self, sequences: usize, prompt: usize, completion: usize) -> Option<usize> {
        let size = PackedSize::uniform(self.batch_size.min(sequences), prompt, completion);
        self.on_policys_device.then(|| scoring_activations(&self.model, &size, self.runs))
    }
}

fn whole_bytes(model: &ValueModel, runs: Runs) -> usize {
    let params = model.units().iter().flat_map(|unit| &unit.params);
    params.map(|param| param.elements()).sum::<usize>() * runs.dtype.size_bytes()
}

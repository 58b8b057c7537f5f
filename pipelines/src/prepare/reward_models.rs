//! Placement of reward models that are not on the host.

use anyroll_config::{
    Devices, FrozenWeights, Moments, OffloadConfig, OptimizerOffload, Recompute, RewardConfig,
    RewardModelConfig, RewardStrategyConfig, StrategyConfig,
};

use super::resolve::Resolver;
use crate::run::Role;

impl Resolver<'_> {
    /// Placement of each reward model, in the order of the reward's terms; `None` for a model on the host.
    pub(super) fn reward_models(&self, policy: &Role) -> Option<Vec<Option<Role>>> {
        if !self.at.below("pipeline.rlvr.reward").has_all_items() {
            return None;
        }
        let models = self.config.pipeline.reward().into_iter().flat_map(RewardConfig::numbered_models);
        let held = models.map(|(index, model)| {
            self.reward_model(&format!("pipeline.rlvr.reward[{index}].model"), model, policy)
        });
        // Collected first, so that every problem is reported.
        held.collect::<Vec<_>>().into_iter().collect()
    }

    fn reward_model(&self, path: &str, model: &RewardModelConfig, policy: &Role) -> Option<Option<Role>> {
        let facts = self.backend(&format!("{path}.backend"), &model.backend)?;
        let backend = facts.name.clone();
        if facts.devices.is_none() && model.devices.is_none() && model.strategy.is_none() {
            return Some(None);
        }
        let ranks = Devices::Count(policy.ordinals.len());
        let ordinals = match &model.devices {
            None if backend == policy.backend => policy.ordinals.clone(),
            said => self.ordinals(&format!("{path}.devices"), said.as_ref().unwrap_or(&ranks), facts)?,
        };
        let RewardStrategyConfig { zero_stage, offload, collective_timeout_s } =
            model.strategy.clone().unwrap_or_default();
        let strategy = StrategyConfig {
            zero_stage,
            precision: model.dtype.precision(),
            frozen_weights: FrozenWeights::Precision,
            moments: Moments::Fp32,
            recompute: Recompute::None,
            deterministic: true,
            keep_logits: None,
            offload: OffloadConfig { optimizer: OptimizerOffload::None, params: offload.params },
            micro_batch_size: model.batch_size,
            micro_batch_tokens: None,
            sequence_parallel: self.config.strategy.sequence_parallel,
            tensor_parallel: self.config.strategy.tensor_parallel,
            expert_parallel: self.config.strategy.expert_parallel,
            shard_group: self.config.strategy.shard_group,
            reduction: self.config.strategy.reduction,
            collective_timeout_s: collective_timeout_s.unwrap_or(policy.strategy.collective_timeout_s),
        };
        let role = Role::new(backend, ordinals, strategy);
        self.is_beside(policy, path, &role).then_some(Some(role))
    }
}

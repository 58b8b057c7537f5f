//! How the ranks hold reward models that are not on the host.

use super::resolve::Resolver;
use crate::config::*;
use crate::run::Role;

impl Resolver<'_> {
    /// How the ranks hold each reward model, in the order of the reward's terms; `None` for one that is on the host.
    pub(super) fn reward_models(&self, policy: &Role) -> Result<Vec<Option<Role>>, Problem> {
        let models = self.config.pipeline.reward().into_iter().flat_map(RewardConfig::numbered_models);
        let held = models.map(|(index, model)| {
            self.reward_model(&format!("pipeline.rlvr.reward[{index}].model"), model, policy)
        });
        held.collect()
    }

    fn reward_model(
        &self,
        path: &str,
        model: &RewardModelConfig,
        policy: &Role,
    ) -> Result<Option<Role>, Problem> {
        let facts = self.backend(&format!("{path}.backend"), &model.backend)?;
        let backend = facts.name.clone();
        if facts.devices.is_none() && model.devices.is_none() && model.strategy.is_none() {
            return Ok(None);
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
            recompute: Recompute::None,
            deterministic: true,
            keep_logits: None,
            offload: OffloadConfig { optimizer: OptimizerOffload::None, params: offload.params },
            micro_batch_size: model.batch_size,
            reduction: self.config.strategy.reduction,
            collective_timeout_s: collective_timeout_s.unwrap_or(policy.strategy.collective_timeout_s),
        };
        let role = Role { backend, ordinals, strategy };
        self.beside_policy(policy, path, &role)?;
        Ok(Some(role))
    }
}

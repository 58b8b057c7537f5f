//! The `roles` section: the models of a run, and what differs for one of them.

use std::path::PathBuf;

use serde::{Deserialize, Serialize};

use super::schema::{Config, Devices, PipelineConfig, is_default};
use super::strategy::StrategyOverride;
use crate::document::Section;

/// What differs for a role.
#[derive(Clone, Debug, Default, PartialEq, Deserialize, Serialize)]
#[serde(deny_unknown_fields)]
pub struct RolesConfig {
    /// The model that is trained.
    #[serde(default, skip_serializing_if = "is_default")]
    pub policy: RoleConfig,
    /// What the KL term, or an offline objective, compares with, a frozen copy or another model; it exists only where
    /// `kl_coef` is above 0, or the objective has one.
    #[serde(default, skip_serializing_if = "is_default")]
    pub reference: RoleConfig,
    /// The model that values what is written; it exists only with `advantage: gae`.
    #[serde(default, skip_serializing_if = "is_default")]
    pub critic: RoleConfig,
    /// Where completions to train on are sampled, if not where the policy is trained.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub rollout: Option<RolloutRoleConfig>,
}

/// Devices that only sample. They get the policy's weights before each step's sampling.
#[derive(Clone, Debug, Default, PartialEq, Deserialize, Serialize)]
#[serde(deny_unknown_fields)]
pub struct RolloutRoleConfig {
    /// Instead of the top-level `backend`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub backend: Option<String>,
    /// Instead of the top-level `devices`, and none of these: as many, or a multiple, of which every rank has an equal
    /// part. On a host, which is one device, so many engines beside the ranks.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub devices: Option<Devices>,
}

/// What a role says otherwise than the top level; what it leaves out stays as there.
#[derive(Clone, Debug, Default, PartialEq, Deserialize, Serialize)]
#[serde(deny_unknown_fields)]
pub struct RoleConfig {
    /// Of the reference alone: the folder of a published model that reads tokens as the policy does, of any size, a teacher. A
    /// relative path starts at the current folder. Default: the policy as it is after the warm-up.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub path: Option<PathBuf>,
    /// Instead of the top-level `backend`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub backend: Option<String>,
    /// Instead of the top-level `devices`; as many, since every rank holds its part of every role. These may be others.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub devices: Option<Devices>,
    /// Instead of fields of the top-level `strategy`.
    #[serde(default, skip_serializing_if = "is_default")]
    pub strategy: StrategyOverride,
}

impl RolesConfig {
    /// Reports what cannot be, of the roles of `config`.
    pub(super) fn validate(&self, config: &Config, at: &Section) {
        let policy = at.below("policy.strategy");
        self.policy.strategy.validate(&policy);
        self.policy.strategy.offload.validate_of_policy(&policy.below("offload"));
        self.reference.strategy.validate(&at.below("reference.strategy"));
        self.critic.strategy.validate(&at.below("critic.strategy"));
        for (role, path, what) in [
            ("policy", &self.policy.path, "the policy is the `model` of the top level"),
            ("critic", &self.critic.path, "a critic begins as the policy does"),
        ] {
            at.ensure(path.is_none(), &format!("{role}.path"), what, "leave it out");
        }
        let is_of_images = matches!(config.pipeline, PipelineConfig::Diffusion(_));
        at.when(at.root().is_read("pipeline")).ensure(
            self.reference.path.is_none() || !is_of_images,
            "reference.path",
            "a model of images is compared with itself as it was before training",
            "leave it out",
        );
        // With adapters nothing can be said of how the reference is held, unless it is another model.
        at.when(at.root().is_sound("model.lora")).ensure(
            !config.model.has_adapters() || self.reference == RoleConfig::default() || self.reference.path.is_some(),
            "reference",
            "with `model.lora` the reference is the policy with its adapters off: it has no strategy of its own",
            "leave it out, or name another model in `path`",
        );
    }

    /// Warns of a role that the run has none of: the same file may be run with and without a KL term.
    pub fn warn_of_idle(&self, pipeline: &PipelineConfig) {
        for (field, is_said, exists) in [
            ("roles.reference", self.reference != RoleConfig::default(), pipeline.has_reference()),
            ("roles.critic", self.critic != RoleConfig::default(), pipeline.has_critic()),
        ] {
            if !exists && is_said {
                tracing::warn!(field, "this run has no such role: what is said of it does nothing");
            }
        }
    }
}

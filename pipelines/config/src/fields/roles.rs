//! The `roles` section: the models of a run, and their differences from the top level.

use std::path::PathBuf;

use serde::{Deserialize, Serialize};

use super::schema::{Config, Devices, PipelineConfig, is_default};
use super::strategy::StrategyOverride;
use crate::document::Section;

/// Differences of the roles from the top level.
#[derive(Clone, Debug, Default, PartialEq, Deserialize, Serialize)]
#[serde(deny_unknown_fields)]
pub struct RolesConfig {
    /// The model that is trained.
    #[serde(default, skip_serializing_if = "is_default")]
    pub policy: RoleConfig,
    /// The reference of the KL term or of an offline objective: a frozen copy, or another model. The role exists only
    /// with `kl_coef` above 0, or with an objective that has a reference.
    #[serde(default, skip_serializing_if = "is_default")]
    pub reference: RoleConfig,
    /// The model that predicts values; it exists only with `advantage: gae`.
    #[serde(default, skip_serializing_if = "is_default")]
    pub critic: RoleConfig,
    /// Devices that sample the training completions. Default: the devices that train the policy.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub rollout: Option<RolloutRoleConfig>,
}

/// Devices that only sample. The devices receive the policy's weights before each step's sampling.
#[derive(Clone, Debug, Default, PartialEq, Deserialize, Serialize)]
#[serde(deny_unknown_fields)]
pub struct RolloutRoleConfig {
    /// Backend of these devices. Default: the top-level `backend`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub backend: Option<String>,
    /// Devices, none of them in the top-level `devices`. The number of devices is the number of ranks or a multiple,
    /// split equally between the ranks. On a host, which is one device, the count is a number of engines in addition to
    /// the ranks. With `hosts`: the devices of each rollout host.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub devices: Option<Devices>,
    /// Rollout hosts, which sample in place of devices of the ranks' hosts. Default: none.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub hosts: Option<RolloutHostsConfig>,
}

/// Hosts that only sample, each with `anyroll rollout CONFIG --trainer HOST`. They join before the first step or later, and
/// leave at any time.
#[derive(Clone, Copy, Debug, PartialEq, Deserialize, Serialize)]
#[serde(deny_unknown_fields, default)]
pub struct RolloutHostsConfig {
    /// Number of hosts whose devices must have joined before the first sampling, with a device for each rank; 1 or above.
    /// Default 1.
    pub min: usize,
    /// Port at which rank 0 takes rollout hosts; 1 to 65535. The ranks also listen at ports that their systems assign.
    /// Default 29600.
    pub port: u16,
    /// Time in seconds that a rank without an engine waits for a rollout host before the run ends with an error; above 0,
    /// at most 3600. Default 300.
    pub join_timeout_s: f64,
}

impl Default for RolloutHostsConfig {
    fn default() -> Self {
        Self { min: 1, port: 29600, join_timeout_s: 300.0 }
    }
}

/// Differences of a role from the top level; an absent field has the value of the top level.
#[derive(Clone, Debug, Default, PartialEq, Deserialize, Serialize)]
#[serde(deny_unknown_fields)]
pub struct RoleConfig {
    /// Folder of a published model with the policy's tokenizer, of any size, as a teacher; for the reference alone. A
    /// relative path starts at the config's folder. Default: the policy after the warm-up.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub path: Option<PathBuf>,
    /// Backend of the role. Default: the top-level `backend`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub backend: Option<String>,
    /// Devices of the role, which may differ from the top-level `devices`. The number of devices must be equal, since
    /// every rank holds its shard of every role. Default: the top-level `devices`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub devices: Option<Devices>,
    /// Fields that override those of the top-level `strategy`.
    #[serde(default, skip_serializing_if = "is_default")]
    pub strategy: StrategyOverride,
}

impl RolesConfig {
    /// Reports invalid fields of the roles of `config`.
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
        if let Some(hosts) = self.rollout.as_ref().and_then(|rollout| rollout.hosts.as_ref()) {
            let at = at.below("rollout.hosts");
            at.positive("min", hosts.min as u64);
            at.ensure(hosts.port > 0, "port", "port 0 is none", "write a port, 1 to 65535");
            at.seconds("join_timeout_s", hosts.join_timeout_s);
        }
        // With adapters the reference has no strategy, unless it is another model.
        at.when(at.root().is_sound("model.lora")).ensure(
            !config.model.has_adapters() || self.reference == RoleConfig::default() || self.reference.path.is_some(),
            "reference",
            "with `model.lora` the reference is the policy with its adapters off: it has no strategy of its own",
            "leave it out, or name another model in `path`",
        );
    }

    /// Warns of a role that the run does not have: the same file may be run with and without a KL term.
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

//! A run: a config on a machine, its ranks, their devices and threads, and each rank's part of a step.

use std::collections::BTreeMap;

use anyroll_config::{
    Config, FrozenWeights, Moments, OffloadConfig, Precision, Recompute, Reduction, RewardConfig,
    RolloutHostsConfig, ShardGroup, StrategyConfig, ZeroStage,
};

use crate::launch::Rank;

/// The machine that a config is resolved on. The caller asks the backends, since this module knows none.
#[derive(Clone, Debug)]
pub struct Machine {
    /// CPU cores that the process may use.
    pub cores: usize,
    /// All backends, in the order in which `auto` tries them.
    pub backends: Vec<BackendFacts>,
    /// This process's rank, if a launcher set one.
    pub rank: Option<Rank>,
    /// Number of hosts whose supervisors start the ranks, each those of its host; 1 under another launcher.
    pub hosts: usize,
}

/// Facts about a backend, known before a device is opened.
#[derive(Clone, Debug)]
pub struct BackendFacts {
    /// Its name in YAML.
    pub name: String,
    /// True if the backend has the math that models need; otherwise it has only memory, order and collectives.
    pub runs_models: bool,
    /// True if models on the backend can compute each token by itself, bitwise equal in any batch.
    pub adds_by_rows: bool,
    /// Number of devices on this machine; `None` for the cpu, which holds any number of ranks.
    pub devices: Option<usize>,
    /// Memory of one device in bytes, the minimum over devices, if known; for the host, all of its memory.
    pub memory_bytes: Option<usize>,
    /// Reason why the backend cannot be used on this machine; `None` if it can.
    pub unavailable: Option<String>,
}

impl BackendFacts {
    /// Number of devices to choose from: those of this machine, or any number if the backend is not on it, or the devices
    /// are not `is_here`.
    pub(crate) fn available_devices(&self, is_here: bool) -> Option<usize> {
        const MANY: usize = 1 << 16;
        self.devices.map(|devices| if self.unavailable.is_some() || !is_here { MANY } else { devices })
    }
}

impl Machine {
    /// Backends of a run that cannot be used on this machine.
    pub fn missing<'a>(&'a self, run: &'a Run) -> impl Iterator<Item = &'a BackendFacts> {
        let rollout = run.rollout.iter().filter(|rollout| rollout.hosts.is_none());
        let models = run.config.pipeline.reward().into_iter().flat_map(RewardConfig::models);
        let names: Vec<&String> = run
            .roles()
            .map(|role| &role.backend)
            .chain(rollout.map(|rollout| &rollout.backend))
            .chain(models.map(|model| &model.backend))
            .collect();
        self.backends.iter().filter(move |facts| facts.unavailable.is_some() && names.contains(&&facts.name))
    }
}

/// A config resolved on a machine.
#[derive(Clone, Debug, PartialEq)]
pub struct Run {
    /// The resolved config, written to `resolved.yaml`. Reading that file on the same machine gives the same run.
    pub config: Config,
    /// Number of ranks on all hosts.
    pub world_size: usize,
    /// CPU threads of each rank's math.
    pub threads: usize,
    /// Placement of the policy.
    pub policy: Role,
    /// Placement of the reference, a frozen copy of the policy or another model; `None` without a KL term.
    pub reference: Option<Role>,
    /// Placement of the critic; `None` without one.
    pub critic: Option<Role>,
    /// Placement of each reward model, in the order of the reward's terms; `None` for a model that each rank keeps on
    /// the host.
    pub reward_models: Vec<Option<Role>>,
    /// Devices of the rollout; `None` if the policy's devices sample.
    pub rollout: Option<RolloutRole>,
    /// Division of a step's completions.
    pub batches: Batches,
    /// Steps.
    pub steps: u64,
    /// Held-out records of an evaluation of texts; 0 without an evaluation.
    pub evaluated: usize,
    /// Held-out prompts that an offline run completes.
    pub completed: usize,
    /// True if a prefix that adjacent sequences have in common is computed once.
    pub shares_prompts: bool,
    /// The shift of the sigmas of an image run.
    pub shift: f64,
    /// Memory of a rank's device in bytes, by backend, if known; on a host an equal part of the host's memory.
    pub memory_bytes: BTreeMap<String, usize>,
    /// Reason for the stage that `zero_stage: auto` chose; `None` if the config sets a stage.
    pub stage_reason: Option<String>,
    /// Passes over the data that the steps cover; `None` if the config sets the number of steps.
    pub steps_reason: Option<String>,
}

impl Run {
    /// The resolved config as YAML, with the reasons as comments.
    pub fn to_yaml(&self) -> String {
        let pipeline = self.config.pipeline.name();
        let stage = self.stage_reason.iter().map(|reason| format!("# strategy.zero_stage: {reason}\n"));
        let steps = self.steps_reason.iter().map(|reason| format!("# pipeline.{pipeline}.steps: {reason}\n"));
        stage.chain(steps).chain([self.config.to_yaml()]).collect()
    }

    /// The reference if it has its own weights. It has none if it is the policy with its adapters disabled.
    pub fn held_reference(&self) -> Option<&Role> {
        let is_held = self.config.roles.reference.path.is_some() || !self.config.model.has_adapters();
        self.reference.as_ref().filter(|_| is_held)
    }

    /// Roles with a strategy whose stage may be unresolved.
    pub fn roles(&self) -> impl Iterator<Item = &Role> {
        let models = self.reward_models.iter().map(Option::as_ref);
        let roles = [Some(&self.policy), self.reference.as_ref(), self.critic.as_ref()].into_iter();
        roles.chain(models).flatten()
    }

    /// Memory of one of the policy's devices in bytes, if known; on a host a rank's part of the memory.
    pub fn policy_memory_bytes(&self) -> Option<usize> {
        self.memory_bytes.get(&self.policy.backend).copied()
    }

    /// Descriptions of the roles that are not on the policy's devices.
    pub fn elsewhere(&self) -> Vec<String> {
        let reward_models = self.reward_models.iter().map(|role| ("a reward model", role));
        let held = [("the reference", &self.reference), ("the critic", &self.critic)];
        let held = held.into_iter().chain(reward_models).filter_map(|(name, role)| {
            let role = role.as_ref().filter(|role| !role.is_with(&self.policy))?;
            Some(format!("{name} on {} {:?}", role.backend, role.ordinals))
        });
        held.chain(self.rollout.iter().map(RolloutRole::describe)).collect()
    }
}

/// Devices that only sample.
#[derive(Clone, Debug, PartialEq)]
pub struct RolloutRole {
    /// The backend's name.
    pub backend: String,
    /// The devices of each rank of this host, by local rank; with `hosts`, those of a rollout host, together.
    pub ordinals: Vec<Vec<usize>>,
    /// The hosts of the devices; `None` if they are on the ranks' hosts.
    pub hosts: Option<RolloutHostsConfig>,
}

impl RolloutRole {
    /// Description for the terminal.
    pub fn describe(&self) -> String {
        let devices = format!("rollout on {} {:?}", self.backend, self.ordinals.concat());
        match self.hosts {
            Some(RolloutHostsConfig { min: 1, .. }) => format!("{devices} of a rollout host or more"),
            Some(RolloutHostsConfig { min, .. }) => {
                format!("{devices} of each of {min} rollout hosts or more")
            }
            None => devices,
        }
    }

    /// Number of devices that sample for rank `rank` of `world_size`. With hosts: the number before the first step.
    pub fn devices_of(&self, rank: usize, world_size: usize) -> usize {
        let devices = self.ordinals[0].len();
        let of_hosts = |hosts: RolloutHostsConfig| (hosts.min * devices + world_size - 1 - rank) / world_size;
        self.hosts.map_or(devices, of_hosts)
    }
}

/// Placement of a model: its devices and strategy.
#[derive(Clone, Debug, PartialEq)]
pub struct Role {
    /// The backend's name.
    pub backend: String,
    /// The device of each rank of this host, by local rank.
    pub ordinals: Vec<usize>,
    /// The strategy: the role's own fields override those of the top level.
    pub strategy: Strategy,
    /// True if `zero_stage: auto` is unresolved; false in a run that starts.
    pub has_open_stage: bool,
}

/// Resolved strategy of a role: sharding, precision and micro-batches.
#[derive(Clone, Debug, PartialEq)]
pub struct Strategy {
    /// The ZeRO stage, 0 to 3; 0 while it is unresolved.
    pub zero_stage: u8,
    /// The dtype of weights and activations.
    pub precision: Precision,
    /// Form of frozen weights while no block uses them.
    pub frozen_weights: FrozenWeights,
    /// Form of the optimizer's moments.
    pub moments: Moments,
    /// Activations that backward recomputes.
    pub recompute: Recompute,
    /// True if repeated runs have bitwise equal gradients.
    pub deterministic: bool,
    /// True if a language model keeps the logits of a micro-batch from forward to backward.
    pub keep_logits: bool,
    /// States that are offloaded between uses.
    pub offload: OffloadConfig,
    /// Sequences of a rank in one forward and backward pass, unless there is a limit in tokens.
    pub micro_batch_size: usize,
    /// Tokens of a rank in one forward and backward pass.
    pub micro_batch_tokens: Option<usize>,
    /// Ranks that run their micro-batches together, each a slice of the rows.
    pub sequence_parallel: usize,
    /// Ranks that hold every layer together.
    pub tensor_parallel: usize,
    /// Ranks among which experts are spread.
    pub expert_parallel: usize,
    /// Ranks that share one replica of a model.
    pub shard_group: ShardGroup,
    /// Method of the sum in reduce collectives.
    pub reduction: Reduction,
    /// Timeout of a collective in seconds; after it the collective is aborted.
    pub collective_timeout_s: f64,
}

impl Role {
    /// Creates a role on these devices with the strategy of `config`.
    pub fn new(backend: String, ordinals: Vec<usize>, config: StrategyConfig) -> Self {
        let StrategyConfig {
            zero_stage,
            precision,
            frozen_weights,
            moments,
            recompute,
            deterministic,
            keep_logits,
            offload,
            micro_batch_size,
            micro_batch_tokens,
            sequence_parallel,
            tensor_parallel,
            expert_parallel,
            shard_group,
            reduction,
            collective_timeout_s,
        } = config;
        let (zero_stage, has_open_stage) = match zero_stage {
            ZeroStage::Stage(stage) => (stage, false),
            ZeroStage::Auto => (0, true),
        };
        let strategy = Strategy {
            zero_stage,
            precision,
            frozen_weights,
            moments,
            recompute,
            deterministic,
            keep_logits: keep_logits == Some(true),
            offload,
            micro_batch_size,
            micro_batch_tokens,
            sequence_parallel,
            tensor_parallel,
            expert_parallel,
            shard_group,
            reduction,
            collective_timeout_s,
        };
        Self { backend, ordinals, strategy, has_open_stage }
    }

    /// Sets the unresolved stage to `stage`.
    pub fn choose(&mut self, stage: u8) {
        self.strategy.zero_stage = stage;
        self.has_open_stage = false;
    }
}

impl Role {
    /// Returns true if the role has the devices and the timeout of `other`, so that one communicator serves both.
    pub fn is_with(&self, other: &Self) -> bool {
        let place = |role: &Self| (role.backend.clone(), role.ordinals.clone());
        place(self) == place(other)
            && self.strategy.collective_timeout_s == other.strategy.collective_timeout_s
    }
}

/// Division of a step's completions into ranks, mini-batches and micro-batches.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Batches {
    /// Prompts of a rank; a group is never split over ranks.
    pub prompts_per_rank: usize,
    /// Completions of a step, over all ranks.
    pub sequences_per_step: usize,
    /// A rank's completions in one optimizer update.
    pub sequences_per_update: usize,
    /// Forward and backward passes of a rank in one optimizer update; the last one may be smaller. `None` if the
    /// lengths of completions decide.
    pub micro_batches_per_update: Option<usize>,
}

//! A run: a config on a machine, its ranks, their devices and threads, and the share of each in a step.

use std::collections::BTreeMap;

use anyroll_config::{Config, OffloadConfig, Precision, Recompute, Reduction, StrategyConfig, ZeroStage};

use crate::launch::Rank;

/// What a config is resolved against. Asked of the backends by the caller, since this module knows none.
#[derive(Clone, Debug)]
pub struct Machine {
    /// CPU cores that the process may use.
    pub cores: usize,
    /// Every backend there is, in the order in which `auto` tries them.
    pub backends: Vec<BackendFacts>,
    /// This process's place among the ranks, if a launcher gave it one.
    pub rank: Option<Rank>,
}

/// What is known of a backend before a device of it is opened.
#[derive(Clone, Debug)]
pub struct BackendFacts {
    /// Its name in YAML.
    pub name: String,
    /// Whether it has the math that models need; one without has only memory, order and collectives.
    pub runs_models: bool,
    /// Whether models on it can compute each token by itself, to the bit.
    pub adds_by_rows: bool,
    /// Its devices here; `None` for the cpu, which holds as many ranks as one asks for.
    pub devices: Option<usize>,
    /// The memory of one device, the least of them, where it is known; of the host all that it has.
    pub memory_bytes: Option<usize>,
    /// Why it cannot be used here; `None` if it can.
    pub unavailable: Option<String>,
}

/// What a config comes to on a machine.
#[derive(Clone, Debug, PartialEq)]
pub struct Run {
    /// The config with nothing left to resolve: what `resolved.yaml` holds. Reading that file on the same
    /// machine gives the same run.
    pub config: Config,
    /// All ranks, on all hosts.
    pub world_size: usize,
    /// CPU threads of each rank's math.
    pub threads: usize,
    /// Where the model that is trained lives.
    pub policy: Role,
    /// Where what it is compared with lives, its frozen copy or another model; `None` without a KL term.
    pub reference: Option<Role>,
    /// Where the critic lives; `None` without one.
    pub critic: Option<Role>,
    /// How the ranks hold each reward model, in the order of the reward's terms; `None` for one that each has on the host.
    pub reward_models: Vec<Option<Role>>,
    /// Where completions are sampled, if not on the policy's devices.
    pub rollout: Option<RolloutRole>,
    /// How a step's completions are shared.
    pub batches: Batches,
    /// Steps.
    pub steps: u64,
    /// Held-out records of an evaluation of texts; 0 if there is none.
    pub evaluated: usize,
    /// Prompts of them that an offline run completes.
    pub completed: usize,
    /// Whether a prompt that neighbouring sequences share goes through the model once.
    pub shares_prompts: bool,
    /// The shift of the sigmas of a run of images.
    pub shift: f64,
    /// The memory of a rank's device by its backend, where it is known; on a host an equal part of it.
    pub memory_bytes: BTreeMap<String, usize>,
    /// Why `zero_stage: auto` is what it is; `None` where a stage was written.
    pub stage_reason: Option<String>,
    /// The passes over the data that its steps cover; `None` where steps were written.
    pub steps_reason: Option<String>,
}

impl Run {
    /// The config with nothing left to resolve as YAML, and in comments why it is so.
    pub fn to_yaml(&self) -> String {
        let pipeline = self.config.pipeline.name();
        let stage = self.stage_reason.iter().map(|reason| format!("# strategy.zero_stage: {reason}\n"));
        let steps = self.steps_reason.iter().map(|reason| format!("# pipeline.{pipeline}.steps: {reason}\n"));
        stage.chain(steps).chain([self.config.to_yaml()]).collect()
    }

    /// The reference, if it has weights of its own: it has none where it is the policy with its adapters off.
    pub fn held_reference(&self) -> Option<&Role> {
        let is_held = self.config.roles.reference.path.is_some() || !self.config.model.has_adapters();
        self.reference.as_ref().filter(|_| is_held)
    }

    /// The roles that are held by a strategy whose stage may be open.
    pub fn roles(&self) -> impl Iterator<Item = &Role> {
        let models = self.reward_models.iter().map(Option::as_ref);
        let roles = [Some(&self.policy), self.reference.as_ref(), self.critic.as_ref()].into_iter();
        roles.chain(models).flatten()
    }

    /// The memory of a device of the policy's, where it is known; on a host a rank's part of it.
    pub fn policy_memory_bytes(&self) -> Option<usize> {
        self.memory_bytes.get(&self.policy.backend).copied()
    }

    /// The roles that are not on the policy's devices, in words.
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
    /// The devices of each rank of this host, by local rank.
    pub ordinals: Vec<Vec<usize>>,
}

impl RolloutRole {
    /// In words.
    pub fn describe(&self) -> String {
        format!("rollout on {} {:?}", self.backend, self.ordinals.concat())
    }
}

/// Where and how a model is held.
#[derive(Clone, Debug, PartialEq)]
pub struct Role {
    /// The backend's name.
    pub backend: String,
    /// The device of each rank of this host, by local rank.
    pub ordinals: Vec<usize>,
    /// Its strategy, the role's own fields over the top level's.
    pub strategy: Strategy,
    /// Whether `zero_stage: auto` has still to choose its stage; in a run that starts it has.
    pub has_open_stage: bool,
}

/// How a role's weights and states are held over the ranks, and in which precision it computes, with nothing left to choose.
#[derive(Clone, Debug, PartialEq)]
pub struct Strategy {
    /// The ZeRO stage, 0 to 3; 0 as long as it is open.
    pub zero_stage: u8,
    /// The dtype of weights and activations.
    pub precision: Precision,
    /// What backward runs again.
    pub recompute: Recompute,
    /// Whether gradients repeat to the bit.
    pub deterministic: bool,
    /// Whether a language model keeps the logits of a micro-batch from forward to backward.
    pub keep_logits: bool,
    /// What leaves the device while it is not needed.
    pub offload: OffloadConfig,
    /// Sequences that a rank puts through forward and backward at a time.
    pub micro_batch_size: usize,
    /// Who adds up what the ranks send to one another.
    pub reduction: Reduction,
    /// Seconds after which a collective that has not finished is aborted.
    pub collective_timeout_s: f64,
}

impl Role {
    /// A role on these devices, held as `config` says.
    pub fn new(backend: String, ordinals: Vec<usize>, config: StrategyConfig) -> Self {
        let StrategyConfig {
            zero_stage,
            precision,
            recompute,
            deterministic,
            keep_logits,
            offload,
            micro_batch_size,
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
            recompute,
            deterministic,
            keep_logits: keep_logits == Some(true),
            offload,
            micro_batch_size,
            reduction,
            collective_timeout_s,
        };
        Self { backend, ordinals, strategy, has_open_stage }
    }

    /// Takes `stage` for the one that was open.
    pub fn choose(&mut self, stage: u8) {
        self.strategy.zero_stage = stage;
        self.has_open_stage = false;
    }
}

impl Role {
    /// Whether its ranks are those of `other` on the same devices, with one communicator.
    pub fn is_with(&self, other: &Self) -> bool {
        let place = |role: &Self| (role.backend.clone(), role.ordinals.clone());
        place(self) == place(other)
            && self.strategy.collective_timeout_s == other.strategy.collective_timeout_s
    }
}

/// How a step's completions are shared by ranks, mini-batches and micro-batches.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Batches {
    /// Prompts that a rank samples for; groups are never split over ranks.
    pub prompts_per_rank: usize,
    /// Completions of a step, over all ranks.
    pub sequences_per_step: usize,
    /// A rank's completions in one optimizer update.
    pub sequences_per_update: usize,
    /// Forward and backward passes of a rank in one optimizer update; the last may be a smaller one.
    pub micro_batches_per_update: usize,
}

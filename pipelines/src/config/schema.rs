//! The fields of a YAML file, each with its unit, its default and what its edge values mean.
//!
//! Plain data without behaviour: what must hold between fields is in `check.rs`, what depends on the
//! machine in `resolve.rs`. Enums are externally tagged (`data: {sort: {digits: 6}}`), because serde
//! buffers the other forms and an error inside would lose its line.

use std::{fmt, path::PathBuf};

use serde::de::value::SeqAccessDeserializer;
use serde::de::{self, SeqAccess, Visitor};
use serde::{Deserialize, Deserializer, Serialize, Serializer};

use super::algorithm::{AlgorithmConfig, CriticConfig};
use super::data::DataConfig;
use super::diffusion::{DiffusionConfig, DitConfig};
use super::environment::EnvironmentConfig;
use super::metrics::MetricsConfig;
use super::model::{DiffusersConfig, FolderConfig, ModelFields};
use super::offline::OfflineConfig;
use super::optimizer::OptimizerConfig;
use super::reward::RewardConfig;
use super::stage::ZeroStage;
use super::steps::{DataEpochs, Steps};

/// A whole run, as the user wrote it, with the defaults of absent fields filled in.
#[derive(Clone, Debug, PartialEq, Deserialize, Serialize)]
#[serde(deny_unknown_fields)]
pub struct Config {
    /// The run's name, the start of its folder's: letters, digits, `-`, `_` and `.`.
    pub name: String,
    /// Everything random follows from it: weights, prompts, samples. Default 0.
    #[serde(default)]
    pub seed: u64,
    /// The backend that runs the math, or `auto`: the first usable one of the machine.
    pub backend: String,
    /// The devices of this host, one rank each. Default 1.
    #[serde(default)]
    pub devices: Devices,
    /// CPU threads of a rank's math. Default: the machine's cores divided by its ranks, at least 1.
    #[serde(default)]
    pub threads: Option<usize>,
    /// The policy's architecture.
    pub model: ModelConfig,
    /// How every role is held and computed, unless `roles` says otherwise.
    pub strategy: StrategyConfig,
    /// What differs for one role. Default: nothing.
    #[serde(default, skip_serializing_if = "is_default")]
    pub roles: RolesConfig,
    /// Who may read the metrics while the run goes on. Default: nobody.
    #[serde(default, skip_serializing_if = "is_default")]
    pub metrics: MetricsConfig,
    /// What is run.
    pub pipeline: PipelineConfig,
}

/// The devices of a host: a count, `all`, or a list of ordinals.
#[derive(Clone, Debug, PartialEq)]
pub enum Devices {
    /// The first so many; on the cpu, the number of ranks.
    Count(usize),
    /// Every device that the backend has here. Not on the cpu, which has no count of its own.
    All,
    /// These ordinals, in the order of the ranks. Not on the cpu.
    List(Vec<usize>),
}

impl Default for Devices {
    fn default() -> Self {
        Self::Count(1)
    }
}

/// A model's architecture and where its weights come from: `{decoder: {...}}`, `{path: DIR}`, `{dit: {...}}` or
/// `{diffusers: DIR}`.
#[derive(Clone, Debug, PartialEq, Deserialize, Serialize)]
#[serde(try_from = "ModelFields", into = "ModelFields")]
pub enum ModelConfig {
    /// A decoder language model made from scratch, its weights drawn from the run's seed.
    Decoder(DecoderConfig),
    /// A published model.
    Folder(FolderConfig),
    /// A diffusion transformer for images of a class, made from scratch as well.
    Dit(DitConfig),
    /// A published model of images.
    Diffusers(DiffusersConfig),
}

impl ModelConfig {
    /// Whether adapters drop values in training.
    pub fn drops(&self) -> bool {
        matches!(self, Self::Folder(folder) if folder.lora.as_ref().is_some_and(|lora| lora.dropout > 0.0))
    }

    /// Whether adapters are what is trained.
    pub fn has_adapters(&self) -> bool {
        match self {
            Self::Folder(folder) => folder.lora.is_some(),
            Self::Diffusers(model) => model.lora.is_some(),
            Self::Decoder(_) | Self::Dit(_) => false,
        }
    }
}

/// The shape of a decoder: RMSNorm, rotary positions, grouped-query attention, SwiGLU.
#[derive(Clone, Debug, PartialEq, Deserialize, Serialize)]
#[serde(deny_unknown_fields)]
pub struct DecoderConfig {
    /// Width of the residual stream; a multiple of `heads`, with an even quotient (the head's width).
    pub hidden_size: usize,
    /// Number of decoder blocks.
    pub layers: usize,
    /// Number of query heads.
    pub heads: usize,
    /// Number of key and value heads, a divisor of `heads`. Default: `heads`, no sharing.
    #[serde(default)]
    pub kv_heads: Option<usize>,
    /// Width of the feed-forward's hidden layer; with experts that of `mlp_only_layers` alone.
    pub intermediate_size: usize,
    /// Makes the feed-forward a mixture of so many experts, as in Qwen3-MoE. Default: none.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub num_experts: Option<usize>,
    /// To how many of them a token goes.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub num_experts_per_tok: Option<usize>,
    /// Width of an expert's hidden layer.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub moe_intermediate_size: Option<usize>,
    /// Whether the weights of a token's experts are divided by their sum. Default true.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub norm_topk_prob: Option<bool>,
    /// Layers without experts, by number from 0. Default: none.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub mlp_only_layers: Option<Vec<usize>>,
    /// Longest sequence in tokens, prompt and completion together.
    pub max_length: usize,
    /// Base of the rotary positions' wavelengths. Default 10000.
    #[serde(default = "ten_thousand")]
    pub rope_theta: f64,
    /// Added to the mean square in RMSNorm. Default 1e-6.
    #[serde(default = "one_millionth")]
    pub norm_eps: f64,
    /// A bias on the query, key and value projections, as in Qwen2. Default false.
    #[serde(default)]
    pub qkv_bias: bool,
    /// RMSNorm on each head's query and key, as in Qwen3. Default false.
    #[serde(default)]
    pub qk_norm: bool,
    /// One matrix for the embedding and the output head. Default false.
    #[serde(default)]
    pub tie_embeddings: bool,
}

/// How a role's weights and states are held over the ranks, and in which precision it computes.
#[derive(Clone, Debug, PartialEq, Deserialize, Serialize)]
#[serde(deny_unknown_fields)]
pub struct StrategyConfig {
    /// What is sharded over the ranks: 0 nothing, 1 optimizer states, 2 gradients too, 3 weights too; `auto` is the
    /// fastest that fits the devices. Default 0.
    #[serde(default)]
    pub zero_stage: ZeroStage,
    /// The dtype of weights and activations. Default fp32.
    #[serde(default)]
    pub precision: Precision,
    /// What backward runs again instead of keeping it; the result does not depend on it. Default none.
    #[serde(default)]
    pub recompute: Recompute,
    /// Whether gradients repeat to the bit from run to run. `false` allows a device's faster kernels that do not, where
    /// it has any: attention in 16 bits on GPUs. Default true.
    #[serde(default = "yes")]
    pub deterministic: bool,
    /// Whether a language model keeps the logits of a micro-batch's targets from forward to backward, in place of making them
    /// twice. The result does not depend on it. Default: where `zero_stage: auto` finds room for them; else false.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub keep_logits: Option<bool>,
    /// What leaves the device while it is not needed; the result does not depend on it.
    #[serde(default, skip_serializing_if = "is_default")]
    pub offload: OffloadConfig,
    /// Sequences that a rank puts through forward and backward at a time. Memory grows with it; the
    /// result does not depend on it but for rounding.
    pub micro_batch_size: usize,
    /// Who adds up what the ranks send to one another. Default ordered. The ranks of all roles do it alike.
    #[serde(default)]
    pub reduction: Reduction,
    /// Seconds after which a collective that has not finished is aborted. Default 60.
    #[serde(default = "one_minute")]
    pub collective_timeout_s: f64,
}

/// Who adds up what the ranks send to one another.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Deserialize, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum Reduction {
    /// The receiver, in rank order: the same bits at every stage and on every machine.
    #[default]
    Ordered,
    /// The communication library, in an order of its own: faster on some GPUs, equal within rounding. A backend
    /// without such a library does it in order.
    Library,
}

/// A dtype of weights and activations; master weights and optimizer states are fp32 in any case.
#[derive(Clone, Copy, Debug, Default, PartialEq, Deserialize, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum Precision {
    /// 32-bit IEEE.
    #[default]
    Fp32,
    /// bfloat16.
    Bf16,
    /// 16-bit IEEE with dynamic loss scaling; `fp16` alone leaves its fields to their defaults.
    Fp16(Fp16Config),
}

/// Loss scaling: a gradient that overflows is skipped and halves the scale, and it doubles after
/// `growth_interval` steps without one.
#[derive(Clone, Copy, Debug, PartialEq, Deserialize, Serialize)]
#[serde(deny_unknown_fields, default)]
pub struct Fp16Config {
    /// What the loss is multiplied by at first; a power of two, 1 or above. Default 65536.
    pub initial_scale: f64,
    /// Optimizer steps without an overflow until it doubles, 1 or above. Default 2000.
    pub growth_interval: u32,
}

impl Default for Fp16Config {
    fn default() -> Self {
        Self { initial_scale: 65_536.0, growth_interval: 2000 }
    }
}

/// What backward runs again.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Deserialize, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum Recompute {
    /// Nothing: forward keeps the activations of every block.
    #[default]
    None,
    /// In each block what is large and cheap to make again: of a decoder the MLP's inner activations.
    Selective,
    /// Every block but the last, from its input: the activations of one exist at a time.
    Full,
}

/// What leaves the device while it is not needed.
#[derive(Clone, Debug, PartialEq, Deserialize, Serialize)]
#[serde(deny_unknown_fields, default)]
pub struct OffloadConfig {
    /// The optimizer's states, and with them the accumulated gradients, which are only let go. Default
    /// between_steps.
    pub optimizer: OptimizerOffload,
    /// The weights; `between_steps` only of the reference and the critic, since the policy needs its own at all times.
    /// Default none.
    pub params: Offload,
}

impl Default for OffloadConfig {
    fn default() -> Self {
        Self { optimizer: OptimizerOffload::BetweenSteps, params: Offload::None }
    }
}

/// When the optimizer's states leave the device.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Deserialize, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum OptimizerOffload {
    /// Never.
    None,
    /// For pinned host memory after each step, and back for the next one.
    BetweenSteps,
    /// They are never there: the host keeps and steps them, on the rank's `threads`. For models beyond the devices'
    /// memory.
    CpuStep,
}

/// When weights leave the device.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Deserialize, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum Offload {
    /// Never.
    None,
    /// For pinned host memory after each use, and back for the next one.
    BetweenSteps,
    /// They are in pinned host memory, and a block's are on the device just while it runs. For models beyond the
    /// devices' memory.
    Cpu,
}

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

/// The fields of [`StrategyConfig`] that a role says otherwise.
#[derive(Clone, Debug, Default, PartialEq, Deserialize, Serialize)]
#[serde(deny_unknown_fields)]
pub struct StrategyOverride {
    /// Instead of `strategy.zero_stage`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub zero_stage: Option<ZeroStage>,
    /// Instead of `strategy.precision`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub precision: Option<Precision>,
    /// Instead of `strategy.recompute`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub recompute: Option<Recompute>,
    /// Instead of `strategy.offload`.
    #[serde(default, skip_serializing_if = "is_default")]
    pub offload: OffloadOverride,
    /// Instead of `strategy.micro_batch_size`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub micro_batch_size: Option<usize>,
    /// Instead of `strategy.collective_timeout_s`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub collective_timeout_s: Option<f64>,
}

/// The fields of [`OffloadConfig`] that a role says otherwise.
#[derive(Clone, Debug, Default, PartialEq, Deserialize, Serialize)]
#[serde(deny_unknown_fields)]
pub struct OffloadOverride {
    /// Instead of `strategy.offload.optimizer`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub optimizer: Option<OptimizerOffload>,
    /// Instead of `strategy.offload.params`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub params: Option<Offload>,
}

/// What is run.
#[derive(Clone, Debug, PartialEq, Deserialize, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum PipelineConfig {
    /// Reinforcement learning with a verifiable reward.
    Rlvr(Box<RlvrConfig>),
    /// Training on texts that are there beforehand: supervised, or on pairs.
    Offline(Box<OfflineConfig>),
    /// Reward training of a model of images.
    Diffusion(Box<DiffusionConfig>),
}

impl Config {
    /// Whether what is trained gives texts a number, and writes none.
    pub fn trains_a_reward_model(&self) -> bool {
        matches!(&self.pipeline, PipelineConfig::Offline(offline) if offline.objective.is_of_numbers())
    }
}

impl PipelineConfig {
    /// Its name in YAML.
    pub fn name(&self) -> &'static str {
        match self {
            Self::Rlvr(_) => "rlvr",
            Self::Offline(_) => "offline",
            Self::Diffusion(_) => "diffusion",
        }
    }

    /// Whether something is compared with what the policy was.
    pub fn has_reference(&self) -> bool {
        match self {
            Self::Rlvr(rlvr) => rlvr.algorithm.kl_coef > 0.0,
            Self::Offline(offline) => offline.objective.has_reference(),
            Self::Diffusion(diffusion) => diffusion.method.kl_coef() > 0.0,
        }
    }

    /// Whether a model learns what tokens earn.
    pub fn has_critic(&self) -> bool {
        matches!(self, Self::Rlvr(rlvr) if rlvr.critic.is_some())
    }
}

/// Reinforcement learning with a verifiable reward: a supervised warm-up, then policy gradients.
#[derive(Clone, Debug, PartialEq, Deserialize, Serialize)]
#[serde(deny_unknown_fields)]
pub struct RlvrConfig {
    /// Where prompts and answers come from.
    pub data: DataConfig,
    /// What a completion earns. Default `exact`.
    #[serde(default)]
    pub reward: RewardConfig,
    /// How completions are scored.
    #[serde(default)]
    pub scoring: ScoringConfig,
    /// Which completions are trained on. Default: all.
    #[serde(default)]
    pub selection: SelectionConfig,
    /// Supervised steps on the gold answers, before the first RL step. Default: none.
    #[serde(default)]
    pub warmup: Option<WarmupConfig>,
    /// RL steps: a number, or `{data_epochs: 3}` for as many as cover passes over the data.
    pub steps: Steps<DataEpochs>,
    /// Prompts sampled in a step, over all ranks; a multiple of the number of ranks.
    pub prompts_per_step: usize,
    /// Completions of each prompt; at least 2, since advantages are relative to the group's mean, unless they are
    /// `reinforce`, `remax` or `gae`.
    pub group_size: usize,
    /// Optimizer updates that an epoch over a step's completions is cut into. Default 1.
    #[serde(default = "one")]
    pub mini_batches: usize,
    /// Passes over a step's completions. Default 1.
    #[serde(default = "one")]
    pub epochs: usize,
    /// Whether what a sequence begins with as the one before it does, such as the prompt of its group, goes through the model
    /// once for both where samples are trained on and scored: the same gradients, up to the order of sums. Default true,
    /// unless adapters drop values, of each sample others.
    #[serde(default)]
    pub share_prompts: Option<bool>,
    /// How completions are sampled.
    pub rollout: RolloutConfig,
    /// Advantages and the policy loss. Default: GRPO as in its fields.
    #[serde(default)]
    pub algorithm: AlgorithmConfig,
    /// The policy's optimizer; its schedule counts RL steps.
    pub optimizer: OptimizerConfig,
    /// What learns the values that `advantage: gae` is made from. Default: none.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub critic: Option<CriticConfig>,
    /// When and on how many held-out prompts the policy is evaluated.
    #[serde(default)]
    pub evaluation: EvaluationConfig,
    /// When the run is saved.
    #[serde(default)]
    pub checkpoint: CheckpointConfig,
}

/// How completions are scored.
#[derive(Clone, Copy, Debug, PartialEq, Deserialize, Serialize)]
#[serde(deny_unknown_fields, default)]
pub struct ScoringConfig {
    /// Completions that a rank scores at a time, beside generation; rewards that wait for a process or an endpoint need
    /// more. Default 4.
    pub workers: usize,
    /// The control: the rewards of a step are dealt to its completions at random. Their distribution stays, and nothing
    /// is to be learnt. Default false.
    pub random: bool,
}

impl Default for ScoringConfig {
    fn default() -> Self {
        Self { workers: 4, random: false }
    }
}

/// Which completions are trained on. A completion that is left out counts in no mean of the loss; its reward counts in
/// its group's advantages.
#[derive(Clone, Copy, Debug, Default, PartialEq, Deserialize, Serialize)]
#[serde(deny_unknown_fields, default)]
pub struct SelectionConfig {
    /// Dynamic sampling (DAPO): groups whose completions are all equally right are replaced by those of further prompts.
    /// Default: no.
    pub mixed_groups: Option<MixedGroupsConfig>,
    /// Groups outside of a range of difficulty are left out, or replaced with `mixed_groups`. Default: none is.
    pub difficulty: Option<DifficultyConfig>,
    /// Overlong filtering (DAPO): completions that were cut at `rollout.max_new_tokens` are left out. Default false.
    pub leave_out_cut: bool,
}

/// How long is looked for groups that teach something.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Deserialize, Serialize)]
#[serde(deny_unknown_fields)]
pub struct MixedGroupsConfig {
    /// Batches of `prompts_per_step` prompts that a step samples at most; if there are still too few groups then, others
    /// fill it up, and are counted. Default 10.
    #[serde(default = "ten_batches")]
    pub max_batches: u64,
}

/// Which groups are neither too hard nor too easy.
#[derive(Clone, Copy, Debug, PartialEq, Deserialize, Serialize)]
#[serde(deny_unknown_fields)]
pub struct DifficultyConfig {
    /// The least mean of what evaluation measures, over a group's completions.
    pub min: f64,
    /// The largest.
    pub max: f64,
}

/// Supervised steps on the gold answers.
#[derive(Clone, Debug, PartialEq, Deserialize, Serialize)]
#[serde(deny_unknown_fields)]
pub struct WarmupConfig {
    /// Optimizer steps; 0 is no warm-up.
    pub steps: u64,
    /// Records of a step, over all ranks; a multiple of the number of ranks.
    pub batch_size: usize,
    /// Instead of `strategy.micro_batch_size`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub micro_batch_size: Option<usize>,
    /// An optimizer of its own, with its own states; its schedule counts warm-up steps.
    pub optimizer: OptimizerConfig,
}

/// How completions are sampled.
#[derive(Clone, Debug, PartialEq, Deserialize, Serialize)]
#[serde(deny_unknown_fields)]
pub struct RolloutConfig {
    /// Divides the logits, in sampling and in the loss; above 0. Default 1.
    #[serde(default = "one_f64")]
    pub temperature: f64,
    /// Only the so many likeliest tokens are sampled; 0 for all. Default 0.
    #[serde(default)]
    pub top_k: usize,
    /// Only the likeliest tokens that together reach this probability; 1 for all. Default 1.
    #[serde(default = "one_f64")]
    pub top_p: f64,
    /// Only tokens with at least this part of the likeliest one's probability; 0 for all. Default 0.
    #[serde(default)]
    pub min_p: f64,
    /// Makes tokens less likely that the prompt or the completion has; 1 for not. Default 1.
    #[serde(default = "one_f64")]
    pub repetition_penalty: f64,
    /// Longest completion in tokens, its end token included; with an environment of all turns and all that is said between
    /// them.
    pub max_new_tokens: usize,
    /// A completion ends with the token that completes any of these texts, and keeps it: what was sampled is what is
    /// scored and trained on. Default: none.
    #[serde(default, skip_serializing_if = "is_default")]
    pub stop: Vec<String>,
    /// Sequences that a rank generates at a time; as one ends, the next takes its place.
    pub batch_size: usize,
    /// Whether sampling computes each log-prob to the bit as training does, whatever shares a batch; a step in which it does
    /// not ends the run. Products of matrices and attention are slower. Default false.
    #[serde(default, skip_serializing_if = "is_default")]
    pub strict: bool,
    /// Whether sampling and evaluation run on weights into which the adapters of `model.lora` are merged, once a step, and so
    /// as fast as without any. In 16 bits the sum is rounded: what is sampled from differs a little from what is trained.
    /// Default false.
    #[serde(default, skip_serializing_if = "is_default")]
    pub merge_adapters: bool,
    /// Who answers what the model writes, turn by turn. Default: nobody, a completion is one turn.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub environment: Option<EnvironmentConfig>,
    /// The memory of past tokens while completions are sampled.
    #[serde(default, skip_serializing_if = "is_default")]
    pub kv_cache: KvCacheConfig,
    /// Sampling that goes on over the steps. Default: each step samples what it trains on.
    #[serde(rename = "async", default, skip_serializing_if = "is_default")]
    pub asynchronous: AsyncConfig,
}

/// Completions that a step begins and a later one trains on. A step ends its sampling as soon as enough groups are whole, and
/// with devices that only sample as soon as the next step's are; what is still being written then goes on in the next step,
/// with its weights.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Deserialize, Serialize)]
#[serde(deny_unknown_fields, default)]
pub struct AsyncConfig {
    /// Steps whose prompts are begun beside the step's own; 0 is none, and exactly on-policy. Default 0.
    pub ahead: u64,
    /// The most steps that a token may be older than the policy it trains; `ahead` or above. A step waits for the
    /// completions that would be too old in the next one. With devices that only sample none is older than `ahead`. Default:
    /// `ahead`.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub max_staleness: Option<u64>,
}

impl AsyncConfig {
    /// The most steps that a token may be older than the policy it trains.
    pub fn staleness_bound(self) -> u64 {
        self.max_staleness.unwrap_or(self.ahead)
    }
}

/// Room for keys and values. It is taken when sampling begins and given back when it ends.
#[derive(Clone, Copy, Debug, PartialEq, Deserialize, Serialize)]
#[serde(deny_unknown_fields, default)]
pub struct KvCacheConfig {
    /// The most that the cache takes, as a part of the device's free memory, above 0, at most 1; never more than
    /// `batch_size` sequences need. Where it is short, sequences wait for one another. Default 0.85.
    pub memory: f64,
}

impl Default for KvCacheConfig {
    fn default() -> Self {
        Self { memory: 0.85 }
    }
}

/// When and on how many held-out prompts the policy is evaluated; before and after training always.
#[derive(Clone, Debug, PartialEq, Deserialize, Serialize)]
#[serde(deny_unknown_fields, default)]
pub struct EvaluationConfig {
    /// RL steps from one evaluation to the next. Default 25.
    pub every: u64,
    /// Held-out prompts, the same ones each time. Default 500, or all if they are fewer.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub prompts: Option<usize>,
    /// Completions of each prompt for pass@k, beside the greedy one. Default 4.
    pub samples: usize,
}

impl Default for EvaluationConfig {
    fn default() -> Self {
        Self { every: 25, prompts: None, samples: 4 }
    }
}

impl EvaluationConfig {
    /// How many of a config that is resolved.
    ///
    /// # Panics
    /// If it is not.
    pub fn prompts(&self) -> usize {
        self.prompts.expect("a config that is resolved says how many")
    }
}

/// When the run is saved; after the last step always.
#[derive(Clone, Debug, PartialEq, Deserialize, Serialize)]
#[serde(deny_unknown_fields, default)]
pub struct CheckpointConfig {
    /// RL steps from one checkpoint to the next. Default 50.
    pub every: u64,
    /// The newest so many are kept; at least 1. Default 2.
    pub keep_last: usize,
    /// Keeps the policy with the best `eval/greedy` as well, in the run folder's `best`. Default false.
    pub keep_best: bool,
}

impl Default for CheckpointConfig {
    fn default() -> Self {
        Self { every: 50, keep_last: 2, keep_best: false }
    }
}

impl<'de> Deserialize<'de> for Devices {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        struct DevicesVisitor;

        impl<'de> Visitor<'de> for DevicesVisitor {
            type Value = Devices;

            fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str("a count, `all`, or a list of ordinals such as [0, 2]")
            }

            fn visit_u64<E: de::Error>(self, count: u64) -> Result<Devices, E> {
                usize::try_from(count)
                    .map(Devices::Count)
                    .map_err(|_| E::invalid_value(de::Unexpected::Unsigned(count), &self))
            }

            fn visit_str<E: de::Error>(self, text: &str) -> Result<Devices, E> {
                match text {
                    "all" => Ok(Devices::All),
                    _ => Err(E::invalid_value(de::Unexpected::Str(text), &self)),
                }
            }

            fn visit_seq<A: SeqAccess<'de>>(self, ordinals: A) -> Result<Devices, A::Error> {
                Vec::deserialize(SeqAccessDeserializer::new(ordinals)).map(Devices::List)
            }
        }

        deserializer.deserialize_any(DevicesVisitor)
    }
}

impl Serialize for Devices {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        match self {
            Self::Count(count) => count.serialize(serializer),
            Self::All => "all".serialize(serializer),
            Self::List(ordinals) => ordinals.serialize(serializer),
        }
    }
}

// serde's attributes take functions only.

pub(super) fn is_default<T: Default + PartialEq>(value: &T) -> bool {
    *value == T::default()
}

fn one() -> usize {
    1
}

fn one_f64() -> f64 {
    1.0
}

fn ten_batches() -> u64 {
    10
}

fn ten_thousand() -> f64 {
    10_000.0
}

fn one_millionth() -> f64 {
    1e-6
}

fn yes() -> bool {
    true
}

fn one_minute() -> f64 {
    60.0
}

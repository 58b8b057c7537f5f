//! The `strategy` section: sharding of a role's weights and states over the ranks, and the role's precision.

pub use anyroll_strategy::{Fp16Config, FrozenWeights, Moments, Precision, Recompute};
use serde::{Deserialize, Serialize};

use super::schema::is_default;
use super::{shard_group::ShardGroup, stage::ZeroStage};
use crate::document::Section;

/// Largest initial loss scale: a loss of 1 overflows fp16 long before.
const MOST_LOSS_SCALE: f64 = 16_777_216.0;

/// Sharding of a role's weights and states over the ranks, and the role's precision.
#[derive(Clone, Debug, PartialEq, Deserialize, Serialize)]
#[serde(deny_unknown_fields)]
pub struct StrategyConfig {
    /// Stage of sharding over the ranks: 0 nothing, 1 optimizer states, 2 gradients too, 3 weights too; `auto` is the
    /// fastest that fits the devices. Default 0.
    #[serde(default)]
    pub zero_stage: ZeroStage,
    /// Dtype of weights and activations. Default fp32.
    #[serde(default)]
    pub precision: Precision,
    /// Form in which a language model with adapters keeps its frozen weights between uses: `precision` as it is, or `nf4`,
    /// 4 bits in the matrices of its layers (QLoRA). Default precision.
    #[serde(default, skip_serializing_if = "is_default")]
    pub frozen_weights: FrozenWeights,
    /// Form of AdamW's moments: `fp32`, or `8bit` with a scale for each 256 elements, which takes a quarter of their memory
    /// and changes the result a little. Default fp32.
    #[serde(default, skip_serializing_if = "is_default")]
    pub moments: Moments,
    /// Activations that backward recomputes instead of keeping. The result does not depend on recomputation.
    /// Default none.
    #[serde(default)]
    pub recompute: Recompute,
    /// True if gradients are bitwise equal from run to run. `false` allows faster kernels that are not deterministic,
    /// if a device has them: attention in 16 bits on GPUs. Default true.
    #[serde(default = "yes")]
    pub deterministic: bool,
    /// True if a language model keeps the logits of a micro-batch's targets from forward to backward, instead of
    /// computing them twice. The result does not depend on this field. Default: true if `zero_stage: auto` finds memory
    /// for the logits; else false.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub keep_logits: Option<bool>,
    /// Offload of unused states and weights. The result does not depend on offload.
    #[serde(default, skip_serializing_if = "is_default")]
    pub offload: OffloadConfig,
    /// Number of sequences of a micro-batch, a rank's forward and backward; 1 or above. Memory grows with the number;
    /// results are equal up to rounding. Default 8.
    #[serde(default = "eight")]
    pub micro_batch_size: usize,
    /// Number of tokens of a micro-batch, in place of `micro_batch_size`; 1 or above, and at least those of the longest
    /// sequence. Sequences of unequal length then fill micro-batches evenly. Only for language models. Default: none.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub micro_batch_tokens: Option<usize>,
    /// Number of ranks that run each of their micro-batches together, every rank a slice of its rows; it divides the
    /// number of ranks. A sequence of a language model may then be that many times longer than a device's memory
    /// allows. All roles share the number; results are equal up to rounding. Default 1.
    #[serde(default = "one")]
    pub sequence_parallel: usize,
    /// Number of neighbouring ranks that hold every layer of a language model together, each some heads and columns; it divides
    /// the number of ranks, the heads and the widths (Megatron-LM). Their micro-batches run one after the other, on all of them,
    /// and `zero_stage` shards each rank's part over the other groups. All roles share the number; results are equal up to
    /// rounding. Default 1.
    #[serde(default = "one", skip_serializing_if = "is_one")]
    pub tensor_parallel: usize,
    /// Number of neighbouring ranks among which the experts of every layer are spread, in training a language model with mixtures
    /// of experts; it divides the experts and the ranks of a shard group. Ranks run batches of their own, and tokens travel to
    /// their experts' ranks. All roles share the number; results are equal up to rounding. Default 1.
    #[serde(default = "one", skip_serializing_if = "is_one")]
    pub expert_parallel: usize,
    /// Ranks over which states are sharded at stages 1 to 3: `all`, the ranks of each `host`, or a number of neighbouring
    /// ranks that divides all. Several groups hold a replica each, so that weights are gathered within a group, and gradients
    /// cross groups once per step (hybrid sharding). All roles share the groups; results are equal up to rounding. Default all.
    #[serde(default, skip_serializing_if = "is_default")]
    pub shard_group: ShardGroup,
    /// Order in which collectives sum. All roles share one order. Default ordered.
    #[serde(default)]
    pub reduction: Reduction,
    /// Timeout of a collective in seconds; above 0, at most 86400. An unfinished collective is then aborted.
    /// Default 60.
    #[serde(default = "one_minute")]
    pub collective_timeout_s: f64,
}

/// The strategy of a config without the section.
impl Default for StrategyConfig {
    fn default() -> Self {
        Self {
            zero_stage: ZeroStage::Auto,
            precision: Precision::default(),
            frozen_weights: FrozenWeights::default(),
            moments: Moments::default(),
            recompute: Recompute::default(),
            deterministic: yes(),
            keep_logits: None,
            offload: OffloadConfig::default(),
            micro_batch_size: eight(),
            micro_batch_tokens: None,
            sequence_parallel: one(),
            tensor_parallel: one(),
            expert_parallel: one(),
            shard_group: ShardGroup::All,
            reduction: Reduction::default(),
            collective_timeout_s: one_minute(),
        }
    }
}

/// Order in which collectives sum.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Deserialize, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum Reduction {
    /// The receiver sums in rank order: bitwise equal at every stage and on every machine.
    #[default]
    Ordered,
    /// The communication library sums in its own order: faster on some GPUs, equal up to rounding. A backend without
    /// such a library sums in rank order.
    Library,
}

/// Offload of unused states and weights.
#[derive(Clone, Debug, PartialEq, Deserialize, Serialize)]
#[serde(deny_unknown_fields, default)]
pub struct OffloadConfig {
    /// Offload of the optimizer's states; accumulated gradients are freed with them. Default between_steps.
    pub optimizer: OptimizerOffload,
    /// Offload of the weights; `between_steps` only for the reference and the critic, since the policy needs its
    /// weights at all times. Default none.
    pub params: Offload,
}

impl Default for OffloadConfig {
    fn default() -> Self {
        Self { optimizer: OptimizerOffload::BetweenSteps, params: Offload::None }
    }
}

/// Offload of the optimizer's states.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Deserialize, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum OptimizerOffload {
    /// No offload.
    None,
    /// Offload to pinned host memory after each step, and load for the next step.
    BetweenSteps,
    /// The states stay on the host, which also runs the optimizer step, on the rank's `threads`. For models beyond the
    /// devices' memory.
    CpuStep,
}

/// Offload of weights.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Deserialize, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum Offload {
    /// No offload.
    None,
    /// Offload to pinned host memory after each use, and load for the next use.
    BetweenSteps,
    /// The weights stay in pinned host memory, and a block's weights are on the device only while the block runs. For
    /// models beyond the devices' memory.
    Cpu,
}

/// The fields of [`StrategyConfig`] that a role overrides.
#[derive(Clone, Debug, Default, PartialEq, Deserialize, Serialize)]
#[serde(deny_unknown_fields)]
pub struct StrategyOverride {
    /// Override of `strategy.zero_stage`. Default: no override.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub zero_stage: Option<ZeroStage>,
    /// Override of `strategy.precision`. Default: no override.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub precision: Option<Precision>,
    /// Override of `strategy.recompute`. Default: no override.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub recompute: Option<Recompute>,
    /// Override of `strategy.offload`.
    #[serde(default, skip_serializing_if = "is_default")]
    pub offload: OffloadOverride,
    /// Override of `strategy.micro_batch_size`. Default: no override.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub micro_batch_size: Option<usize>,
    /// Override of `strategy.micro_batch_tokens`. Default: no override; none if the role has a `micro_batch_size`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub micro_batch_tokens: Option<usize>,
    /// Override of `strategy.collective_timeout_s`. Default: no override.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub collective_timeout_s: Option<f64>,
}

/// The fields of [`OffloadConfig`] that a role overrides.
#[derive(Clone, Debug, Default, PartialEq, Deserialize, Serialize)]
#[serde(deny_unknown_fields)]
pub struct OffloadOverride {
    /// Override of `strategy.offload.optimizer`. Default: no override.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub optimizer: Option<OptimizerOffload>,
    /// Override of `strategy.offload.params`. Default: no override.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub params: Option<Offload>,
}

impl StrategyConfig {
    /// Reports invalid fields of the strategy of all roles.
    pub(super) fn validate(&self, at: &Section) {
        let OffloadConfig { optimizer, params } = self.offload;
        let said = StrategyOverride {
            zero_stage: Some(self.zero_stage),
            precision: Some(self.precision),
            recompute: Some(self.recompute),
            offload: OffloadOverride { optimizer: Some(optimizer), params: Some(params) },
            micro_batch_size: Some(self.micro_batch_size),
            micro_batch_tokens: self.micro_batch_tokens,
            collective_timeout_s: Some(self.collective_timeout_s),
        };
        said.validate(at);
        at.positive("sequence_parallel", self.sequence_parallel);
        at.positive("tensor_parallel", self.tensor_parallel);
        at.positive("expert_parallel", self.expert_parallel);
        if let ShardGroup::Ranks(ranks) = self.shard_group {
            at.positive("shard_group", ranks);
        }
        said.offload.validate_of_policy(&at.below("offload"));
    }
}

impl StrategyOverride {
    /// Reports invalid fields of a role's strategy.
    pub(super) fn validate(&self, at: &Section) {
        if let Some(ZeroStage::Stage(stage)) = self.zero_stage {
            let message = format!("there is no stage {stage}");
            at.ensure(stage <= 3, "zero_stage", message, "write 0, 1, 2, 3 or auto");
        }
        if let Some(Precision::Fp16(fp16)) = self.precision {
            validate_fp16(fp16, &at.below("precision.fp16"));
        }
        if let Some(size) = self.micro_batch_size {
            at.positive("micro_batch_size", size);
        }
        if let Some(tokens) = self.micro_batch_tokens {
            at.positive("micro_batch_tokens", tokens);
        }
        if let Some(timeout_s) = self.collective_timeout_s {
            validate_collective_timeout(at, timeout_s);
        }
    }
}

fn validate_fp16(fp16: Fp16Config, at: &Section) {
    let scale = fp16.initial_scale;
    let holds = (1.0..=MOST_LOSS_SCALE).contains(&scale) && scale.log2().fract() == 0.0;
    at.number("initial_scale", scale, holds, "that is a power of two, 1 to 2^24");
    at.positive("growth_interval", fp16.growth_interval);
}

impl OffloadOverride {
    /// Reports offload of weights for the policy, which generates between its steps.
    pub(super) fn validate_of_policy(&self, at: &Section) {
        at.ensure(
            self.params != Some(Offload::BetweenSteps),
            "params",
            "the policy's weights are needed at all times",
            "write `none` or `cpu`, or offload those of the reference: `roles.reference.strategy.offload.params`",
        );
    }
}

/// Requires a timeout of a collective in seconds.
pub(super) fn validate_collective_timeout(at: &Section, timeout_s: f64) {
    const DAY_S: f64 = 86_400.0;
    let holds = timeout_s > 0.0 && timeout_s <= DAY_S;
    at.number("collective_timeout_s", timeout_s, holds, "of seconds above 0, at most a day, 86400");
}

// serde's attributes take functions only.

fn yes() -> bool {
    true
}

fn one() -> usize {
    1
}

fn is_one(number: &usize) -> bool {
    *number == 1
}

fn eight() -> usize {
    8
}

fn one_minute() -> f64 {
    60.0
}

//! The `strategy` section: how a role's weights and states are held over the ranks, and in which precision it computes.

use serde::{Deserialize, Serialize};

use super::schema::is_default;
use super::stage::ZeroStage;
use crate::document::Section;

/// The largest first loss scale: a loss of 1 overflows fp16 long before.
const MOST_LOSS_SCALE: f64 = 16_777_216.0;

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

impl StrategyConfig {
    /// Reports what cannot be, of the strategy of all roles.
    pub(super) fn validate(&self, at: &Section) {
        let OffloadConfig { optimizer, params } = self.offload;
        let said = StrategyOverride {
            zero_stage: Some(self.zero_stage),
            precision: Some(self.precision),
            recompute: Some(self.recompute),
            offload: OffloadOverride { optimizer: Some(optimizer), params: Some(params) },
            micro_batch_size: Some(self.micro_batch_size),
            collective_timeout_s: Some(self.collective_timeout_s),
        };
        said.validate(at);
        said.offload.validate_of_policy(&at.below("offload"));
    }
}

impl StrategyOverride {
    /// Reports what cannot be, of the fields that a role has.
    pub(super) fn validate(&self, at: &Section) {
        if let Some(ZeroStage::Stage(stage)) = self.zero_stage {
            let message = format!("there is no stage {stage}");
            at.ensure(stage <= 3, "zero_stage", message, "write 0, 1, 2, 3 or auto");
        }
        if let Some(Precision::Fp16(fp16)) = self.precision {
            fp16.validate(&at.below("precision.fp16"));
        }
        if let Some(size) = self.micro_batch_size {
            at.positive("micro_batch_size", size);
        }
        if let Some(timeout_s) = self.collective_timeout_s {
            validate_collective_timeout(at, timeout_s);
        }
    }
}

impl Fp16Config {
    fn validate(self, at: &Section) {
        let scale = self.initial_scale;
        let holds = (1.0..=MOST_LOSS_SCALE).contains(&scale) && scale.log2().fract() == 0.0;
        at.number("initial_scale", scale, holds, "that is a power of two, 1 to 2^24");
        at.positive("growth_interval", self.growth_interval);
    }
}

impl OffloadOverride {
    /// Reports weights that the policy would lack: it generates between its steps.
    pub(super) fn validate_of_policy(&self, at: &Section) {
        at.ensure(
            self.params != Some(Offload::BetweenSteps),
            "params",
            "the policy's weights are needed at all times",
            "write `none` or `cpu`, or offload those of the reference: `roles.reference.strategy.offload.params`",
        );
    }
}

/// Wants a timeout of a collective in seconds.
pub(super) fn validate_collective_timeout(at: &Section, timeout_s: f64) {
    const DAY_S: f64 = 86_400.0;
    let holds = timeout_s > 0.0 && timeout_s <= DAY_S;
    at.number("collective_timeout_s", timeout_s, holds, "of seconds above 0, at most a day, 86400");
}

impl Precision {
    /// Its name in YAML.
    pub fn name(self) -> &'static str {
        match self {
            Self::Fp32 => "fp32",
            Self::Bf16 => "bf16",
            Self::Fp16(_) => "fp16",
        }
    }
}

// serde's attributes take functions only.

fn yes() -> bool {
    true
}

fn one_minute() -> f64 {
    60.0
}

//! The `optimizer` section, which every pipeline has: the update rule, gradient clipping and the learning rate over the
//! steps.

use serde::{Deserialize, Serialize};

/// An optimizer, its gradient clipping and its learning-rate schedule.
#[derive(Clone, Debug, PartialEq, Deserialize, Serialize)]
#[serde(deny_unknown_fields)]
pub struct OptimizerConfig {
    /// The update rule.
    pub adamw: AdamWConfig,
    /// Gradients are scaled down to this global norm; 0 leaves them as they are. Default 1.
    #[serde(default = "one_f64")]
    pub max_grad_norm: f64,
    /// The learning rate over the steps. Default: constant from the first step.
    #[serde(default)]
    pub schedule: ScheduleConfig,
}

/// AdamW (Loshchilov and Hutter, 2019).
#[derive(Clone, Debug, PartialEq, Deserialize, Serialize)]
#[serde(deny_unknown_fields)]
pub struct AdamWConfig {
    /// The schedule's peak; above 0.
    pub learning_rate: f64,
    /// Decay of the first and the second moment, each from 0 to below 1. Default [0.9, 0.999].
    #[serde(default = "adam_betas")]
    pub betas: [f64; 2],
    /// Added to the root of the second moment; above 0. Default 1e-8.
    #[serde(default = "adam_eps")]
    pub eps: f64,
    /// Decoupled weight decay, multiplied by the learning rate; 0 is none. Default 0.
    #[serde(default)]
    pub weight_decay: f64,
    /// What it applies to. Default matrices.
    #[serde(default)]
    pub decays: Decays,
}

/// The weights that weight decay applies to.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Deserialize, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum Decays {
    /// All but norms and biases.
    #[default]
    Matrices,
    /// All that are trained.
    All,
}

/// The learning rate over the steps, as a factor on its peak. Step `s` of the first `warmup_steps`
/// has the factor `(s + 1) / warmup_steps`.
#[derive(Clone, Debug, PartialEq, Deserialize, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum ScheduleConfig {
    /// The peak after the warm-up.
    Constant(ConstantConfig),
    /// A straight line from the peak to `final_ratio` of it at the last step.
    Linear(DecayConfig),
    /// Half a cosine from the peak to `final_ratio` of it at the last step.
    Cosine(DecayConfig),
    /// The peak, and at the end a straight line to `final_ratio` of it at the last step.
    Wsd(WsdConfig),
}

impl Default for ScheduleConfig {
    fn default() -> Self {
        Self::Constant(ConstantConfig { warmup_steps: 0 })
    }
}

/// A learning rate that stays.
#[derive(Clone, Debug, PartialEq, Deserialize, Serialize)]
#[serde(deny_unknown_fields)]
pub struct ConstantConfig {
    /// Steps of the rise from 0; 0 is none. Default 0.
    #[serde(default)]
    pub warmup_steps: u64,
}

/// A learning rate that falls until the last step.
#[derive(Clone, Debug, PartialEq, Deserialize, Serialize)]
#[serde(deny_unknown_fields)]
pub struct DecayConfig {
    /// Steps of the rise from 0, fewer than there are; 0 is none. Default 0.
    #[serde(default)]
    pub warmup_steps: u64,
    /// What is left of the peak at the last step, 0 to 1. Default 0.
    #[serde(default)]
    pub final_ratio: f64,
}

/// A learning rate that stays, and falls at the end (warm-up, stable, decay).
#[derive(Clone, Debug, PartialEq, Deserialize, Serialize)]
#[serde(deny_unknown_fields)]
pub struct WsdConfig {
    /// Steps of the rise from 0; 0 is none. Default 0.
    #[serde(default)]
    pub warmup_steps: u64,
    /// Steps of the fall, the last ones; together with `warmup_steps` at most all.
    pub decay_steps: u64,
    /// What is left of the peak at the last step, 0 to 1. Default 0.
    #[serde(default)]
    pub final_ratio: f64,
}

fn one_f64() -> f64 {
    1.0
}

fn adam_betas() -> [f64; 2] {
    [0.9, 0.999]
}

fn adam_eps() -> f64 {
    1e-8
}

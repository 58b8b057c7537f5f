//! The `optimizer` section, which every pipeline has: the update rule, gradient clipping and the learning-rate
//! schedule.

pub use anyroll_strategy::Decays;
use serde::{Deserialize, Serialize};

use super::steps::{Measure, Steps, whole_steps};
use crate::document::Section;

/// An optimizer, its gradient clipping and its learning-rate schedule.
#[derive(Clone, Debug, PartialEq, Deserialize, Serialize)]
#[serde(deny_unknown_fields)]
pub struct OptimizerConfig {
    /// The update rule.
    pub adamw: AdamWConfig,
    /// Maximum global norm of the gradients: larger gradients are scaled down to this norm; 0 disables clipping.
    /// Default 1.
    #[serde(default = "one_f64")]
    pub max_grad_norm: f64,
    /// Learning-rate schedule. Default: constant from the first step.
    #[serde(default)]
    pub schedule: ScheduleConfig,
}

/// AdamW (Loshchilov and Hutter, 2019).
#[derive(Clone, Debug, PartialEq, Deserialize, Serialize)]
#[serde(deny_unknown_fields)]
pub struct AdamWConfig {
    /// Learning rate at the schedule's peak; above 0.
    pub learning_rate: f64,
    /// Decay rates of the first and the second moment, each from 0 to below 1. Default [0.9, 0.999].
    #[serde(default = "adam_betas")]
    pub betas: [f64; 2],
    /// Constant added to the root of the second moment; above 0. Default 1e-8.
    #[serde(default = "adam_eps")]
    pub eps: f64,
    /// Decoupled weight decay, multiplied by the learning rate; 0 is none. Default 0.
    #[serde(default)]
    pub weight_decay: f64,
    /// Weights that the decay applies to. Default matrices.
    #[serde(default)]
    pub decays: Decays,
}

/// Learning-rate schedule, as a factor on the peak. Step `s` of the first `warmup_steps` has the factor
/// `(s + 1) / warmup_steps`.
#[derive(Clone, Debug, PartialEq, Deserialize, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum ScheduleConfig {
    /// The peak after the warm-up.
    Constant(ConstantConfig),
    /// A straight line from the peak to `final_ratio` of it at the last step.
    Linear(DecayConfig),
    /// Half a cosine from the peak to `final_ratio` of it at the last step.
    Cosine(DecayConfig),
    /// The peak, then a straight line to `final_ratio` of it at the last step.
    Wsd(WsdConfig),
}

impl Default for ScheduleConfig {
    fn default() -> Self {
        Self::Constant(ConstantConfig { warmup_steps: Steps::default() })
    }
}

/// A constant learning rate after the warm-up.
#[derive(Clone, Debug, PartialEq, Deserialize, Serialize)]
#[serde(deny_unknown_fields)]
pub struct ConstantConfig {
    /// Number of warm-up steps from 0, a count or `{share: 0.03}` of all steps; 0 is none. Default 0.
    #[serde(default)]
    pub warmup_steps: Steps<Share>,
}

/// A learning rate that decays until the last step.
#[derive(Clone, Debug, PartialEq, Deserialize, Serialize)]
#[serde(deny_unknown_fields)]
pub struct DecayConfig {
    /// Number of warm-up steps from 0, a count or `{share: 0.03}` of all steps, below the number of steps; 0 is none.
    /// Default 0.
    #[serde(default)]
    pub warmup_steps: Steps<Share>,
    /// Ratio of the last step's learning rate to the peak, 0 to 1. Default 0.
    #[serde(default)]
    pub final_ratio: f64,
}

/// A constant learning rate with a decay at the end (warm-up, stable, decay).
#[derive(Clone, Debug, PartialEq, Deserialize, Serialize)]
#[serde(deny_unknown_fields)]
pub struct WsdConfig {
    /// Number of warm-up steps from 0, a count or `{share: 0.03}` of all steps; 0 is none. Default 0.
    #[serde(default)]
    pub warmup_steps: Steps<Share>,
    /// Number of decay steps at the end, a count or `{share: 0.1}` of all steps; together with `warmup_steps` at most
    /// all.
    pub decay_steps: Steps<Share>,
    /// Ratio of the last step's learning rate to the peak, 0 to 1. Default 0.
    #[serde(default)]
    pub final_ratio: f64,
}

/// A part of a schedule as a fraction of the schedule's steps.
#[derive(Clone, Copy, Debug, PartialEq, Deserialize, Serialize)]
#[serde(deny_unknown_fields)]
pub struct Share {
    /// Fraction of all steps, 0 to 1; the part has `ceil(share x steps)` steps, as with `warmup_ratio` in
    /// `transformers`.
    pub share: f64,
}

impl Measure for Share {
    const EXAMPLE: &'static str = "{share: 0.1}";
}

impl Default for Steps<Share> {
    fn default() -> Self {
        Self::Count(0)
    }
}

impl Steps<Share> {
    /// Returns the number of these steps in a schedule of `steps` steps.
    pub fn of(self, steps: u64) -> u64 {
        match self {
            Self::Count(count) => count,
            Self::By(Share { share }) => whole_steps(share * steps as f64),
        }
    }
}

impl OptimizerConfig {
    /// Reports invalid fields, for any number of steps.
    pub(super) fn validate(&self, at: &Section) {
        let AdamWConfig { learning_rate, betas, eps, weight_decay, decays: _ } = self.adamw;
        at.number("adamw.learning_rate", learning_rate, learning_rate > 0.0, "above 0");
        for beta in betas {
            at.number("adamw.betas", beta, (0.0..1.0).contains(&beta), "from 0 to below 1, twice");
        }
        at.number("adamw.eps", eps, eps > 0.0, "above 0");
        at.number("adamw.weight_decay", weight_decay, weight_decay >= 0.0, "0 or above");
        let norm = self.max_grad_norm;
        at.number("max_grad_norm", norm, norm >= 0.0, "0 or above");
        self.schedule.validate(&at.below("schedule"));
    }

    /// Reports a schedule that does not fit into `steps`.
    pub fn validate_over(&self, steps: u64, at: &Section) {
        self.schedule.validate_over(steps, &at.below("schedule"));
    }
}

impl ScheduleConfig {
    fn validate(&self, at: &Section) {
        let ratio = |name: &str, ratio: f64| {
            at.number(&format!("{name}.final_ratio"), ratio, (0.0..=1.0).contains(&ratio), "from 0 to 1");
        };
        let share = |name: &str, steps: Steps<Share>| {
            if let Steps::By(Share { share }) = steps {
                at.number(&format!("{name}.share"), share, (0.0..=1.0).contains(&share), "from 0 to 1");
            }
        };
        match self {
            Self::Constant(constant) => share("constant.warmup_steps", constant.warmup_steps),
            Self::Linear(decay) => {
                share("linear.warmup_steps", decay.warmup_steps);
                ratio("linear", decay.final_ratio);
            }
            Self::Cosine(decay) => {
                share("cosine.warmup_steps", decay.warmup_steps);
                ratio("cosine", decay.final_ratio);
            }
            Self::Wsd(wsd) => {
                share("wsd.warmup_steps", wsd.warmup_steps);
                share("wsd.decay_steps", wsd.decay_steps);
                ratio("wsd", wsd.final_ratio);
            }
        }
    }

    fn validate_over(&self, steps: u64, at: &Section) {
        let (kind, warmup_steps) = match self {
            Self::Constant(_) => return,
            Self::Linear(decay) => ("linear", decay.warmup_steps),
            Self::Cosine(decay) => ("cosine", decay.warmup_steps),
            Self::Wsd(wsd) => ("wsd", wsd.warmup_steps),
        };
        let at = at.below(kind);
        let warmup_steps = warmup_steps.of(steps);
        at.given(&["warmup_steps"]).ensure(
            warmup_steps < steps.max(1),
            "warmup_steps",
            format!("{warmup_steps} of {steps} steps leave none to fall"),
            "write fewer than the steps",
        );
        let Self::Wsd(WsdConfig { decay_steps, .. }) = self else { return };
        let decay_steps = decay_steps.of(steps);
        at.given(&["warmup_steps", "decay_steps"]).ensure(
            decay_steps > 0 && decay_steps <= steps.max(1).saturating_sub(warmup_steps),
            "decay_steps",
            format!("{decay_steps} do not fit in {steps} steps, {warmup_steps} of which are the warm-up"),
            "write 1 or above, and no more than are left; `constant` never falls",
        );
    }
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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_share_is_rounded_up_as_in_transformers() {
        // `TrainingArguments.get_warmup_steps`: math.ceil(num_training_steps * warmup_ratio).
        for (share, steps, expected) in
            [(0.1, 68, 7), (0.03, 100, 3), (0.03, 101, 4), (0.0, 9, 0), (1.0, 9, 9), (0.001, 20, 1)]
        {
            assert_eq!(Steps::By(Share { share }).of(steps), expected, "{share} of {steps}");
        }
        assert_eq!(Steps::Count(5).of(3), 5);
    }
}

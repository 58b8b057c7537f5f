//! The sections of a config that name an advantage and its constants, and what shapes rewards before it.

use serde::{Deserialize, Serialize};

/// Normalization of rewards: (reward - mean) / (std + 1e-6).
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Deserialize, Serialize)]
#[serde(deny_unknown_fields, default)]
pub struct RewardNormConfig {
    /// Whose mean is taken off. Default `none`.
    pub mean: Over,
    /// Whose standard deviation, the unbiased one, rewards are divided by. Default `none`.
    pub std: Over,
}

/// The rewards that a statistic is of.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Deserialize, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum Over {
    /// None: nothing is done.
    #[default]
    None,
    /// The prompt's completions.
    Group,
    /// All completions of the step.
    Batch,
    /// All completions of all steps so far, this one included.
    Running,
}

/// The estimator that turns rewards into advantages.
#[derive(Clone, Copy, Debug, PartialEq, Deserialize, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum Advantage {
    /// Less the group's mean, over a standard deviation.
    Grpo(GrpoConfig),
    /// Each term of the reward as `grpo` has it, weighed and summed, over the standard deviation of the step's sums.
    Gdpo(GdpoConfig),
    /// Less the mean of the group's other rewards.
    Rloo,
    /// Less the group's mean, in which each reward weighs as much as its completion is long.
    Opo,
    /// Less the group's mean, times samples over samples in groups whose rewards differ.
    Gpg,
    /// The return from each token on, without a baseline; groups may be of 1.
    Reinforce(ReinforceConfig),
    /// Less the reward of the prompt's greedy completion, which is sampled and scored beside the group; groups may be
    /// of 1.
    Remax,
    /// 0: rewards are measured, and move nothing beside a KL divergence; groups may be of 1.
    None,
    /// Generalized advantage estimates from a critic's values, a token each: PPO. It needs `critic`; groups may be of 1.
    Gae(GaeConfig),
}

impl Default for Advantage {
    fn default() -> Self {
        Self::Grpo(GrpoConfig::default())
    }
}

/// GRPO's constants.
#[derive(Clone, Copy, Debug, PartialEq, Deserialize, Serialize)]
#[serde(deny_unknown_fields, default)]
pub struct GrpoConfig {
    /// Divisor of the advantages. Default `group_std`.
    pub scale: Scale,
    /// Added to the standard deviation; above 0. Default 1e-6.
    pub eps: f64,
}

impl Default for GrpoConfig {
    fn default() -> Self {
        Self { scale: Scale::default(), eps: 1e-6 }
    }
}

/// GDPO's constants.
#[derive(Clone, Copy, Debug, PartialEq, Deserialize, Serialize)]
#[serde(deny_unknown_fields, default)]
pub struct GdpoConfig {
    /// Added to both standard deviations, of a group's rewards of a term and of the step's sums; above 0. Default 1e-4.
    pub eps: f64,
}

impl Default for GdpoConfig {
    fn default() -> Self {
        Self { eps: 1e-4 }
    }
}

/// Divisor of GRPO's advantages; deviations are unbiased.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Deserialize, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum Scale {
    /// The standard deviation of the group's rewards.
    #[default]
    GroupStd,
    /// The standard deviation of the rewards of the whole step.
    BatchStd,
    /// Nothing: Dr. GRPO.
    None,
}

/// The discounted return's constants.
#[derive(Clone, Copy, Debug, PartialEq, Deserialize, Serialize)]
#[serde(deny_unknown_fields, default)]
pub struct ReinforceConfig {
    /// Weight of a reward one token later; above 0, at most 1. Default 1.
    pub gamma: f64,
}

impl Default for ReinforceConfig {
    fn default() -> Self {
        Self { gamma: 1.0 }
    }
}

/// The constants of generalized advantage estimation.
#[derive(Clone, Copy, Debug, PartialEq, Deserialize, Serialize)]
#[serde(deny_unknown_fields, default)]
pub struct GaeConfig {
    /// Weight of a reward one token later; above 0, at most 1. Default 1.
    pub gamma: f64,
    /// Reach of an estimate beyond the next value: 0 not at all, 1 to the end; 0 to 1. Default 0.95.
    pub lambda: f64,
}

impl Default for GaeConfig {
    fn default() -> Self {
        Self { gamma: 1.0, lambda: 0.95 }
    }
}

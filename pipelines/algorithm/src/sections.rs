//! The section of a config that shapes rewards before their advantages.

use serde::{Deserialize, Serialize};

/// Normalization of rewards: (reward - mean) / (std + 1e-6).
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Deserialize, Serialize)]
#[serde(deny_unknown_fields, default)]
pub struct RewardNormConfig {
    /// Rewards whose mean is subtracted. Default `none`.
    pub mean: Over,
    /// Rewards whose unbiased standard deviation is the divisor. Default `none`.
    pub std: Over,
}

/// The rewards of a statistic.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Deserialize, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum Over {
    /// No rewards: the statistic is not used.
    #[default]
    None,
    /// The completions of the prompt.
    Group,
    /// All completions of the step.
    Batch,
    /// All completions of all steps so far, this step included.
    Running,
}

//! The section of a config that shapes rewards before their advantages.

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

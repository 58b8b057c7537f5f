//! GRPO: rewards minus their group's mean, divided by a standard deviation.

use serde::{Deserialize, Serialize};

use super::{Earned, Estimator, Range, centered};
use crate::Moments;

/// GRPO's constants.
#[derive(Clone, Copy, Debug, PartialEq, Deserialize, Serialize)]
#[serde(deny_unknown_fields, default)]
pub struct GrpoConfig {
    /// Divisor of the advantages. Default `group_std`.
    pub scale: Scale,
    /// Constant added to the standard deviation; above 0. Default 1e-6.
    pub eps: f64,
}

impl Default for GrpoConfig {
    fn default() -> Self {
        Self { scale: Scale::default(), eps: 1e-6 }
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
    /// No divisor: Dr. GRPO.
    None,
}

impl Estimator for GrpoConfig {
    fn title(&self, is_whitened: bool) -> &'static str {
        match (self.scale, is_whitened) {
            (Scale::None, true) => "REINFORCE++ with a baseline",
            (Scale::None, false) => "Dr. GRPO",
            _ => "GRPO",
        }
    }

    fn ranges(&self) -> Vec<Range> {
        vec![Range::new("eps", self.eps, self.eps > 0.0, "above 0")]
    }

    /// (r - mean) / (std + eps) (Shao et al., 2024, section 4.1), with the unbiased standard deviation of the group's
    /// or the step's rewards. Without a scale it is r - mean, which is Dr. GRPO (Liu et al., 2025).
    fn of_samples(&self, earned: &Earned) -> Vec<f64> {
        let batch_std = match self.scale {
            Scale::BatchStd => Some(Moments::of(earned.rewards).std()),
            Scale::GroupStd | Scale::None => None,
        };
        centered(earned.rewards, earned.group_size, |group| match self.scale {
            Scale::None => 1.0,
            Scale::GroupStd | Scale::BatchStd => {
                batch_std.unwrap_or_else(|| Moments::of(group).std()) + self.eps
            }
        })
    }
}

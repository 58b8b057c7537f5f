//! REINFORCE: the return from each token on, without a baseline.

use serde::{Deserialize, Serialize};

use super::{Earned, Estimator, Range};

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

impl Estimator for ReinforceConfig {
    fn title(&self, is_whitened: bool) -> &'static str {
        if is_whitened { "REINFORCE++" } else { "REINFORCE" }
    }

    fn ranges(&self) -> Vec<Range> {
        let holds = self.gamma > 0.0 && self.gamma <= 1.0;
        vec![Range::new("gamma", self.gamma, holds, "above 0, at most 1")]
    }

    fn needs_groups(&self) -> bool {
        false
    }

    /// The reward r. The discount applies between tokens: see [`returns()`](crate::returns()).
    fn of_samples(&self, earned: &Earned) -> Vec<f64> {
        earned.rewards.to_vec()
    }
}

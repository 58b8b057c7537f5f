//! RLOO: rewards minus the mean of the group's other rewards.

use super::{Earned, Estimator, centered};

/// RLOO: rewards minus the mean of the group's other rewards.
#[derive(Debug)]
pub struct Rloo;

impl Estimator for Rloo {
    fn title(&self, _: bool) -> &'static str {
        "RLOO"
    }

    /// (r - mean) n / (n - 1), which equals r minus the mean of the other n - 1 rewards (Ahmadian et al., 2024).
    fn of_samples(&self, earned: &Earned) -> Vec<f64> {
        let n = earned.group_size as f64;
        centered(earned.rewards, earned.group_size, |_| (n - 1.0) / n)
    }
}

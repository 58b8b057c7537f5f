//! No advantages: on-policy distillation, in which only a KL divergence changes the policy.

use super::{Earned, Estimator};

/// No advantages: on-policy distillation, in which only a KL divergence changes the policy.
#[derive(Debug)]
pub struct None;

impl Estimator for None {
    fn title(&self, _: bool) -> &'static str {
        "on-policy distillation"
    }

    fn needs_groups(&self) -> bool {
        false
    }

    fn refuses_turns(&self) -> Option<&'static str> {
        Some("`none` has rewards move nothing")
    }

    fn of_samples(&self, earned: &Earned) -> Vec<f64> {
        vec![0.0; earned.rewards.len()]
    }
}

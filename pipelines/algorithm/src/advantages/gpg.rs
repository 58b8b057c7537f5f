//! GPG: rewards minus their group's mean, scaled up for groups without a gradient.

use super::{Earned, Estimator, centered};
use crate::{groups, is_constant};

/// GPG: rewards minus their group's mean, scaled up for groups without a gradient.
#[derive(Debug)]
pub struct Gpg;

impl Estimator for Gpg {
    fn title(&self, _: bool) -> &'static str {
        "GPG"
    }

    fn refuses_turns(&self) -> Option<&'static str> {
        Some("`gpg` counts groups whose rewards are equal, and those of turns are many")
    }

    /// (r - mean) B / (B - M), with M of the B samples in groups of equal rewards (Chu et al., 2025).
    fn of_samples(&self, earned: &Earned) -> Vec<f64> {
        let Earned { rewards, group_size, .. } = *earned;
        let all = rewards.len() / group_size;
        let mixed = groups(rewards, group_size).filter(|group| !is_constant(group)).count();
        centered(rewards, group_size, |_| mixed as f64 / all as f64)
    }
}

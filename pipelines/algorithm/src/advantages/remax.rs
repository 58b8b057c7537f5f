//! ReMax: rewards minus that of the prompt's greedy completion.

use super::{Earned, Estimator};
use crate::groups;

/// ReMax: rewards minus that of the prompt's greedy completion.
#[derive(Debug)]
pub struct Remax;

impl Estimator for Remax {
    fn title(&self, _: bool) -> &'static str {
        "ReMax"
    }

    fn needs_groups(&self) -> bool {
        false
    }

    fn refuses_turns(&self) -> Option<&'static str> {
        Some("`remax` compares with a greedy episode, whose turns are others")
    }

    /// r minus the reward of the group's greedy completion (Li et al., 2024). A group of equal rewards may therefore
    /// have advantages other than 0.
    fn of_samples(&self, earned: &Earned) -> Vec<f64> {
        let Earned { rewards, greedy, group_size, .. } = *earned;
        assert_eq!(rewards.len(), greedy.len() * group_size, "a greedy reward for each group");
        let of_groups = groups(rewards, group_size).zip(greedy);
        of_groups.flat_map(|(group, greedy)| group.iter().map(move |reward| reward - greedy)).collect()
    }
}

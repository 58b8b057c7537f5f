//! GDPO: each term of the reward is normalized within its group, as in GRPO, before terms are summed.

use serde::{Deserialize, Serialize};

use super::{Earned, Estimator, Range, centered};
use crate::Moments;

/// GDPO's constants.
#[derive(Clone, Copy, Debug, PartialEq, Deserialize, Serialize)]
#[serde(deny_unknown_fields, default)]
pub struct GdpoConfig {
    /// Constant added to both standard deviations, of a group's rewards of a term and of the step's sums; above 0.
    /// Default 1e-4.
    pub eps: f64,
}

impl Default for GdpoConfig {
    fn default() -> Self {
        Self { eps: 1e-4 }
    }
}

impl Estimator for GdpoConfig {
    fn title(&self, _: bool) -> &'static str {
        "GDPO"
    }

    fn ranges(&self) -> Vec<Range> {
        vec![Range::new("eps", self.eps, self.eps > 0.0, "above 0")]
    }

    fn refuses_turns(&self) -> Option<&'static str> {
        Some("`gdpo` normalizes what terms say of whole completions")
    }

    /// r / (std of all + eps), where r are sums of normalized terms, with the mean 0: see [`decoupled`] (Liu et al.,
    /// 2026).
    fn of_samples(&self, earned: &Earned) -> Vec<f64> {
        let scale = Moments::of(earned.rewards).std() + self.eps;
        earned.rewards.iter().map(|reward| reward / scale).collect()
    }
}

/// Weighted sum of the terms' rewards, each normalized in its group to (r - mean) / (std + eps) (GDPO: Liu et al.,
/// 2026, 2601.05242, equation 4). A term's weight is therefore independent of the spread of its rewards, and sums of
/// different rewards stay different. `terms` are weights and the rewards of all samples, groups one after another. The
/// mean over a group is 0, up to rounding.
///
/// # Panics
///
/// Panics if `group_size` does not divide the number of rewards.
pub fn decoupled(terms: &[(f64, Vec<f64>)], group_size: usize, eps: f64) -> Vec<f64> {
    let samples = terms.first().map_or(0, |(_, rewards)| rewards.len());
    let mut sums = vec![0.0; samples];
    for (weight, rewards) in terms {
        let normalized = centered(rewards, group_size, |group| Moments::of(group).std() + eps);
        sums.iter_mut().zip(normalized).for_each(|(sum, reward)| *sum += weight * reward);
    }
    sums
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::tests::{check_near, numbers, papers};

    #[test]
    fn terms_are_normalized_each_as_the_paper_has_it() {
        let golden = papers();
        let weights = numbers(&golden["gdpo_weights"]);
        let terms = golden["gdpo_terms"].as_array().unwrap().iter().map(numbers);
        let terms: Vec<(f64, Vec<f64>)> = weights.into_iter().zip(terms).collect();
        let sums = decoupled(&terms, 4, 1e-4);
        let earned = Earned { rewards: &sums, lengths: &[1.0; 12], greedy: &[], group_size: 4 };
        let found = GdpoConfig::default().of_samples(&earned);
        check_near(&found, &numbers(&golden["gdpo"]));
        // Sums that are equal in GRPO: 1 of one term differs from 1 of the other if the terms are not equally rare.
        let (format, answer) = (vec![1.0, 1.0, 1.0, 0.0], vec![0.0, 0.0, 1.0, 1.0]);
        let sums = decoupled(&[(1.0, format), (1.0, answer)], 4, 1e-4);
        assert!(sums[0] == sums[1] && (sums[0] - sums[3]).abs() > 0.1, "{sums:?}");
    }
}

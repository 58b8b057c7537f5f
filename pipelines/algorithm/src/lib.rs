//! The formulas of policy optimization: advantages on the host, on plain slices, and [losses] on tensors.
//!
//! A *group* is the completions of one prompt; groups lie one after another.

#![forbid(unsafe_code)]

pub mod advantages;
mod choices;
mod intervals;
pub mod losses;
mod moments;
mod normalize;
mod range;
mod returns;
pub mod sections;

pub use advantages::{Earned, decoupled, gae};
pub use intervals::{Method, interval};
pub use moments::Moments;
pub use normalize::normalize;
pub use range::Range;
pub use returns::{returns, turn_advantages};

/// Numbers of a step's groups, by the learning signal of their rewards.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct GroupCounts {
    /// Number of groups in which every completion has the highest reward, 1 or above.
    pub all_right: usize,
    /// Number of groups in which every reward is 0.
    pub all_wrong: usize,
    /// Number of other groups whose rewards are equal: a partial reward for each completion.
    pub all_partial: usize,
    /// Number of groups whose rewards differ: the only groups with advantages other than 0.
    pub mixed: usize,
}

/// Counts groups by their rewards, which range from 0 to 1.
///
/// # Panics
///
/// Panics if `group_size` does not divide the number of rewards.
pub fn count_groups(rewards: &[f64], group_size: usize) -> GroupCounts {
    let mut counts = GroupCounts::default();
    for group in groups(rewards, group_size) {
        match group[0] {
            _ if !is_constant(group) => counts.mixed += 1,
            reward if reward >= 1.0 => counts.all_right += 1,
            reward if reward <= 0.0 => counts.all_wrong += 1,
            _ => counts.all_partial += 1,
        }
    }
    counts
}

/// Returns the unbiased estimate of the probability that one of `k` samples is right (pass@k). `correct` of `samples`
/// are right: `1 - C(samples - correct, k) / C(samples, k)` (Chen et al., 2021, equation 1).
///
/// # Panics
///
/// Panics unless `correct <= samples` and `1 <= k <= samples`.
pub fn pass_at_k(samples: usize, correct: usize, k: usize) -> f64 {
    assert!(correct <= samples && (1..=samples).contains(&k), "pass@{k} of {correct} right in {samples}");
    if samples - correct < k {
        return 1.0;
    }
    // C(n - c, k) / C(n, k) as a product, since the coefficients overflow.
    let all_wrong: f64 = (samples - correct + 1..=samples).map(|i| 1.0 - k as f64 / i as f64).product();
    1.0 - all_wrong
}

/// Returns the probability that the most frequent of some answers is right (maj@k); a tie is broken uniformly at
/// random. Each answer has a flag that is true if the answer is right.
///
/// # Panics
///
/// Panics if there is no answer.
pub fn majority(answers: &[(String, bool)]) -> f64 {
    let votes = |answer: &str| answers.iter().filter(|(other, _)| other == answer).count();
    let most = answers.iter().map(|(answer, _)| votes(answer)).max().expect("an answer");
    // The most frequent answers are equally often in the list, so that a mean over all their entries is a mean over
    // answers.
    let leading: Vec<bool> =
        answers.iter().filter(|(answer, _)| votes(answer) == most).map(|(_, right)| *right).collect();
    leading.iter().filter(|right| **right).count() as f64 / leading.len() as f64
}

/// Returns the rewards, in which a sample that is left out has the mean of its group's other rewards. The sample's
/// advantage is then 0, and the mean of the others is unchanged. In a group without a reward each sample has the mean
/// of all rewards. Returns `None` if there is no reward.
pub fn fill_missing(rewards: &[Option<f64>], group_size: usize) -> Option<Vec<f64>> {
    let mean = |rewards: &[Option<f64>]| {
        let scored: Vec<f64> = rewards.iter().copied().flatten().collect();
        (!scored.is_empty()).then(|| scored.iter().sum::<f64>() / scored.len() as f64)
    };
    let of_all = mean(rewards)?;
    let groups = rewards.chunks(group_size);
    let filled = groups.flat_map(|group| {
        let missing = mean(group).unwrap_or(of_all);
        group.iter().map(move |reward| reward.unwrap_or(missing))
    });
    Some(filled.collect())
}

fn groups(rewards: &[f64], group_size: usize) -> std::slice::ChunksExact<'_, f64> {
    assert_eq!(rewards.len() % group_size, 0, "{} rewards are no groups of {group_size}", rewards.len());
    rewards.chunks_exact(group_size)
}

fn is_constant(group: &[f64]) -> bool {
    group.iter().all(|reward| *reward == group[0])
}

#[cfg(test)]
mod tests {
    use super::*;

    pub fn golden() -> serde_json::Value {
        read("advantages")
    }

    pub fn papers() -> serde_json::Value {
        read("papers")
    }

    fn read(name: &str) -> serde_json::Value {
        let path = format!(concat!(env!("CARGO_MANIFEST_DIR"), "/../../tests/golden/{}.json"), name);
        serde_json::from_str(&std::fs::read_to_string(path).unwrap()).unwrap()
    }

    pub fn numbers(value: &serde_json::Value) -> Vec<f64> {
        serde_json::from_value(value.clone()).unwrap()
    }

    pub fn check_near(found: &[f64], expected: &[f64]) {
        assert_eq!(found.len(), expected.len());
        for (found, expected) in found.iter().zip(expected) {
            assert!((found - expected).abs() < 1e-6, "{found} is not {expected}");
        }
    }

    #[test]
    fn pass_at_k_equals_the_reference() {
        for (k, expected) in golden()["pass_at_k_16_samples_3_correct"].as_object().unwrap() {
            check_near(&[pass_at_k(16, 3, k.parse().unwrap())], &[expected.as_f64().unwrap()]);
        }
        assert_eq!(pass_at_k(4, 0, 4), 0.0);
        assert_eq!(pass_at_k(4, 1, 4), 1.0);
        assert_eq!(pass_at_k(4, 4, 1), 1.0);
    }

    #[test]
    fn the_majority_decides_and_a_tie_is_shared() {
        let check = |answers: &[(&str, bool)], expected: f64| {
            let answers: Vec<_> =
                answers.iter().map(|(answer, right)| (answer.to_string(), *right)).collect();
            assert_eq!(majority(&answers), expected, "{answers:?}");
        };
        check(&[("4", true)], 1.0);
        check(&[("4", true), ("5", false), ("5", false)], 0.0);
        check(&[("4", true), ("5", false), ("4", true)], 1.0);
        check(&[("4", true), ("5", false)], 0.5);
        check(&[("4", true), ("4", true), ("5", false), ("5", false), ("6", false)], 0.5);
    }

    #[test]
    fn groups_are_counted_by_what_they_teach() {
        let rewards = [1.0, 1.0, 0.0, 0.0, 0.0, 1.0, 0.5, 0.5, 0.2, 0.3];
        let expected = GroupCounts { all_right: 1, all_wrong: 1, all_partial: 1, mixed: 2 };
        assert_eq!(count_groups(&rewards, 2), expected);
    }

    #[test]
    fn what_is_left_out_has_the_mean_of_the_others() {
        let check = |rewards: &[Option<f64>], expected: Option<&[f64]>| {
            assert_eq!(fill_missing(rewards, 3).as_deref(), expected, "{rewards:?}");
        };
        let (zero, one) = (Some(0.0), Some(1.0));
        check(&[one, zero, one], Some(&[1.0, 0.0, 1.0]));
        check(&[one, None, zero], Some(&[1.0, 0.5, 0.0]));
        check(&[one, None, None], Some(&[1.0, 1.0, 1.0]));
        check(&[one, zero, None, None, None, None], Some(&[1.0, 0.0, 0.5, 0.5, 0.5, 0.5]));
        check(&[None, None, None], None);
    }
}

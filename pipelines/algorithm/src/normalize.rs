//! Normalization of rewards before advantages.

use super::{
    Moments,
    sections::{Over, RewardNormConfig},
};

/// Constant added to standard deviations, as in ROLL.
const EPS: f64 = 1e-6;

/// Replaces rewards by (reward - mean) / (std + 1e-6), with each statistic over the rewards that `config` names.
/// `running` are the moments of the steps before, and are updated with those of this step.
///
/// # Panics
///
/// Panics if `group_size` does not divide the number of rewards.
pub fn normalize(config: RewardNormConfig, rewards: &mut [f64], group_size: usize, running: &mut Moments) {
    assert_eq!(rewards.len() % group_size, 0, "{} rewards are no groups of {group_size}", rewards.len());
    let batch = Moments::of(rewards);
    *running = running.joined(&batch);
    for group in rewards.chunks_exact_mut(group_size) {
        let of_group = Moments::of(group);
        let moments = |over| match over {
            Over::None => None,
            Over::Group => Some(of_group),
            Over::Batch => Some(batch),
            Over::Running => Some(*running),
        };
        let mean = moments(config.mean).map_or(0.0, |moments| moments.mean);
        let scale = moments(config.std).map_or(1.0, |moments| moments.std() + EPS);
        group.iter_mut().for_each(|reward| *reward = (*reward - mean) / scale);
    }
}

#[cfg(test)]
mod tests {
    use super::super::tests::check_near;
    use super::*;

    fn normalized(mean: Over, std: Over, rewards: &[f64], running: &mut Moments) -> Vec<f64> {
        let mut rewards = rewards.to_vec();
        normalize(RewardNormConfig { mean, std }, &mut rewards, 2, running);
        rewards
    }

    #[test]
    fn each_statistic_is_of_what_it_says() {
        let rewards = [1.0, 3.0, 6.0, 6.0];
        let check = |mean, std, expected: [f64; 4]| {
            let found = normalized(mean, std, &rewards, &mut Moments::default());
            assert!(
                found.iter().zip(expected).all(|(a, b)| (a - b).abs() < 1e-5),
                "{mean:?}, {std:?}: {found:?}"
            );
        };
        // Computed by hand: the mean is 4, the squared differences are 9, 1, 4, 4; the first group's std is the root
        // of 2.
        let std = 6f64.sqrt();
        check(Over::None, Over::None, rewards);
        check(Over::Group, Over::None, [-1.0, 1.0, 0.0, 0.0]);
        check(Over::Batch, Over::Batch, [-3.0, -1.0, 2.0, 2.0].map(|it| it / std));
        check(Over::Group, Over::Batch, [-1.0, 1.0, 0.0, 0.0].map(|it| it / std));
        check(Over::Group, Over::Group, [-1.0 / 2f64.sqrt(), 1.0 / 2f64.sqrt(), 0.0, 0.0]);
    }

    #[test]
    fn running_moments_are_those_of_all_steps() {
        let steps = [[1.0, 3.0, 6.0, 6.0], [0.5, -2.0, 7.0, 1.0], [3.0, 3.0, 3.0, 3.0]];
        let mut running = Moments::default();
        for step in 0..steps.len() {
            let found = normalized(Over::Running, Over::Running, &steps[step], &mut running);
            let all = Moments::of(&steps[..=step].concat());
            check_near(&[running.count, running.mean, running.squares], &[all.count, all.mean, all.squares]);
            let expected = steps[step].map(|reward| (reward - all.mean) / (all.std() + EPS));
            check_near(&found, &expected);
        }
    }
}

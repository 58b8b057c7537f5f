//! Estimators of advantages, one in each file. A file has a section of the config, with its defaults and ranges, and a
//! formula with its source. The list in `choices!` names the file. `docs/reference/algorithms.md` describes the
//! differences between systems.

use serde::{Deserialize, Serialize};

use crate::choices::{bound, choices, formula_of};
use crate::range::Range;
use crate::{groups, is_constant};

pub use gae::gae;
pub use gdpo::decoupled;
pub use grpo::Scale;

/// Rewards of a step's samples; groups lie one after another.
#[derive(Clone, Copy, Debug)]
pub struct Earned<'a> {
    /// The reward of each sample.
    pub rewards: &'a [f64],
    /// Number of tokens of each sample.
    pub lengths: &'a [f64],
    /// The reward of each group's greedy completion; empty except for `remax`, its only reader.
    pub greedy: &'a [f64],
    /// Number of samples of a group.
    pub group_size: usize,
}

/// An estimator of advantages.
pub trait Estimator {
    /// Name of the estimator in papers, with or without whitening of advantages.
    fn title(&self, is_whitened: bool) -> &'static str;

    /// Ranges of the numbers of the estimator's section.
    fn ranges(&self) -> Vec<Range> {
        Vec::new()
    }

    /// Returns true if the estimator compares the completions of a prompt.
    fn needs_groups(&self) -> bool {
        true
    }

    /// Reason why turns cannot have separate credit; `None` if they can.
    fn refuses_turns(&self) -> Option<&'static str> {
        None
    }

    /// Advantage of each sample. A group of equal rewards has advantages of exactly 0, unless the estimator's own
    /// comment has an exception.
    ///
    /// # Panics
    ///
    /// Panics if the numbers of rewards, lengths and greedy rewards do not match.
    fn of_samples(&self, earned: &Earned) -> Vec<f64>;
}

choices! {
    /// The estimator that turns rewards into advantages.
    enum Advantage: dyn Estimator {
        /// Reward minus the group's mean, divided by a standard deviation.
        grpo => Grpo(GrpoConfig),
        /// Normalization of each term of the reward as in `grpo`; then the weighted sum, divided by the standard
        /// deviation of the step's sums.
        gdpo => Gdpo(GdpoConfig),
        /// Reward minus the mean of the group's other rewards.
        rloo => Rloo,
        /// Reward minus the group's mean, weighted by the lengths of completions.
        opo => Opo,
        /// Reward minus the group's mean, times the ratio of all samples to samples in groups whose rewards differ.
        gpg => Gpg,
        /// Return from each token on, without a baseline; a group may have 1 sample.
        reinforce => Reinforce(ReinforceConfig),
        /// Reward minus the reward of the prompt's greedy completion, which is sampled and scored in addition to the
        /// group. A group may have 1 sample.
        remax => Remax,
        /// Zero: rewards are measured, and only a KL divergence changes the policy; a group may have 1 sample.
        none => None,
        /// Generalized advantage estimates of each token from a critic's values: PPO. The estimator needs `critic`; a
        /// group may have 1 sample.
        gae => Gae(GaeConfig),
    }
}

impl Default for Advantage {
    fn default() -> Self {
        Self::Grpo(GrpoConfig::default())
    }
}

/// Returns each reward minus its group's mean, divided by `scale` of the group.
fn centered(rewards: &[f64], group_size: usize, scale: impl Fn(&[f64]) -> f64) -> Vec<f64> {
    let mut advantages = Vec::with_capacity(rewards.len());
    for group in groups(rewards, group_size) {
        if is_constant(group) {
            // A rounded mean would leave a remainder, which division by a tiny deviation would amplify.
            advantages.extend(std::iter::repeat_n(0.0, group.len()));
            continue;
        }
        let mean = group.iter().sum::<f64>() / group.len() as f64;
        let scale = scale(group);
        advantages.extend(group.iter().map(|reward| (reward - mean) / scale));
    }
    advantages
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::tests::{check_near, golden, numbers, papers};
    use crate::{Moments, returns, turn_advantages};

    const GROUP_SIZE: usize = 3;

    fn of(advantage: &Advantage, rewards: &[f64], lengths: &[f64], group_size: usize) -> Vec<f64> {
        advantage.formula().of_samples(&Earned { rewards, lengths, greedy: &[], group_size })
    }

    fn grpo(scale: Scale, eps: f64) -> Advantage {
        Advantage::Grpo(GrpoConfig { scale, eps })
    }

    #[test]
    fn advantages_equal_the_reference() {
        let golden = golden();
        let (rewards, lengths) = (numbers(&golden["rewards"]), numbers(&golden["lengths"]));
        for (name, advantage) in [
            ("grpo", grpo(Scale::GroupStd, 1e-6)),
            ("grpo_eps_1e-4", grpo(Scale::GroupStd, 1e-4)),
            ("dr_grpo", grpo(Scale::None, 1e-6)),
            ("batch_std_eps_1e-4", grpo(Scale::BatchStd, 1e-4)),
            ("rloo", Advantage::Rloo),
            ("opo", Advantage::Opo),
        ] {
            let found = of(&advantage, &rewards, &lengths, GROUP_SIZE);
            check_near(&found, &numbers(&golden[name]));
        }
    }

    #[test]
    fn advantages_are_those_of_the_papers() {
        let golden = papers();
        let [rewards, lengths, greedy] = ["rewards", "lengths", "greedy"].map(|name| numbers(&golden[name]));
        let earned = Earned { rewards: &rewards, lengths: &lengths, greedy: &greedy, group_size: 4 };
        for (name, advantage) in
            [("opo", Advantage::Opo), ("gpg", Advantage::Gpg), ("remax", Advantage::Remax)]
        {
            check_near(&advantage.formula().of_samples(&earned), &numbers(&golden[name]));
        }
    }

    #[test]
    fn whitened_advantages_equal_the_reference() {
        let golden = golden();
        let (rewards, lengths) = (numbers(&golden["rewards"]), numbers(&golden["lengths"]));
        for (name, advantage) in [
            ("reinforce_pp", Advantage::Reinforce(ReinforceConfig { gamma: 1.0 })),
            ("reinforce_pp_baseline", grpo(Scale::None, 1e-6)),
        ] {
            let samples = of(&advantage, &rewards, &lengths, GROUP_SIZE);
            // Whitening is over tokens: a long sample has more weight.
            let mut tokens: Vec<f64> = samples
                .iter()
                .zip(&lengths)
                .flat_map(|(&sample, &length)| std::iter::repeat_n(sample, length as usize))
                .collect();
            Moments::of(&tokens).whiten(&mut tokens);
            check_near(&tokens, &numbers(&golden[name]));
        }
    }

    #[test]
    fn returns_are_discounted_a_token() {
        check_near(&returns(&[1.0, 0.0, 2.0], &[0.5; 3]), &[1.5, 1.0, 2.0]);
        check_near(&returns(&[-0.1, -0.2, 0.7], &[1.0; 3]), &[0.4, 0.5, 0.7]);
        assert!(returns(&[], &[]).is_empty());
    }

    #[test]
    fn turns_are_compared_by_what_is_earned_from_them_on() {
        // Samples of two turns, of one, and of three.
        let rewards = [vec![0.5, 1.0], vec![0.25], vec![0.0, -1.0, 3.0]];
        let of = |advantage| turn_advantages(&advantage, 1.0, &rewards, 3);
        // Returns from each turn on: 1.5 1 0, 0.25 0 0, 2 2 3.
        let rloo = of(Advantage::Rloo);
        check_near(&rloo[0], &[1.5 - (0.25 + 2.0) / 2.0, 1.0 - (0.0 + 2.0) / 2.0]);
        check_near(&rloo[1], &[0.25 - 3.5 / 2.0]);
        check_near(&rloo[2], &[2.0 - 1.75 / 2.0, 2.0 - 0.5, 3.0]);
        let scaled = of(grpo(Scale::GroupStd, 1e-12));
        let std = ((0.25f64.powi(2) + 1.0 + 0.75f64.powi(2)) / 2.0).sqrt();
        check_near(&scaled.concat(), &[0.25 / std, 0.0, -1.0 / std, 0.75 / std, 1.0, 2.0 / 3f64.sqrt()]);
        // With one turn each, advantages equal those of samples without turns.
        let single =
            turn_advantages(&Advantage::default(), 0.5, &[vec![1.0], vec![0.0], vec![0.5]], 3).concat();
        assert_eq!(single, self::of(&Advantage::default(), &[1.0, 0.0, 0.5], &[1.0; 3], 3));
        assert!(turn_advantages(&Advantage::Rloo, 1.0, &[], 3).is_empty());
    }

    /// Episodes of a policy with a logit for each turn, with all groups enumerated. Each action of turn 1 has a reward
    /// and may end the episode; the reward of turn 2 depends on both actions.
    #[test]
    fn rloo_of_turns_is_unbiased_and_varies_less() {
        type Rows = Vec<Vec<f64>>;
        const GROUP: usize = 3;
        let (p, q) = (0.3, 0.6);
        // Probability, rewards, and the derivative of the log-prob by each logit; 0 for a missing turn.
        let episodes = [
            (p * 0.25, vec![1.0], [1.0 - p, 0.0]),
            (p * 0.75 * q, vec![1.0, 0.2], [1.0 - p, 1.0 - q]),
            (p * 0.75 * (1.0 - q), vec![1.0, 0.5], [1.0 - p, -q]),
            ((1.0 - p) * 0.5, vec![-1.0], [-p, 0.0]),
            ((1.0 - p) * 0.5 * q, vec![-1.0, 0.9], [-p, 1.0 - q]),
            ((1.0 - p) * 0.5 * (1.0 - q), vec![-1.0, 0.1], [-p, -q]),
        ];
        let sum = |rewards: &[f64]| rewards.iter().sum::<f64>();
        let exact = [0, 1].map(|logit| {
            let of_episodes = episodes.iter();
            of_episodes.map(|(chance, rewards, scores)| chance * sum(rewards) * scores[logit]).sum::<f64>()
        });
        // Mean and variance of the estimate, for each logit.
        let estimate = |advantages: &dyn Fn(&[Vec<f64>]) -> Rows| {
            let (mut mean, mut square) = ([0.0; 2], [0.0; 2]);
            for number in 0..episodes.len().pow(GROUP as u32) {
                let group = [number / 36, number / 6 % 6, number % 6].map(|it| episodes[it].clone());
                let chance: f64 = group.iter().map(|(chance, ..)| chance).product();
                let advantages = advantages(&group.clone().map(|(_, rewards, _)| rewards));
                for logit in 0..2 {
                    let terms = group.iter().zip(&advantages);
                    let of = |advantages: &Vec<f64>| advantages.get(logit).copied().unwrap_or(0.0);
                    let sum: f64 = terms.map(|((.., scores), it)| of(it) * scores[logit]).sum();
                    let gradient = sum / GROUP as f64;
                    mean[logit] += chance * gradient;
                    square[logit] += chance * gradient * gradient;
                }
            }
            (mean, [0, 1].map(|logit| square[logit] - mean[logit].powi(2)))
        };
        let (mean, variance) = estimate(&|rewards| turn_advantages(&Advantage::Rloo, 1.0, rewards, GROUP));
        check_near(&mean, &exact);
        let of_episodes = |rewards: &[Vec<f64>]| {
            let sums: Vec<f64> = rewards.iter().map(|turns| sum(turns)).collect();
            let advantages = self::of(&Advantage::Rloo, &sums, &[1.0; GROUP], GROUP);
            advantages.into_iter().map(|advantage| vec![advantage; 2]).collect()
        };
        let (mean, of_sums) = estimate(&of_episodes);
        check_near(&mean, &exact);
        // The first turn has the same credit in both, and the second turn has no share of the first turn's reward.
        check_near(&[variance[0]], &[of_sums[0]]);
        assert!(variance[1] < 0.9 * of_sums[1], "{variance:?} and {of_sums:?}");
        // A sample is part of its own baseline: a fraction of 1 - 1 / n remains.
        let centered = grpo(Scale::None, 1e-6);
        let (mean, _) = estimate(&|rewards| turn_advantages(&centered, 1.0, rewards, GROUP));
        check_near(&mean, &exact.map(|exact| exact * (1.0 - 1.0 / GROUP as f64)));
    }

    #[test]
    fn remax_is_less_the_greedy_completions_reward() {
        let rewards = [1.0, 0.0, 0.5, 0.5, 0.25, 0.25];
        let earned =
            Earned { rewards: &rewards, lengths: &[1.0; 6], greedy: &[1.0, 0.0, 0.25], group_size: 2 };
        let found = Advantage::Remax.formula().of_samples(&earned);
        check_near(&found, &[0.0, -1.0, 0.5, 0.5, 0.0, 0.0]);
    }

    #[test]
    fn gpg_makes_up_for_groups_without_a_gradient() {
        let rewards = [1.0, 0.0, 0.5, 0.5, 0.0, 0.0, 1.0, 1.0];
        let found = of(&Advantage::Gpg, &rewards, &[1.0; 8], 2);
        check_near(&found, &[2.0, -2.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0]);
    }

    #[test]
    fn a_group_of_equal_rewards_has_no_advantage() {
        // In doubles 0.1 + 0.1 + 0.1 is not 0.3: the mean has a rounding error.
        for reward in [0.0, 0.1, 1.0] {
            for advantage in [
                grpo(Scale::GroupStd, 1e-6),
                grpo(Scale::BatchStd, 1e-6),
                grpo(Scale::None, 1e-6),
                Advantage::Rloo,
                Advantage::Opo,
                Advantage::Gpg,
            ] {
                let found = of(&advantage, &[reward; 3], &[1.0, 7.0, 3.0], 3);
                assert_eq!(found, [0.0; 3], "{advantage:?}");
            }
        }
    }

    #[test]
    fn a_single_value_is_whitened_to_0() {
        let mut values = [3.0];
        Moments { count: 1.0, mean: 3.0, squares: 0.0 }.whiten(&mut values);
        assert_eq!(values, [0.0]);
    }
}

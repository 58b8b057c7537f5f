//! Estimators of advantages, a file each. A file has the section that a config writes, with its defaults and ranges, and the
//! formula with its source; the list in `choices!` names it. `docs/reference/algorithms.md` says where systems disagree.

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
    /// The tokens of each.
    pub lengths: &'a [f64],
    /// The reward of each group's greedy completion; empty but for `remax`, which alone reads it.
    pub greedy: &'a [f64],
    /// Samples of a group.
    pub group_size: usize,
}

/// An estimator of advantages.
pub trait Estimator {
    /// Its name in papers, where advantages are whitened or not.
    fn title(&self, is_whitened: bool) -> &'static str;

    /// Ranges of its section's numbers.
    fn ranges(&self) -> Vec<Range> {
        Vec::new()
    }

    /// Returns true if it compares the completions of a prompt.
    fn needs_groups(&self) -> bool {
        true
    }

    /// Reason why turns cannot have credit of their own; `None` if they can.
    fn refuses_turns(&self) -> Option<&'static str> {
        None
    }

    /// Advantage of each sample. A group of equal rewards has advantages of exactly 0, unless the estimator's own comment
    /// says otherwise.
    ///
    /// # Panics
    ///
    /// If the numbers of rewards, lengths and greedy rewards do not fit together.
    fn of_samples(&self, earned: &Earned) -> Vec<f64>;
}

choices! {
    /// The estimator that turns rewards into advantages.
    enum Advantage: dyn Estimator {
        /// Less the group's mean, over a standard deviation.
        grpo => Grpo(GrpoConfig),
        /// Each term of the reward as `grpo` has it, weighed and summed, over the standard deviation of the step's sums.
        gdpo => Gdpo(GdpoConfig),
        /// Less the mean of the group's other rewards.
        rloo => Rloo,
        /// Less the group's mean, in which each reward weighs as much as its completion is long.
        opo => Opo,
        /// Less the group's mean, times samples over samples in groups whose rewards differ.
        gpg => Gpg,
        /// The return from each token on, without a baseline; groups may be of 1.
        reinforce => Reinforce(ReinforceConfig),
        /// Less the reward of the prompt's greedy completion, which is sampled and scored beside the group; groups may be
        /// of 1.
        remax => Remax,
        /// 0: rewards are measured, and move nothing beside a KL divergence; groups may be of 1.
        none => None,
        /// Generalized advantage estimates from a critic's values, a token each: PPO. It needs `critic`; groups may be of 1.
        gae => Gae(GaeConfig),
    }
}

impl Default for Advantage {
    fn default() -> Self {
        Self::Grpo(GrpoConfig::default())
    }
}

/// Each reward less its group's mean, over what `scale` says of the group.
fn centered(rewards: &[f64], group_size: usize, scale: impl Fn(&[f64]) -> f64) -> Vec<f64> {
    let mut advantages = Vec::with_capacity(rewards.len());
    for group in groups(rewards, group_size) {
        if is_constant(group) {
            // A rounded mean would leave a remainder, which division by a tiny deviation would blow up.
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
            // Whitening is over tokens: a long sample counts more.
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
        // Of two turns, of one, and of three.
        let rewards = [vec![0.5, 1.0], vec![0.25], vec![0.0, -1.0, 3.0]];
        let of = |advantage| turn_advantages(&advantage, 1.0, &rewards, 3);
        // From each turn on: 1.5 1 0, 0.25 0 0, 2 2 3.
        let rloo = of(Advantage::Rloo);
        check_near(&rloo[0], &[1.5 - (0.25 + 2.0) / 2.0, 1.0 - (0.0 + 2.0) / 2.0]);
        check_near(&rloo[1], &[0.25 - 3.5 / 2.0]);
        check_near(&rloo[2], &[2.0 - 1.75 / 2.0, 2.0 - 0.5, 3.0]);
        let scaled = of(grpo(Scale::GroupStd, 1e-12));
        let std = ((0.25f64.powi(2) + 1.0 + 0.75f64.powi(2)) / 2.0).sqrt();
        check_near(&scaled.concat(), &[0.25 / std, 0.0, -1.0 / std, 0.75 / std, 1.0, 2.0 / 3f64.sqrt()]);
        // One turn each is what samples have without turns.
        let single =
            turn_advantages(&Advantage::default(), 0.5, &[vec![1.0], vec![0.0], vec![0.5]], 3).concat();
        assert_eq!(single, self::of(&Advantage::default(), &[1.0, 0.0, 0.5], &[1.0; 3], 3));
        assert!(turn_advantages(&Advantage::Rloo, 1.0, &[], 3).is_empty());
    }

    /// Episodes by a policy with a logit a turn. Each action of turn 1 earns something and may end the episode; what turn 2
    /// earns depends on both. All groups that there are are counted.
    #[test]
    fn rloo_of_turns_is_unbiased_and_varies_less() {
        type Rows = Vec<Vec<f64>>;
        const GROUP: usize = 3;
        let (p, q) = (0.3, 0.6);
        // Its chance, its rewards, and the derivative of its log-prob by each logit; 0 of a turn that is not there.
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
        // The mean and the variance of the estimate, of each logit.
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
        // The first turn has the same credit either way, and the second is not blamed for the first one's reward.
        check_near(&[variance[0]], &[of_sums[0]]);
        assert!(variance[1] < 0.9 * of_sums[1], "{variance:?} and {of_sums:?}");
        // A sample that is in its own baseline: 1 - 1 / n of it is left.
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
        // 0.1 + 0.1 + 0.1 is not 0.3 in doubles: the mean is off by a rounding.
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

//! Rewards of an episode's turns: each turn has its own, and the last one also has the rest of the total.

use std::iter::repeat_n;
use std::ops::Range;

use anyroll_algorithm::turn_advantages;

use super::{Advantages, SampleKl};
use crate::{
    inference::Sample,
    rlvr::{rewards::fill, rows::Scored},
};

/// One advantage per turn, for each token of this rank's samples; the next turn's reward is discounted by `gamma`.
pub fn over_turns(by: &Advantages, scored: &Scored, gamma: f64, kl: Option<&SampleKl>) -> Vec<f64> {
    let mut rewards = scored.column(|row| row.turn_rewards.clone());
    if let Some(kl) = kl {
        for (rewards, row) in rewards.iter_mut().zip(&kl.rows) {
            let turns = rewards.iter_mut().zip(&row.of_turns);
            turns.for_each(|(reward, of_turn)| *reward -= kl.coef * of_turn);
        }
    }
    let of_turns = turn_advantages(&by.algorithm.advantage, gamma, &rewards, by.share.group_size);
    let of_sample = |(row, sample): (usize, &Sample)| {
        let of_turns: &Vec<f64> = &of_turns[row];
        let turns = lengths(sample).zip(of_turns);
        turns.flat_map(|(length, &advantage)| repeat_n(advantage, length)).collect::<Vec<f64>>()
    };
    scored.of_rank(by.share, by.exchange.rank()).flat_map(of_sample).collect()
}

/// Number of sampled tokens in each turn.
pub fn lengths(sample: &Sample) -> impl Iterator<Item = usize> + use<> {
    sample.turns().into_iter().map(|turn: Range<usize>| turn.len())
}

/// Discount of later rewards at each token of turns of these lengths: `gamma`, times `turns` at the end of a turn.
pub fn gammas(lengths: impl Iterator<Item = usize>, gamma: f64, turns: f64) -> Vec<f64> {
    let mut gammas = Vec::new();
    for length in lengths {
        gammas.extend(repeat_n(gamma, length));
        gammas.last_mut().into_iter().for_each(|last| *last *= turns);
    }
    gammas
}

/// Reward of each turn of a sample: the environment's, times `weight`; the last turn also gets the rest of the
/// `total`. All are NaN without a total.
pub fn of_turns(sample: &Sample, total: Option<f64>, weight: f64) -> Vec<f64> {
    let turns = sample.turns().len();
    let Some(total) = total else { return vec![f64::NAN; turns] };
    let episode = sample.episode.as_ref().expect("turns have an environment");
    let given = episode.reward().expect("what went wrong earned nothing");
    let of_turn = |turn: usize| weight * episode.rewards.get(turn).copied().flatten().unwrap_or(0.0);
    let mut rewards: Vec<f64> = (0..turns).map(of_turn).collect();
    rewards[turns - 1] += total - weight * given;
    rewards
}

/// Replaces rows of NaN by the result of [`fill`] for each turn; an episode that has ended counts as 0.
pub fn fill_turns(rewards: &mut [Vec<f64>], group_size: usize) {
    let missing: Vec<bool> = rewards.iter().map(|turns| turns[0].is_nan()).collect();
    let most = rewards.iter().map(Vec::len).max().unwrap_or(0);
    for turn in 0..most {
        let known = |(turns, &missing): (&Vec<f64>, &bool)| match missing {
            true => None,
            false => Some(turns.get(turn).copied().unwrap_or(0.0)).filter(|it| it.is_finite()),
        };
        let filled = fill(&rewards.iter().zip(&missing).map(known).collect::<Vec<_>>(), group_size);
        for (turns, filled) in rewards.iter_mut().zip(filled).zip(&missing).filter(|it| *it.1).map(|it| it.0)
        {
            turns.resize(turns.len().max(turn + 1), 0.0);
            turns[turn] = filled;
        }
    }
}

/// Fits rewards to `turns` turns: the last turn gets the sum of the remaining ones.
pub fn fitted(rewards: &[f64], turns: usize) -> Vec<f64> {
    let mut fitted = vec![0.0; turns];
    for (turn, reward) in rewards.iter().enumerate() {
        fitted[turn.min(turns - 1)] += reward;
    }
    fitted
}

#[cfg(test)]
mod tests {
    use serde_json::Value;

    use super::*;
    use crate::inference::Episode;
    use anyroll_algorithm::{gae, returns};
    use anyroll_config::Advantage;

    fn sample(rewards: &[Option<f64>], observations: usize) -> Sample {
        let observations = (0..observations).map(|turn| 2 * turn + 2..2 * turn + 3).collect();
        let episode = Episode { rewards: rewards.to_vec(), observations, failure: None };
        Sample { tokens: vec![0; 9], episode: Some(episode), ..Sample::begin(vec![0]) }
    }

    #[test]
    fn a_turn_earns_what_it_was_given_and_the_last_one_the_rest() {
        let earned = [Some(0.5), None, Some(2.0)];
        assert_eq!(of_turns(&sample(&earned, 2), Some(5.0), 2.0), [1.0, 0.0, 4.0]);
        // Another term gave 0.25.
        assert_eq!(of_turns(&sample(&earned, 2), Some(5.25), 2.0), [1.0, 0.0, 4.25]);
        // The last turn was truncated and not sent to the environment.
        assert_eq!(of_turns(&sample(&earned[..1], 1), Some(0.75), 1.0), [0.5, 0.25]);
        assert!(of_turns(&sample(&earned, 2), None, 1.0).iter().all(|it| it.is_nan()));
    }

    #[test]
    fn what_could_not_be_scored_earns_the_mean_of_the_others_in_each_turn() {
        let mut rewards =
            vec![vec![1.0, 2.0], vec![f64::NAN], vec![0.0], vec![f64::NAN; 2], vec![3.0], vec![1.0]];
        fill_turns(&mut rewards, 3);
        assert_eq!(
            rewards,
            [vec![1.0, 2.0], vec![0.5, 1.0], vec![0.0], vec![2.0, 0.0], vec![3.0], vec![1.0]]
        );
    }

    /// Compared with sums over all later rewards, and with ROLL's returns: see tests/python/make_turns_golden.py.
    #[test]
    fn what_comes_turns_later_weighs_less() {
        let path = concat!(env!("CARGO_MANIFEST_DIR"), "/../tests/golden/turns.json");
        let golden: Value = serde_json::from_str(&std::fs::read_to_string(path).unwrap()).unwrap();
        let rows = |value: &Value| -> Vec<Vec<f64>> { serde_json::from_value(value.clone()).unwrap() };
        let [of_tokens, lambda] = ["gamma", "lambda"].map(|name| golden[name].as_f64().unwrap());
        let turns = &golden["turns"];
        let (of_turns, rewards) = (turns["gamma"].as_f64().unwrap(), rows(&turns["rewards"]));
        let near = |found: &[f64], expected: &[f64]| {
            assert_eq!(found.len(), expected.len());
            let apart = found.iter().zip(expected).map(|(a, b)| (a - b).abs()).fold(0.0, f64::max);
            assert!(apart < 1e-12, "{found:?}, not {expected:?}");
        };
        let rloo = turn_advantages(&Advantage::Rloo, of_turns, &rewards, 2);
        near(&rloo.concat(), &rows(&turns["rloo"]).concat());
        let [mask, values] = ["mask", "values"].map(|name| rows(&golden[name]));
        for (index, mask) in mask.iter().enumerate() {
            let runs = mask.chunk_by(|a, b| a == b).filter(|run| run[0] == 1.0);
            let lengths: Vec<usize> = runs.map(<[f64]>::len).collect();
            let mut earned = Vec::new();
            for (length, reward) in lengths.iter().zip(&rewards[index]) {
                earned.extend(repeat_n(0.0, length - 1));
                earned.push(*reward);
            }
            for (gamma, name) in [(1.0, "reinforce"), (of_tokens, "reinforce_of_tokens")] {
                let gammas = gammas(lengths.iter().copied(), gamma, of_turns);
                near(&returns(&earned, &gammas), &rows(&turns[name])[index]);
            }
            let kept = values[index].iter().zip(mask).filter(|(_, bit)| **bit == 1.0);
            let values: Vec<f64> = kept.map(|(value, _)| *value).collect();
            let gammas = gammas(lengths.into_iter(), of_tokens, of_turns);
            near(&gae(lambda, &gammas, &earned, &values), &rows(&turns["gae"])[index]);
        }
    }

    #[test]
    fn dealt_rewards_are_earned_by_the_turns_that_there_are() {
        assert_eq!(fitted(&[1.0, 2.0, 4.0], 2), [1.0, 6.0]);
        assert_eq!(fitted(&[1.0], 3), [1.0, 0.0, 0.0]);
    }
}

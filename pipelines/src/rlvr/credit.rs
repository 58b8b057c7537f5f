//! Which tokens earn what: of an episode's rewards each turn its own, or all of it their sum.

use std::iter::repeat_n;
use std::ops::Range;

use super::{
    Setup,
    score::{Scored, fill},
    targets::KlOfSamples,
};
use crate::{Result, algorithm::turn_advantages, inference::Sample, train::Exchange};

impl Setup {
    /// What each turn of all ranks' samples earned, in the step's order; nothing where the episode's sum counts. `totals` is
    /// what this rank's `samples` earned, NaN what could not be scored: it has for each turn the mean of its group's others.
    pub(super) fn turn_rewards(
        &self,
        exchange: &Exchange,
        samples: &[Sample],
        totals: &[f64],
    ) -> Result<Vec<Vec<f64>>> {
        if self.rlvr.algorithm.credit.gamma().is_none() {
            return Ok(Vec::new());
        }
        let weight = self.reward.weight_of_turns();
        let own = samples.iter().zip(totals).map(|(sample, &total)| of_turns(sample, total, weight));
        let mut rewards = self.gather_turns(exchange, own.collect())?;
        fill_turns(&mut rewards, self.rlvr.group_size);
        Ok(rewards)
    }

    /// The reward of each of this rank's tokens: what a sample earns at its last one, or what a turn earns at its own last
    /// one, less the KL divergence of each.
    pub(super) fn token_rewards(
        &self,
        exchange: &Exchange,
        (scored, rewards): (&Scored, &[f64]),
        samples: &[Sample],
        kl: Option<&KlOfSamples>,
    ) -> Vec<f64> {
        let tokens = samples.iter().map(Sample::completion_len).sum();
        let penalties = |kl: &KlOfSamples| kl.of_tokens.iter().map(|of_token| -kl.coef * of_token).collect();
        let mut of_tokens = kl.map_or(vec![0.0; tokens], penalties);
        let mut end = 0;
        for (number, sample) in self.share.samples_of(exchange.rank()).zip(samples) {
            let earned: Vec<(usize, f64)> = match self.rlvr.algorithm.credit.gamma() {
                None => vec![(sample.completion_len(), rewards[number])],
                Some(_) => lengths(sample).zip(scored.turn_rewards[number].iter().copied()).collect(),
            };
            for (length, reward) in earned {
                end += length;
                if length > 0 {
                    of_tokens[end - 1] += reward;
                }
            }
        }
        of_tokens
    }

    /// What is earned a token later weighs, for each sampled token of a sample: `gamma`, and from a turn to the next what
    /// `credit` says as well.
    pub(super) fn gammas(&self, sample: &Sample, gamma: f64) -> Vec<f64> {
        let of_turns = self.rlvr.algorithm.credit.gamma().unwrap_or(1.0);
        gammas(lengths(sample), gamma, of_turns)
    }

    /// The advantages of the turns of this rank's samples, for each of their tokens; what is earned a turn later weighs `gamma`.
    pub(super) fn turn_advantages(
        &self,
        exchange: &Exchange,
        scored: &Scored,
        samples: &[Sample],
        (gamma, kl): (f64, Option<&KlOfSamples>),
    ) -> Result<Vec<f64>> {
        let mut rewards = scored.turn_rewards.clone();
        if let Some(kl) = kl {
            let mut of_tokens = kl.of_tokens.iter();
            let mut sum = |length| of_tokens.by_ref().take(length).sum::<f64>();
            let own = samples.iter().map(|sample| lengths(sample).map(&mut sum).collect()).collect();
            for (rewards, kl_of_turns) in rewards.iter_mut().zip(self.gather_turns(exchange, own)?) {
                rewards
                    .iter_mut()
                    .zip(kl_of_turns)
                    .for_each(|(reward, of_turn)| *reward -= kl.coef * of_turn);
            }
        }
        let Self { rlvr, .. } = self;
        let of_turns = turn_advantages(&rlvr.algorithm.advantage, gamma, &rewards, rlvr.group_size);
        let own = self.share.samples_of(exchange.rank()).zip(samples);
        let of_tokens = own.flat_map(|(number, sample)| {
            lengths(sample)
                .zip(&of_turns[number])
                .flat_map(|(length, &advantage)| repeat_n(advantage, length))
        });
        Ok(of_tokens.collect())
    }

    /// The numbers of all ranks' turns, in the step's order, from those of this rank's, a list a sample.
    fn gather_turns(&self, exchange: &Exchange, mut own: Vec<Vec<f64>>) -> Result<Vec<Vec<f64>>> {
        let turns: Vec<f64> = own.iter().map(|turns| turns.len() as f64).collect();
        let turns = exchange.gather(&turns)?;
        let most = turns.iter().flatten().fold(1.0, |most: f64, &turns| most.max(turns)) as usize;
        own.iter_mut().for_each(|turns| turns.resize(most, 0.0));
        let gathered = exchange.gather(&own.concat())?;
        let of_ranks: Vec<Vec<Vec<f64>>> = gathered
            .iter()
            .zip(&turns)
            .map(|(values, turns)| {
                values.chunks(most).zip(turns).map(|(row, &turns)| row[..turns as usize].to_vec()).collect()
            })
            .collect();
        Ok(self.share.ordered(&of_ranks))
    }
}

/// The sampled tokens of each turn.
fn lengths(sample: &Sample) -> impl Iterator<Item = usize> + use<> {
    sample.turns().into_iter().map(|turn: Range<usize>| turn.len())
}

/// For each token of turns with so many what a token later weighs: `gamma`, times that of `turns` where one ends.
fn gammas(lengths: impl Iterator<Item = usize>, gamma: f64, turns: f64) -> Vec<f64> {
    let mut gammas = Vec::new();
    for length in lengths {
        gammas.extend(repeat_n(gamma, length));
        gammas.last_mut().into_iter().for_each(|last| *last *= turns);
    }
    gammas
}

/// What each turn of a sample earned: what its environment gave for it, times `weight`, and in the last one what else there
/// is of the `total`. NaN throughout if that is no number.
fn of_turns(sample: &Sample, total: f64, weight: f64) -> Vec<f64> {
    let turns = sample.turns().len();
    if !total.is_finite() {
        return vec![f64::NAN; turns];
    }
    let episode = sample.episode.as_ref().expect("turns have an environment");
    let given = episode.reward().expect("what went wrong earned nothing");
    let of_turn = |turn: usize| weight * episode.rewards.get(turn).copied().flatten().unwrap_or(0.0);
    let mut rewards: Vec<f64> = (0..turns).map(of_turn).collect();
    rewards[turns - 1] += total - weight * given;
    rewards
}

/// Fills rows of NaN with what [`fill`] makes of each turn, where an episode that has ended earns 0.
fn fill_turns(rewards: &mut [Vec<f64>], group_size: usize) {
    let missing: Vec<bool> = rewards.iter().map(|turns| turns[0].is_nan()).collect();
    let most = rewards.iter().map(Vec::len).max().unwrap_or(0);
    for turn in 0..most {
        let known = |(turns, &missing): (&Vec<f64>, &bool)| match missing {
            true => f64::NAN,
            false => turns.get(turn).copied().unwrap_or(0.0),
        };
        let filled = fill(&rewards.iter().zip(&missing).map(known).collect::<Vec<f64>>(), group_size);
        for (turns, filled) in rewards.iter_mut().zip(filled).zip(&missing).filter(|it| *it.1).map(|it| it.0)
        {
            turns.resize(turns.len().max(turn + 1), 0.0);
            turns[turn] = filled;
        }
    }
}

/// Rewards of turns for a sample of so many: those beyond its last one are earned there.
pub(super) fn fitted(rewards: &[f64], turns: usize) -> Vec<f64> {
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
    use crate::{
        algorithm::{gae, returns},
        config::Advantage,
        inference::Episode,
    };

    fn sample(rewards: &[Option<f64>], observations: usize) -> Sample {
        let observations = (0..observations).map(|turn| 2 * turn + 2..2 * turn + 3).collect();
        let episode = Episode { rewards: rewards.to_vec(), observations, failure: None };
        Sample { tokens: vec![0; 9], episode: Some(episode), ..Sample::begin(vec![0]) }
    }

    #[test]
    fn a_turn_earns_what_it_was_given_and_the_last_one_the_rest() {
        let earned = [Some(0.5), None, Some(2.0)];
        assert_eq!(of_turns(&sample(&earned, 2), 5.0, 2.0), [1.0, 0.0, 4.0]);
        // Another term has given 0.25.
        assert_eq!(of_turns(&sample(&earned, 2), 5.25, 2.0), [1.0, 0.0, 4.25]);
        // The last turn was cut, and nobody was told.
        assert_eq!(of_turns(&sample(&earned[..1], 1), 0.75, 1.0), [0.5, 0.25]);
        assert!(of_turns(&sample(&earned, 2), f64::NAN, 1.0).iter().all(|it| it.is_nan()));
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

    /// Against sums over all that comes later, and ROLL's returns: see tests/python/make_turns_golden.py.
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

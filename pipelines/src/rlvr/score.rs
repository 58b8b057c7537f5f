//! What sampled completions earn, and on which a step trains.

use std::ops::Range;

use super::{Setup, credit::fitted};
use crate::{
    Result,
    algorithm::{decoupled, fill_missing},
    config::{Advantage, GdpoConfig},
    data::{shuffle, stream},
    inference::Sample,
    metrics::Metrics,
    reward::{Outcome, Score, check_error_rates},
    train::{Exchange, Share},
};

/// What all ranks know of some groups, in the order of their prompts.
#[derive(Clone, Debug, Default)]
pub struct Scored {
    /// What each sample earned.
    pub rewards: Vec<f64>,
    /// What evaluation would measure of each.
    pub measured: Vec<f64>,
    /// Tokens of each completion.
    pub lengths: Vec<f64>,
    /// 1 for a completion that ended by itself, else 0.
    pub finished: Vec<f64>,
    /// Turns of each completion.
    pub turns: Vec<f64>,
    /// What each turn of each sample earned; empty where the episode's sum counts.
    pub turn_rewards: Vec<Vec<f64>>,
    /// What each earned by terms that are normalized each by itself; empty unless advantages are made of that.
    pub decoupled: Vec<f64>,
    /// Whether each is trained on.
    pub trained: Vec<bool>,
    /// What each prompt's greedy completion earned; empty unless advantages are relative to that.
    pub greedy: Vec<f64>,
    /// Whether some rank was asked to stop.
    pub stop: bool,
    /// Sums over the samples of what the reward's terms say, to become means.
    pub terms: TermSums,
}

impl Scored {
    /// The lengths of those of a range of samples that are trained on.
    pub fn trained_lengths(&self, samples: Range<usize>) -> Vec<f64> {
        samples.filter(|&sample| self.trained[sample]).map(|sample| self.lengths[sample]).collect()
    }
}

/// What the terms of the reward said, a number a term, over all ranks.
#[derive(Clone, Debug, Default)]
pub struct TermSums {
    scores: Vec<f64>,
    /// On how many samples each has a score.
    scored: Vec<f64>,
    /// On how many it failed.
    failed: Vec<f64>,
    /// On how many it took too long.
    timed_out: Vec<f64>,
}

impl TermSums {
    fn new(terms: usize) -> Self {
        let zeros = vec![0.0; terms];
        Self { scores: zeros.clone(), scored: zeros.clone(), failed: zeros.clone(), timed_out: zeros }
    }

    fn add(&mut self, outcome: &Outcome) {
        match outcome {
            Outcome::Scored(Score { parts, .. }) => {
                for (term, part) in parts.iter().enumerate() {
                    self.scores[term] += part.unwrap_or(0.0);
                    self.scored[term] += f64::from(u8::from(part.is_some()));
                }
            }
            Outcome::Failed { term, error } => {
                self.failed[*term] += 1.0;
                self.timed_out[*term] += f64::from(u8::from(error.failure.is_timeout()));
            }
        }
    }

    /// Adds those of further samples.
    pub fn merge(&mut self, other: &Self) {
        for (own, other) in self.lists_mut().into_iter().zip(other.lists()) {
            own.resize(other.len(), 0.0);
            own.iter_mut().zip(other).for_each(|(own, other)| *own += other);
        }
    }

    fn lists(&self) -> [&Vec<f64>; 4] {
        [&self.scores, &self.scored, &self.failed, &self.timed_out]
    }

    fn lists_mut(&mut self) -> [&mut Vec<f64>; 4] {
        [&mut self.scores, &mut self.scored, &mut self.failed, &mut self.timed_out]
    }

    /// The mean of each term that had a sample, and how many samples failed.
    pub fn metrics<'a>(&self, names: impl Iterator<Item = &'a str>) -> Metrics {
        let mut metrics = Metrics::new();
        for (term, name) in names.enumerate() {
            if self.scored[term] > 0.0 {
                metrics.insert(format!("reward/{name}/mean"), self.scores[term] / self.scored[term]);
            }
            if self.failed[term] > 0.0 {
                metrics.insert(format!("reward/{name}/errors"), self.failed[term]);
                metrics.insert(format!("reward/{name}/timeouts"), self.timed_out[term]);
            }
        }
        let failed: f64 = self.failed.iter().sum();
        // One that failed has scores of the terms before, which count nowhere.
        let samples = failed + self.scored.iter().copied().fold(0.0, f64::max);
        metrics.insert("reward/errors", failed);
        metrics.insert("reward/error_rate", if samples > 0.0 { failed / samples } else { 0.0 });
        metrics
    }
}

impl Setup {
    /// What the outcomes of this rank's `samples` and of the others' come to. Behind those of the samples stand the
    /// outcomes of its prompts' greedy completions, if there are any. `batch` numbers the draw of prompts.
    pub(super) fn score(
        &self,
        exchange: &Exchange,
        samples: &[Sample],
        outcomes: Vec<Outcome>,
        batch: u64,
        stop: bool,
    ) -> Result<Scored> {
        let count = samples.len();
        let terms = self.reward.names().len();
        let mut own = TermSums::new(terms);
        let (of_samples, of_greedy) = outcomes.split_at(count);
        let greedy_failures = of_greedy.iter().filter(|outcome| matches!(outcome, Outcome::Failed { .. }));
        of_samples.iter().chain(greedy_failures).for_each(|outcome| own.add(outcome));
        let total = |outcome: &Outcome| value(outcome, |score| score.total);
        let of_own: Vec<f64> = of_samples.iter().map(total).collect();
        let mut values = of_own.clone();
        values.extend(of_samples.iter().map(|outcome| value(outcome, |score| score.measured)));
        values.extend(samples.iter().map(|sample| sample.completion_len() as f64));
        values.extend(samples.iter().map(|sample| f64::from(u8::from(sample.finished()))));
        values.extend(samples.iter().map(|sample| sample.turns().len() as f64));
        values.push(f64::from(u8::from(stop)));
        own.lists().into_iter().for_each(|list| values.extend(list));
        values.extend(of_greedy.iter().map(total));
        let gathered = exchange.gather(&values)?;
        let part = |index: usize| {
            let of_ranks: Vec<Vec<f64>> =
                gathered.iter().map(|values| values[index * count..(index + 1) * count].to_vec()).collect();
            self.share.ordered(&of_ranks)
        };
        let sum = |index: usize| gathered.iter().map(|values| values[5 * count + index]).sum::<f64>();
        let mut sums = TermSums::new(terms);
        for (number, list) in sums.lists_mut().into_iter().enumerate() {
            *list = (0..terms).map(|term| sum(1 + number * terms + term)).collect();
        }
        let greedy_start = 5 * count + 1 + 4 * terms;
        let greedy: Vec<Vec<f64>> = gathered.iter().map(|values| values[greedy_start..].to_vec()).collect();
        let of_prompts = Share { group_size: 1, ..self.share };
        let greedy = if of_greedy.is_empty() { Vec::new() } else { of_prompts.ordered(&greedy) };
        let decoupled = self.decoupled(exchange, of_samples)?;
        self.check_error_rates(&sums.failed, self.share.samples() + greedy.len(), outcomes)?;
        let [rewards, measured, lengths, finished, turns] = [0, 1, 2, 3, 4].map(part);
        let trained = rewards.iter().zip(&finished).enumerate().map(|(sample, (reward, finished))| {
            let compares = greedy.get(sample / self.rlvr.group_size).is_none_or(|greedy| greedy.is_finite());
            reward.is_finite() && compares && (*finished > 0.0 || !self.rlvr.selection.leave_out_cut)
        });
        let mut scored = Scored {
            trained: trained.collect(),
            greedy: fill(&greedy, 1),
            rewards: fill(&rewards, self.rlvr.group_size),
            measured: fill(&measured, self.rlvr.group_size),
            lengths,
            finished,
            turn_rewards: self.turn_rewards(exchange, samples, &of_own)?,
            decoupled,
            turns,
            stop: sum(0) > 0.0,
            terms: sums,
        };
        if self.rlvr.scoring.random {
            deal(&mut scored, self.seed, batch);
        }
        Ok(scored)
    }

    /// What each sample earned by terms that are normalized each by itself, if advantages are made of that. A term that says
    /// nothing of a sample counts as the mean of its group.
    fn decoupled(&self, exchange: &Exchange, of_samples: &[Outcome]) -> Result<Vec<f64>> {
        let Advantage::Gdpo(GdpoConfig { eps }) = self.rlvr.algorithm.advantage else {
            return Ok(Vec::new());
        };
        let group_size = self.rlvr.group_size;
        let mut terms = Vec::new();
        for (term, weight) in self.reward.weights().enumerate() {
            let of_term = |score: &Score| score.parts[term].unwrap_or(f64::NAN);
            let own: Vec<f64> = of_samples.iter().map(|outcome| value(outcome, of_term)).collect();
            terms.push((weight, fill(&self.share.ordered(&exchange.gather(&own)?), group_size)));
        }
        Ok(decoupled(&terms, group_size, eps))
    }

    /// An error if a term failed on more of `completions` than it may, by the numbers `failed` of all ranks.
    pub(super) fn check_error_rates(
        &self,
        failed: &[f64],
        completions: usize,
        outcomes: Vec<Outcome>,
    ) -> Result<()> {
        let own = outcomes.into_iter().filter_map(|outcome| match outcome {
            Outcome::Failed { term, error } => Some((term, error)),
            Outcome::Scored(_) => None,
        });
        let terms = self.reward.names().zip(self.reward.max_error_rates()).zip(failed);
        let terms = terms.map(|((name, max_error_rate), &failed)| (name, max_error_rate, failed));
        check_error_rates(terms, completions, own.collect())
    }
}

/// What a score has, and NaN where there is none.
fn value(outcome: &Outcome, of: impl Fn(&Score) -> f64) -> f64 {
    match outcome {
        Outcome::Scored(score) => of(score),
        Outcome::Failed { .. } => f64::NAN,
    }
}

/// Values of which NaN is missing, filled as [`fill_missing`] does. Nothing that is missing is trained on.
pub(super) fn fill(values: &[f64], group_size: usize) -> Vec<f64> {
    let values: Vec<Option<f64>> = values.iter().map(|value| value.is_finite().then_some(*value)).collect();
    fill_missing(&values, group_size).unwrap_or_else(|| vec![0.0; values.len()])
}

/// The control: gives each sample what a random one earned. What could not be scored stays so.
fn deal(scored: &mut Scored, seed: u64, batch: u64) {
    const PURPOSE: u64 = u64::from_le_bytes(*b"control!");
    let mut order: Vec<usize> = (0..scored.rewards.len()).collect();
    shuffle(&mut order, &mut stream(PURPOSE, seed, batch));
    let dealt = |values: &[f64]| order.iter().map(|&sample| values[sample]).collect();
    (scored.rewards, scored.measured) = (dealt(&scored.rewards), dealt(&scored.measured));
    if !scored.decoupled.is_empty() {
        scored.decoupled = dealt(&scored.decoupled);
    }
    if !scored.turn_rewards.is_empty() {
        let rows = order.iter().zip(&scored.turns);
        let row = |(&sample, &turns): (&usize, &f64)| fitted(&scored.turn_rewards[sample], turns as usize);
        scored.turn_rewards = rows.map(row).collect();
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_control_keeps_what_was_earned_and_not_who_earned_it() {
        let rewards: Vec<f64> = (0..1000).map(f64::from).collect();
        let scored = Scored { measured: rewards.clone(), rewards: rewards.clone(), ..Scored::default() };
        let dealt = |seed, batch| {
            let mut scored = scored.clone();
            deal(&mut scored, seed, batch);
            assert_eq!(scored.rewards, scored.measured);
            scored.rewards
        };
        let first = dealt(3, 11);
        let mut sorted = first.clone();
        sorted.sort_by(f64::total_cmp);
        assert_eq!(sorted, rewards);
        // On average one of any number stays where it was.
        assert!(first.iter().zip(&rewards).filter(|(a, b)| a == b).count() < 10);
        assert_eq!(first, dealt(3, 11));
        assert_ne!(first, dealt(3, 12));
        assert_ne!(first, dealt(4, 11));
    }
}

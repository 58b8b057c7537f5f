//! A step's samples from scoring to the loss: a row for each of all ranks, and this rank's samples.

use std::ops::Range;

use super::rollout::Staleness;
use crate::{
    inference::Sample,
    metrics::Metrics,
    reward::{Outcome, Score},
    train::{Share, reduced},
};

/// A sample, as all ranks know it.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Row {
    /// The reward; of a sample that could not be scored the mean of its group's others.
    pub reward: f64,
    /// What evaluation would measure, filled likewise.
    pub measured: f64,
    /// The sum of terms that are normalized each by itself; `None` unless advantages are made of that.
    pub decoupled: Option<f64>,
    /// The reward of each turn; empty where the episode's sum counts.
    pub turn_rewards: Vec<f64>,
    /// Tokens of the completion.
    pub tokens: usize,
    /// Turns of the completion.
    pub turns: usize,
    /// True if it ended by itself.
    pub finished: bool,
    /// True if it is trained on.
    pub trained: bool,
}

/// The samples that a step trains on, scored.
#[derive(Debug, Default)]
pub struct Scored {
    /// Of all ranks, group by group in the step's order.
    pub rows: Vec<Row>,
    /// The reward of each group's greedy completion; empty unless advantages are relative to that.
    pub greedy: Vec<f64>,
    /// This rank's samples, in its own order: see [`Share::samples_of`].
    pub own: Vec<Sample>,
    /// Of each term of the reward, over all ranks.
    pub terms: Vec<TermSums>,
    /// Over all ranks; `None` where a step samples what it trains on.
    pub staleness: Option<Staleness>,
    /// True if some rank was asked to stop.
    pub stop: bool,
}

impl Scored {
    /// A value of each row.
    pub fn column<T>(&self, of: impl Fn(&Row) -> T) -> Vec<T> {
        self.rows.iter().map(of).collect()
    }

    /// Tokens of each completion.
    pub fn lengths(&self) -> Vec<f64> {
        self.column(|row| row.tokens as f64)
    }

    /// Tokens of all completions.
    pub fn tokens(&self) -> f64 {
        self.lengths().iter().sum()
    }

    /// Tokens of those of a range of rows that are trained on.
    pub fn trained_lengths(&self, rows: Range<usize>) -> Vec<f64> {
        self.rows[rows].iter().filter(|row| row.trained).map(|row| row.tokens as f64).collect()
    }

    /// This rank's samples, each with its index among the rows.
    pub fn of_rank(&self, share: &Share, rank: usize) -> impl Iterator<Item = (usize, &Sample)> {
        share.samples_of(rank).zip(&self.own)
    }
}

reduced! {
    /// Sums over samples of a term of the reward.
    pub struct TermSums {
        /// Scores.
        sum score: f64,
        /// Samples that have one.
        sum scored: f64,
        /// Samples that it failed on.
        sum failed: f64,
        /// Those that took too long.
        sum timed_out: f64,
    }
}

impl TermSums {
    /// Those of `terms` terms over `outcomes`.
    pub fn of<'a>(terms: usize, outcomes: impl Iterator<Item = &'a Outcome>) -> Vec<Self> {
        let mut sums = vec![Self::default(); terms];
        for outcome in outcomes {
            match outcome {
                Outcome::Scored(Score { parts, .. }) => {
                    for (sums, score) in sums.iter_mut().zip(parts) {
                        sums.score += score.unwrap_or(0.0);
                        sums.scored += if score.is_some() { 1.0 } else { 0.0 };
                    }
                }
                Outcome::Failed { term, error } => {
                    sums[*term].failed += 1.0;
                    sums[*term].timed_out += if error.failure.is_timeout() { 1.0 } else { 0.0 };
                }
            }
        }
        sums
    }

    /// The mean of each term that scored a sample, and how many samples failed.
    pub fn metrics<'a>(terms: &[Self], names: impl Iterator<Item = &'a str>) -> Metrics {
        let mut metrics = Metrics::new();
        for (sums, name) in terms.iter().zip(names) {
            if sums.scored > 0.0 {
                metrics.insert(format!("reward/{name}/mean"), sums.score / sums.scored);
            }
            if sums.failed > 0.0 {
                metrics.insert(format!("reward/{name}/errors"), sums.failed);
                metrics.insert(format!("reward/{name}/timeouts"), sums.timed_out);
            }
        }
        let failed: f64 = terms.iter().map(|sums| sums.failed).sum();
        // One that failed has scores of the terms before, which count nowhere.
        let samples = failed + terms.iter().map(|sums| sums.scored).fold(0.0, f64::max);
        metrics.insert("reward/errors", failed);
        metrics.insert("reward/error_rate", if samples > 0.0 { failed / samples } else { 0.0 });
        metrics
    }
}

//! A step's samples from scoring to the loss: a row for each of all ranks, and this rank's samples.

use std::ops::Range;

use super::{rollout::Staleness, terms::TermSums};
use crate::{inference::Sample, metrics::Metrics, train::Share};

/// A sample, as all ranks know it.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Row {
    /// The reward; of a sample that could not be scored the mean of its group's others.
    pub reward: f64,
    /// The measure that an evaluation would report, filled likewise.
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
    /// Rows of all ranks, group by group in the step's order.
    pub rows: Vec<Row>,
    /// The reward of each group's greedy completion; empty unless advantages are relative to that.
    pub greedy: Vec<f64>,
    /// This rank's samples, in its own order: see [`Share::samples_of`].
    pub own: Vec<Sample>,
    /// Statistics of each term of the reward, over all ranks.
    pub terms: Vec<TermSums>,
    /// Over all ranks; `None` where a step samples what it trains on.
    pub staleness: Option<Staleness>,
    /// Batches of prompts that were drawn for them.
    pub batches: u64,
    /// Metrics of their selection; empty unless there is dynamic sampling.
    pub selection: Metrics,
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

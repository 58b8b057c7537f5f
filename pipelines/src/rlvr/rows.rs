//! Samples of a step from scoring to the loss: rows of all ranks, and this rank's samples.

use std::ops::Range;

use super::{rollout::Staleness, terms::TermSums};
use crate::{inference::Sample, metrics::Metrics, samples::Columns, train::Share};

/// A sample in the form that all ranks have.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Row {
    /// Batch of its prompt, and index of the prompt in the batch.
    pub prompt: (u64, usize),
    /// Score of each term; `None` if the term does not apply or failed.
    pub terms: Vec<Option<f64>>,
    /// The reward; a sample without a score has the mean of the rest of its group.
    pub reward: f64,
    /// The measure of evaluations; missing ones are filled in the same way.
    pub measured: f64,
    /// Sum of separately normalized terms; `None` unless advantages are computed from it.
    pub decoupled: Option<f64>,
    /// Reward of each turn; empty if rewards are per episode.
    pub turn_rewards: Vec<f64>,
    /// Tokens of the completion.
    pub tokens: usize,
    /// Turns of the completion.
    pub turns: usize,
    /// True if the completion ended by itself.
    pub finished: bool,
    /// True if the sample is trained on.
    pub trained: bool,
}

/// Scored samples that a step trains on.
#[derive(Debug, Default)]
pub struct Scored {
    /// Rows of all ranks, group by group in the step's order.
    pub rows: Vec<Row>,
    /// Reward of each group's greedy completion; empty unless advantages are relative to it.
    pub greedy: Vec<f64>,
    /// This rank's samples, in its own order: see [`Share::samples_of`].
    pub own: Vec<Sample>,
    /// Columns that reward functions logged for each of these samples.
    pub columns: Vec<Columns>,
    /// Statistics of each term of the reward, over all ranks.
    pub terms: Vec<TermSums>,
    /// Staleness over all ranks; `None` for rollout in the step.
    pub staleness: Option<Staleness>,
    /// Number of batches of prompts drawn for the samples.
    pub batches: u64,
    /// Metrics of the selection; empty without dynamic sampling.
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

    /// Tokens of each trained completion in a range of rows.
    pub fn trained_lengths(&self, rows: Range<usize>) -> Vec<f64> {
        self.rows[rows].iter().filter(|row| row.trained).map(|row| row.tokens as f64).collect()
    }

    /// This rank's samples, each with the index of its row.
    pub fn of_rank(&self, share: &Share, rank: usize) -> impl Iterator<Item = (usize, &Sample)> {
        share.samples_of(rank).zip(&self.own)
    }
}

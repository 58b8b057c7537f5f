//! `anyroll evaluate`: the evaluation of a run, for a model of any folder on records of any file.
//!
//! [`Exam`] has the records, the reward and the sampling. [`Exam::take`] answers and scores with the code of a run's
//! evaluation, and [`Summary`] has the numbers.

mod exam;
mod summary;

use std::sync::Arc;

pub use anyroll_algorithm::Method;
use anyroll_data::Record;
use anyroll_reward::Score;

pub use exam::{Asked, Exam, Place};
pub use summary::{DomainSummary, Estimate, Lengths, Summary};

pub use crate::rlvr::Verdicts;

/// An evaluated prompt.
#[derive(Debug)]
pub struct Prompt {
    /// The record.
    pub record: Arc<Record>,
    /// The greedy completion.
    pub greedy: Completion,
    /// The samples.
    pub samples: Vec<Completion>,
    /// Verdicts on the completions; `None` if one could not be scored, and the prompt counts in no number.
    pub verdicts: Option<Verdicts>,
}

/// An evaluated completion.
#[derive(Debug)]
pub struct Completion {
    /// Text without the end token.
    pub text: String,
    /// Length in tokens, including the end token.
    pub tokens: usize,
    /// True if it ended by itself, false if it was cut at the maximum length.
    pub finished: bool,
    /// Its score, or the failure of its reward.
    pub score: Result<Score, String>,
    /// The answer that the reward extracts from it, if it does.
    pub extracted: Option<String>,
}

impl Prompt {
    /// All completions, the greedy one first.
    pub fn completions(&self) -> impl Iterator<Item = &Completion> {
        std::iter::once(&self.greedy).chain(&self.samples)
    }
}

impl Completion {
    /// Returns true if its measure is 1 or above.
    pub fn is_right(&self) -> bool {
        self.score.as_ref().is_ok_and(|score| score.measured >= 1.0)
    }
}

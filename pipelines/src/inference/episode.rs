//! Samples of several turns: what an environment makes of them, and how a sampler asks it.

use std::ops::Range;

use serde::{Deserialize, Serialize};

use super::Sample;
use crate::failure::Failure;

/// A completion of several turns, as its environment sees it.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct Episode {
    /// Where among the tokens the environment speaks: each behind a turn and in front of the next one.
    pub observations: Vec<Range<usize>>,
    /// What each turn earned that the environment was told, if it said so.
    pub rewards: Vec<Option<f64>>,
    /// What went wrong, if something did; it has ended then.
    pub failure: Option<Failure>,
}

impl Episode {
    /// The sum of what its turns earned.
    ///
    /// # Errors
    /// What went wrong with it.
    pub fn reward(&self) -> Result<f64, Failure> {
        match &self.failure {
            Some(failure) => Err(failure.clone()),
            // An empty sum would be -0.
            None => Ok(self.rewards.iter().flatten().fold(0.0, |sum, reward| sum + reward)),
        }
    }
}

/// Answers the turns of samples, each known by its index.
pub trait AnswersTurns {
    /// Whether all samples have ended.
    fn is_idle(&self) -> bool;

    /// Takes the last turn of a sample, which was sampled to its end. A turn that was cut ends the sample.
    fn tell(&mut self, number: usize, sample: &mut Sample);

    /// Returns the answers so far, in the order of the indices. With `wait` it returns once there is one; `limits` are the
    /// most tokens of each sample.
    fn listen(&mut self, samples: &mut [Sample], limits: &[usize], wait: bool) -> Replies;
}

/// Indices of samples.
#[derive(Debug, Default)]
pub struct Replies {
    /// Samples whose next turn is to be sampled now.
    pub next: Vec<usize>,
    /// Samples that have ended.
    pub ended: Vec<usize>,
}

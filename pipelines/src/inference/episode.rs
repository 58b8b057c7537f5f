//! Samples of several turns: an environment's results, and its interface to a sampler.

use std::ops::Range;

use anyroll_reward::Failure;
use serde::{Deserialize, Serialize};

use super::Sample;

/// Environment's side of a completion with several turns.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct Episode {
    /// Token ranges of observations: each follows a turn and precedes the next one.
    pub observations: Vec<Range<usize>>,
    /// Reward of each turn sent to the environment, if it gave one.
    pub rewards: Vec<Option<f64>>,
    /// Failure that ended the episode, if any.
    pub failure: Option<Failure>,
}

impl Episode {
    /// Sum of the turns' rewards.
    ///
    /// # Errors
    /// The failure of the episode.
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
    /// Returns true if all samples have ended.
    fn is_idle(&self) -> bool;

    /// Sends the last, complete turn of a sample to its episode. A truncated turn ends the sample.
    fn tell(&mut self, number: usize, sample: &mut Sample);

    /// Returns the answers so far, in the order of the indices. With `wait`, returns when there is at least one.
    /// `limits` are the maximum tokens of each sample.
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

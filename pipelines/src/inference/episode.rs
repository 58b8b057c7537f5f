//! Results of an environment for a completion.

use std::ops::Range;

use serde::{Deserialize, Serialize};

use crate::reward::Failure;

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

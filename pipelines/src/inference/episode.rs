//! What an environment makes of a completion.

use std::ops::Range;

use serde::{Deserialize, Serialize};

use crate::reward::Failure;

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

//! Failures of rewards and environments.

use std::time::Duration;

use anyroll_data::Record;
use serde::{Deserialize, Serialize};

/// A reward that could not be computed.
#[derive(Debug, thiserror::Error)]
#[error("the reward `{name}` failed for record {record}")]
pub struct RewardError {
    /// The reward's name.
    pub name: &'static str,
    /// The record's id.
    pub record: String,
    /// Cause.
    #[source]
    pub failure: Failure,
}

impl RewardError {
    /// An error of the reward `name` on `record`, with its cause `why`.
    pub fn new(name: &'static str, record: &Record, why: impl Into<Failure>) -> Self {
        Self { name, record: record.id.clone(), failure: why.into() }
    }
}

/// A reward that does not start.
#[derive(Debug, thiserror::Error)]
#[error("the reward `{name}` does not start")]
pub struct StartError {
    /// Its name.
    pub name: String,
    /// Cause.
    #[source]
    pub failure: Failure,
}

/// Cause of a reward's failure.
#[derive(Clone, Debug, PartialEq, thiserror::Error, Serialize, Deserialize)]
pub enum Failure {
    /// It took too long.
    #[error("no answer in {} s", .0.as_secs_f64())]
    TimedOut(Duration),
    /// Any other cause.
    #[error("{0}")]
    Other(String),
}

impl Failure {
    /// Returns true if it timed out.
    pub fn is_timeout(&self) -> bool {
        matches!(self, Self::TimedOut(_))
    }
}

impl From<String> for Failure {
    fn from(why: String) -> Self {
        Self::Other(why)
    }
}

impl From<&str> for Failure {
    fn from(why: &str) -> Self {
        Self::Other(why.to_owned())
    }
}

//! Why a reward, or an environment, could not say what a completion earns.

use std::time::Duration;

use serde::{Deserialize, Serialize};

use crate::data::Record;

/// A reward that could not be computed.
#[derive(Debug, thiserror::Error)]
#[error("the reward `{name}` failed for record {record}")]
pub struct RewardError {
    /// The reward's name.
    pub name: &'static str,
    /// The record's id.
    pub record: String,
    /// Why.
    #[source]
    pub failure: Failure,
}

impl RewardError {
    /// The reward `name` cannot score `record`, since `why`.
    pub fn new(name: &'static str, record: &Record, why: impl Into<Failure>) -> Self {
        Self { name, record: record.id.clone(), failure: why.into() }
    }
}

/// Why a reward could not be computed.
#[derive(Clone, Debug, PartialEq, thiserror::Error, Serialize, Deserialize)]
pub enum Failure {
    /// It took too long.
    #[error("no answer in {} s", .0.as_secs_f64())]
    TimedOut(Duration),
    /// Anything else.
    #[error("{0}")]
    Other(String),
}

impl Failure {
    /// Whether it took too long.
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

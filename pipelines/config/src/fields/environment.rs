//! The fields of an environment.

use std::path::PathBuf;

use serde::{Deserialize, Serialize};

use super::{reward, rlvr::RolloutConfig};
use crate::document::Section;

/// Who answers the model's turns: a class in a file of the user's, an object of which is an episode.
#[derive(Clone, Debug, PartialEq, Deserialize, Serialize)]
#[serde(deny_unknown_fields)]
pub struct EnvironmentConfig {
    /// The file; a relative path starts at the current folder.
    pub path: PathBuf,
    /// The class's name in it. It has `reset` and `step`: docs/guides/environments.md has an example.
    pub class: String,
    /// Turns of an episode; one that is not done after so many is cut.
    pub max_turns: usize,
    /// Tokens of a turn, its end token included; an episode of which a turn is longer is cut. Default: what is left of
    /// `max_new_tokens`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub max_turn_tokens: Option<usize>,
    /// As whose message the model reads what the environment says. Default: `user` with a chat template, else `none`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub role: Option<Speaker>,
    /// Episodes that a rank has open at a time, each in a process of its own. Default: `batch_size`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub workers: Option<usize>,
    /// The interpreter, in whose environment the file's imports are. Default `python3`.
    #[serde(default = "reward::python3")]
    pub python: String,
    /// Seconds for an answer, after which the episode's process is ended. Default 30.
    #[serde(default = "reward::half_minute")]
    pub timeout_s: f64,
    /// Seconds for loading the file. Default 120.
    #[serde(default = "reward::two_minutes")]
    pub start_timeout_s: f64,
}

/// Who says what an environment says.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Deserialize, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum Speaker {
    /// The user, by the chat template.
    User,
    /// A tool, by the chat template.
    Tool,
    /// Nobody: the text stands as it is behind the turn.
    None,
}

impl Speaker {
    /// The role of its messages; `None` if it has none.
    pub fn role(self) -> Option<&'static str> {
        match self {
            Self::User => Some("user"),
            Self::Tool => Some("tool"),
            Self::None => None,
        }
    }
}

impl RolloutConfig {
    /// Episodes that a rank has open at a time.
    pub fn open_episodes(&self) -> usize {
        let workers = self.environment.as_ref().and_then(|environment| environment.workers);
        workers.unwrap_or(self.batch_size)
    }
}

impl EnvironmentConfig {
    /// Reports what cannot be, beside the other fields of `rollout`, which `at` is.
    pub(super) fn validate(&self, rollout: &RolloutConfig, at: &Section) {
        at.positive("environment.max_turns", self.max_turns);
        if let Some(tokens) = self.max_turn_tokens {
            at.positive("environment.max_turn_tokens", tokens);
            at.given(&["max_new_tokens"]).ensure(
                tokens <= rollout.max_new_tokens,
                "environment.max_turn_tokens",
                format!("{tokens} is more than all turns may have together"),
                format!("write at most `rollout.max_new_tokens`, {}", rollout.max_new_tokens),
            );
        }
        at.given(&["batch_size"]).number_of_threads("environment.workers", rollout.open_episodes());
        at.seconds("environment.timeout_s", self.timeout_s);
        at.seconds("environment.start_timeout_s", self.start_timeout_s);
    }
}

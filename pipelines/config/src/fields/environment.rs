//! The fields of an environment.

use std::path::PathBuf;

use serde::{Deserialize, Serialize};

use super::{reward, rlvr::RolloutConfig};
use crate::document::Section;

/// An environment that replies to the model's turns: a class in a Python file of the user's. An object of the class is
/// an episode.
#[derive(Clone, Debug, PartialEq, Deserialize, Serialize)]
#[serde(deny_unknown_fields)]
pub struct EnvironmentConfig {
    /// The Python file; a relative path starts at the config's folder.
    pub path: PathBuf,
    /// Name of the class in the file. The class has `reset` and `step`: docs/guides/environments.md has an example.
    pub class: String,
    /// Maximum number of turns of an episode; 1 or above. An episode that is not done then is cut.
    pub max_turns: usize,
    /// Maximum number of tokens of a turn, end token included; from 1 to `max_new_tokens`. An episode with a longer
    /// turn is cut. Default: the remainder of `max_new_tokens`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub max_turn_tokens: Option<usize>,
    /// Role of the environment's messages in the chat template. Default: `user` with a chat template, else `none`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub role: Option<Speaker>,
    /// Number of open episodes per rank, each in a separate process; 1 to 4096. Default: `batch_size`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub workers: Option<usize>,
    /// The interpreter, whose Python environment has the file's imports. Default `python3`.
    #[serde(default = "reward::python3")]
    pub python: String,
    /// Timeout of a reply in seconds; above 0, at most 3600. The episode's process is then killed. Default 30.
    #[serde(default = "reward::half_minute")]
    pub timeout_s: f64,
    /// Timeout of loading the file in seconds; above 0, at most 3600. Default 120.
    #[serde(default = "reward::two_minutes")]
    pub start_timeout_s: f64,
}

/// Role of an environment's messages.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Deserialize, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum Speaker {
    /// The user's role, by the chat template.
    User,
    /// The tool's role, by the chat template.
    Tool,
    /// No role: the text is appended to the turn without a template.
    None,
}

impl Speaker {
    /// Returns the role of the environment's messages; `None` if they have none.
    pub fn role(self) -> Option<&'static str> {
        match self {
            Self::User => Some("user"),
            Self::Tool => Some("tool"),
            Self::None => None,
        }
    }
}

impl RolloutConfig {
    /// Returns the number of open episodes per rank.
    pub fn open_episodes(&self) -> usize {
        let workers = self.environment.as_ref().and_then(|environment| environment.workers);
        workers.unwrap_or(self.batch_size)
    }
}

impl EnvironmentConfig {
    /// Reports invalid fields, also in combination with `rollout`. `at` is the rollout.
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

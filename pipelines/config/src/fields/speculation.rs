//! `speculation` of `rollout`: prompt lookup.

use anyroll_models::generation::Speculation;
use serde::{Deserialize, Serialize};

use crate::document::Section;

/// Prompt-lookup speculation: a sequence proposes the tokens that followed its last ones when they came earlier in its prompt
/// or completion, and one step checks all of them. Completions are those without it, up to the rounding of steps with other
/// numbers of rows, and are sampled from the same distribution.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Deserialize, Serialize)]
#[serde(deny_unknown_fields, default)]
pub struct SpeculationConfig {
    /// Maximum number of tokens that a sequence proposes in a step; 1 to 15. Default 3.
    pub num_speculative_tokens: usize,
    /// Maximum number of last tokens that are looked up; `prompt_lookup_min` or above. Default 4.
    pub prompt_lookup_max: usize,
    /// Minimum number of last tokens that are looked up; 1 or above. Default 2.
    pub prompt_lookup_min: usize,
    /// Maximum number of sequences in flight with which tokens are proposed; 1 or above. More of them use a device well
    /// without it, and rejected tokens cost them time. Default 16.
    pub max_sequences: usize,
}

impl Default for SpeculationConfig {
    fn default() -> Self {
        Self { num_speculative_tokens: 3, prompt_lookup_max: 4, prompt_lookup_min: 2, max_sequences: 16 }
    }
}

impl SpeculationConfig {
    pub(super) fn validate(self, at: &Section) {
        let most = Speculation::MOST_TOKENS;
        let tokens = self.num_speculative_tokens;
        at.number("num_speculative_tokens", tokens as f64, (1..=most).contains(&tokens), "from 1 to 15");
        at.positive("prompt_lookup_min", self.prompt_lookup_min);
        at.given(&["prompt_lookup_min"]).ensure(
            self.prompt_lookup_max >= self.prompt_lookup_min,
            "prompt_lookup_max",
            format!(
                "it is {}, below `prompt_lookup_min`, {}",
                self.prompt_lookup_max, self.prompt_lookup_min
            ),
            "write `prompt_lookup_min` or above",
        );
        at.positive("max_sequences", self.max_sequences);
    }

    /// Returns the engine's parameters.
    pub fn speculation(self) -> Speculation {
        Speculation {
            tokens: self.num_speculative_tokens,
            longest: self.prompt_lookup_max,
            shortest: self.prompt_lookup_min,
            sequences: self.max_sequences,
        }
    }
}

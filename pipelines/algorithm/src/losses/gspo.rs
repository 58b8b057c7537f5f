//! GSPO: PPO's clipping of a sequence's ratio (Zheng et al., 2025).

use serde::{Deserialize, Serialize};

use super::{
    Loss, Range, Result, Terms, Tokens,
    clipped::{ClippedConfig, clip_ranges, clipped},
    sequence_ratio,
};

/// GSPO's clipping. The bounds are much tighter than a token's, since the ratio is a mean over the sequence.
#[derive(Clone, Copy, Debug, PartialEq, Deserialize, Serialize)]
#[serde(deny_unknown_fields, default)]
pub struct GspoConfig {
    /// Distance of the sequence ratio's lower clipping bound `1 - clip_low` from 1; 0 to 1, both excluded.
    /// Default 3e-4.
    pub clip_low: f64,
    /// Distance of the sequence ratio's upper clipping bound `1 + clip_high` from 1; above 0. Default 4e-4.
    pub clip_high: f64,
}

impl Default for GspoConfig {
    fn default() -> Self {
        Self { clip_low: 3e-4, clip_high: 4e-4 }
    }
}

impl Loss for GspoConfig {
    fn title(&self) -> Option<&'static str> {
        Some("GSPO")
    }

    fn ranges(&self) -> Vec<Range> {
        clip_ranges(self.clip_low, self.clip_high)
    }

    fn is_of_sequences(&self) -> bool {
        true
    }

    fn clips(&self) -> bool {
        true
    }

    fn terms(&self, tokens: &Tokens) -> Result<Terms> {
        let Self { clip_low, clip_high } = *self;
        let log_ratio = tokens.log_ratio()?;
        let ratio = sequence_ratio(&log_ratio, tokens.lengths)?;
        let config = ClippedConfig { clip_low, clip_high, dual_clip: None };
        clipped(&config, tokens.advantages, log_ratio, ratio)
    }
}

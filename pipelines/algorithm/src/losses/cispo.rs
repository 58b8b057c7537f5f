//! CISPO: a policy gradient weighted by the clamped ratio (MiniMax, 2025, 2506.13585).

use serde::{Deserialize, Serialize};

use super::{Loss, Range, Result, Terms, Tokens, ratio};

/// CISPO's bounds of the ratio, as ratios. The bounds are 0 to 5 in TRL, and 0.8 to 1.28 in verl; 0 to 1 is truncated
/// importance sampling as a loss, ROLL's `tis`.
#[derive(Clone, Copy, Debug, PartialEq, Deserialize, Serialize)]
#[serde(deny_unknown_fields, default)]
pub struct CispoConfig {
    /// Smallest weight; 0 or above. Default 0, no bound.
    pub min_ratio: f64,
    /// Largest weight; above `min_ratio`. Default 5.
    pub max_ratio: f64,
}

impl Default for CispoConfig {
    fn default() -> Self {
        Self { min_ratio: 0.0, max_ratio: 5.0 }
    }
}

impl Loss for CispoConfig {
    fn title(&self) -> Option<&'static str> {
        Some("CISPO")
    }

    fn ranges(&self) -> Vec<Range> {
        let Self { min_ratio, max_ratio } = *self;
        let above = "above `min_ratio`; both are ratios, so that 0.8 and 1.28 are 0.2 below and 0.28 above";
        vec![
            Range::new("min_ratio", min_ratio, min_ratio >= 0.0, "0 or above"),
            Range::new("max_ratio", max_ratio, max_ratio > min_ratio, above).given("min_ratio"),
        ]
    }

    fn clips(&self) -> bool {
        true
    }

    fn terms(&self, tokens: &Tokens) -> Result<Terms> {
        let Self { min_ratio, max_ratio } = *self;
        let log_ratio = tokens.log_ratio()?;
        let ratio = ratio(&log_ratio)?;
        let weights = ratio.f_clamp(min_ratio, max_ratio)?.f_detach()?;
        let bounds = [ratio.f_lt(min_ratio)?, ratio.f_gt(max_ratio)?];
        Ok(Terms { loss: tokens.weighted(&weights)?, log_ratio, ratio, clipped: Some(bounds) })
    }
}

//! PPO's clipped ratio (Schulman et al., 2017), with the separate bounds of DAPO (Yu et al., 2025).

use serde::{Deserialize, Serialize};
use tch::Tensor;

use super::{Loss, Range, Result, Terms, Tokens, ratio};

/// PPO's clipping.
#[derive(Clone, Copy, Debug, PartialEq, Deserialize, Serialize)]
#[serde(deny_unknown_fields, default)]
pub struct ClippedConfig {
    /// Distance of the ratio's lower clipping bound `1 - clip_low` from 1; 0 to 1, both excluded. Default 0.2.
    pub clip_low: f64,
    /// Distance of the ratio's upper clipping bound `1 + clip_high` from 1; above 0. Default 0.28.
    pub clip_high: f64,
    /// Upper bound of the loss where the advantage is negative, as a multiple of its absolute value; above 1.
    /// Default: no bound.
    pub dual_clip: Option<f64>,
}

impl Default for ClippedConfig {
    fn default() -> Self {
        Self { clip_low: 0.2, clip_high: 0.28, dual_clip: None }
    }
}

impl Loss for ClippedConfig {
    fn title(&self) -> Option<&'static str> {
        None
    }

    fn ranges(&self) -> Vec<Range> {
        let Self { clip_low, clip_high, dual_clip } = *self;
        let bound = dual_clip.unwrap_or(f64::MAX);
        let range = "above 1 + `clip_high`, or leave it out";
        let mut ranges = clip_ranges(clip_low, clip_high);
        ranges.push(Range::new("dual_clip", bound, bound > 1.0 + clip_high, range).given("clip_high"));
        ranges
    }

    fn clips(&self) -> bool {
        true
    }

    fn terms(&self, tokens: &Tokens) -> Result<Terms> {
        let log_ratio = tokens.log_ratio()?;
        let ratio = ratio(&log_ratio)?;
        clipped(self, tokens.advantages, log_ratio, ratio)
    }
}

/// Returns the ranges of the clipping bounds around 1.
pub fn clip_ranges(low: f64, high: f64) -> Vec<Range> {
    vec![
        Range::new("clip_low", low, low > 0.0 && low < 1.0, "above 0 and below 1"),
        Range::new("clip_high", high, high > 0.0, "above 0"),
    ]
}

/// max(-A r, -A clip(r, 1 - low, 1 + high)); with `dual_clip` c and a negative A at most -c A (Ye et al., 2020).
pub fn clipped(
    config: &ClippedConfig,
    advantages: &Tensor,
    log_ratio: Tensor,
    ratio: Tensor,
) -> Result<Terms> {
    let (low, high) = (1.0 - config.clip_low, 1.0 + config.clip_high);
    let gain = advantages.f_neg()?;
    let mut loss = gain.f_mul(&ratio)?.f_maximum(&gain.f_mul(&ratio.f_clamp(low, high)?)?)?;
    let (falls, rises) = (advantages.f_lt(0.0)?, advantages.f_gt(0.0)?);
    if let Some(bound) = config.dual_clip {
        let bounded = loss.f_minimum(&gain.f_mul_scalar(bound)?)?;
        loss = bounded.f_where_self(&falls, &loss)?;
    }
    let bounds = [ratio.f_lt(low)?.f_logical_and(&falls)?, ratio.f_gt(high)?.f_logical_and(&rises)?];
    Ok(Terms { loss, log_ratio, ratio, clipped: Some(bounds) })
}

//! GMPO: the geometric mean of clipped ratios (Zhao et al., 2025, 2507.20673).

use serde::{Deserialize, Serialize};

use super::{Loss, Range, Result, Terms, Tokens, sequence_ratio};

/// GMPO's clipping of the logarithm of a token's ratio. The bounds are wider than PPO's, since clipping is before the
/// mean.
#[derive(Clone, Copy, Debug, PartialEq, Deserialize, Serialize)]
#[serde(deny_unknown_fields, default)]
pub struct GmpoConfig {
    /// Lower clipping bound of the ratio, as `exp(-clip_low)`; above 0. Default 0.4.
    pub clip_low: f64,
    /// Upper clipping bound of the ratio, as `exp(clip_high)`; above 0. Default 0.4.
    pub clip_high: f64,
}

impl Default for GmpoConfig {
    fn default() -> Self {
        Self { clip_low: 0.4, clip_high: 0.4 }
    }
}

impl Loss for GmpoConfig {
    fn title(&self) -> Option<&'static str> {
        Some("GMPO")
    }

    fn ranges(&self) -> Vec<Range> {
        vec![
            Range::new("clip_low", self.clip_low, self.clip_low > 0.0, "above 0"),
            Range::new("clip_high", self.clip_high, self.clip_high > 0.0, "above 0"),
        ]
    }

    fn is_of_sequences(&self) -> bool {
        true
    }

    fn clips(&self) -> bool {
        true
    }

    /// -A exp(mean over the sequence of c), where c is l - o, clipped on the side to which the advantage moves the
    /// ratio.
    fn terms(&self, tokens: &Tokens) -> Result<Terms> {
        let (log_ratio, advantages) = (tokens.log_ratio()?, tokens.advantages);
        let (low, high) = (-self.clip_low, self.clip_high);
        let (falls, rises) = (advantages.f_lt(0.0)?, advantages.f_gt(0.0)?);
        let kept = log_ratio.f_clamp_max(high)?.f_where_self(&rises, &log_ratio.f_clamp_min(low)?)?;
        let ratio = sequence_ratio(&kept, tokens.lengths)?;
        let loss = advantages.f_neg()?.f_mul(&ratio)?;
        let bounds =
            [log_ratio.f_lt(low)?.f_logical_and(&falls)?, log_ratio.f_gt(high)?.f_logical_and(&rises)?];
        Ok(Terms { loss, log_ratio, ratio, clipped: Some(bounds) })
    }
}

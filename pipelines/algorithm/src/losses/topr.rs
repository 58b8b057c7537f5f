//! TOPR: a tapered policy gradient for samples of other policies (Le Roux et al., 2025, 2503.14286).

use serde::{Deserialize, Serialize};

use super::{Loss, Range, Result, Terms, Tokens, ratio};

/// TOPR's weights.
#[derive(Clone, Copy, Debug, PartialEq, Deserialize, Serialize)]
#[serde(deny_unknown_fields, default)]
pub struct ToprConfig {
    /// Weight of tokens with a positive advantage; 0 or above. Default 1.
    pub positive_weight: f64,
    /// Weight of the other tokens, a factor on their ratio; 0 or above. Default 1.
    pub negative_weight: f64,
}

impl Default for ToprConfig {
    fn default() -> Self {
        Self { positive_weight: 1.0, negative_weight: 1.0 }
    }
}

impl Loss for ToprConfig {
    fn title(&self) -> Option<&'static str> {
        Some("TOPR")
    }

    fn ranges(&self) -> Vec<Range> {
        let Self { positive_weight, negative_weight } = *self;
        vec![
            Range::new("positive_weight", positive_weight, positive_weight >= 0.0, "0 or above"),
            Range::new("negative_weight", negative_weight, negative_weight >= 0.0, "0 or above"),
        ]
    }

    fn terms(&self, tokens: &Tokens) -> Result<Terms> {
        let log_ratio = tokens.log_ratio()?;
        let ratio = ratio(&log_ratio)?;
        let rises = tokens.advantages.f_gt(0.0)?;
        let falls = ratio.f_clamp(0.0, 1.0)?.f_mul_scalar(self.negative_weight)?;
        let weights = falls.f_masked_fill(&rises, self.positive_weight)?.f_detach()?;
        Ok(Terms { loss: tokens.weighted(&weights)?, log_ratio, ratio, clipped: None })
    }
}

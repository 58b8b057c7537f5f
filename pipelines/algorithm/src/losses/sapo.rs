//! SAPO: a soft gate instead of a clip (Gao et al., 2025).

use serde::{Deserialize, Serialize};

use super::{Loss, Range, Result, Terms, Tokens, ratio};

/// SAPO's gates.
#[derive(Clone, Copy, Debug, PartialEq, Deserialize, Serialize)]
#[serde(deny_unknown_fields, default)]
pub struct SapoConfig {
    /// Steepness of the gate where the advantage is positive; above 0. Default 1.
    pub tau_positive: f64,
    /// Steepness of the gate where the advantage is 0 or negative; above 0. Default 1.05.
    pub tau_negative: f64,
}

impl Default for SapoConfig {
    fn default() -> Self {
        Self { tau_positive: 1.0, tau_negative: 1.05 }
    }
}

impl Loss for SapoConfig {
    fn title(&self) -> Option<&'static str> {
        Some("SAPO")
    }

    fn ranges(&self) -> Vec<Range> {
        vec![
            Range::new("tau_positive", self.tau_positive, self.tau_positive > 0.0, "above 0"),
            Range::new("tau_negative", self.tau_negative, self.tau_negative > 0.0, "above 0"),
        ]
    }

    /// -A sigmoid(tau (r - 1)) 4 / tau, whose slope is -A at r = 1.
    fn terms(&self, tokens: &Tokens) -> Result<Terms> {
        let log_ratio = tokens.log_ratio()?;
        let ratio = ratio(&log_ratio)?;
        let rises = tokens.advantages.f_gt(0.0)?;
        let tau = ratio.f_full_like(self.tau_negative)?.f_detach()?;
        let tau = tau.f_masked_fill(&rises, self.tau_positive)?;
        let gate = ratio.f_sub_scalar(1.0)?.f_mul(&tau)?.f_sigmoid()?;
        let loss = gate.f_mul_scalar(4.0)?.f_div(&tau)?.f_mul(&tokens.advantages.f_neg()?)?;
        Ok(Terms { loss, log_ratio, ratio, clipped: None })
    }
}

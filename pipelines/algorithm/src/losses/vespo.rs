//! VESPO: a smooth function of a sequence's ratio as the weight (Shen et al., 2026, 2602.10693).

use serde::{Deserialize, Serialize};
use tch::Tensor;

use super::{Loss, MOST_LOG_RATIO, Range, Result, Terms, Tokens, sequence_sums};

/// Smallest ratio of a sequence that the weights distinguish from 0, as in the paper's code.
const LEAST_SEQUENCE_RATIO: f64 = 1e-8;

/// VESPO's weights exp(lambda) W^k exp(-lambda W) of a sequence's ratio W; the weight is 1 at W = 1.
#[derive(Clone, Copy, Debug, PartialEq, Deserialize, Serialize)]
#[serde(deny_unknown_fields, default)]
pub struct VespoConfig {
    /// Power of the ratio if the advantage is 0 or above; 0 or above. Default 2.
    pub k_positive: f64,
    /// Decay of the weight if the advantage is 0 or above; above 0. Default 3.
    pub lambda_positive: f64,
    /// Power of the ratio if the advantage is negative; 0 or above. Default 3.
    pub k_negative: f64,
    /// Decay of the weight if the advantage is negative; above 0. Default 2.
    pub lambda_negative: f64,
}

impl Default for VespoConfig {
    fn default() -> Self {
        Self { k_positive: 2.0, lambda_positive: 3.0, k_negative: 3.0, lambda_negative: 2.0 }
    }
}

impl Loss for VespoConfig {
    fn title(&self) -> Option<&'static str> {
        Some("VESPO")
    }

    fn ranges(&self) -> Vec<Range> {
        let Self { k_positive, lambda_positive, k_negative, lambda_negative } = *self;
        vec![
            Range::new("k_positive", k_positive, k_positive >= 0.0, "0 or above"),
            Range::new("k_negative", k_negative, k_negative >= 0.0, "0 or above"),
            Range::new("lambda_positive", lambda_positive, lambda_positive > 0.0, "above 0"),
            Range::new("lambda_negative", lambda_negative, lambda_negative > 0.0, "above 0"),
        ]
    }

    fn refuses_correction(&self) -> Option<&'static str> {
        Some("the weights of `vespo` are of the same ratio, and would count it twice")
    }

    fn terms(&self, tokens: &Tokens) -> Result<Terms> {
        let log_ratio = tokens.log_ratio()?;
        let bounded = log_ratio.f_clamp(-MOST_LOG_RATIO, MOST_LOG_RATIO)?;
        let product = sequence_sums(&bounded, tokens.lengths)?;
        let product = product.f_clamp(LEAST_SEQUENCE_RATIO.ln(), MOST_LOG_RATIO)?;
        let loss = tokens.weighted(&self.weights(tokens.advantages, &product)?)?;
        Ok(Terms { loss, log_ratio, ratio: product.f_exp()?, clipped: None })
    }
}

impl VespoConfig {
    /// Returns exp(lambda) W^k exp(-lambda W) for sequences' ratios W, from their logarithms (section 3.4), without a
    /// gradient.
    fn weights(&self, advantages: &Tensor, log_ratio: &Tensor) -> Result<Tensor> {
        let falls = advantages.f_lt(0.0)?;
        let choose =
            |positive: f64, negative: f64| advantages.f_full_like(positive)?.f_masked_fill(&falls, negative);
        let k = choose(self.k_positive, self.k_negative)?;
        let lambda = choose(self.lambda_positive, self.lambda_negative)?;
        let decayed = lambda.f_mul(&log_ratio.f_exp()?.f_neg()?.f_add_scalar(1.0)?)?;
        k.f_mul(log_ratio)?.f_add(&decayed)?.f_exp()?.f_detach()
    }
}

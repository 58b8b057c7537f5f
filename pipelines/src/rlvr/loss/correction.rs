//! Importance weights of sampled tokens under the trained policy: exp(old - rollout).

use anyroll_algorithm::losses::{sequence_means, sequence_sums};
use anyroll_config::{Level, MaskConfig, RolloutCorrection, TruncateConfig};
use tch::{Kind, Tensor};

use super::Result;
use crate::train::device_sums;

/// Log-weights are clamped to this range around 0, since exp overflows.
const MOST_LOG_WEIGHT: f64 = 20.0;

/// The weights of a rank's tokens in a step.
#[derive(Debug)]
pub struct Correction {
    /// Weights, `[M]`, without a gradient.
    pub weights: Tensor,
    /// Sums over the tokens, on the device.
    pub sums: CorrectionSums<Tensor>,
}

device_sums! {
    /// Sums over the weights of tokens.
    pub struct CorrectionSums {
        /// Sum of the weights.
        weights,
        /// Sum of the weights' squares.
        squares,
        /// Tokens whose weight is truncated or masked.
        changed,
    }
}

impl Correction {
    /// Weights of tokens whose sequences have these lengths; `None` without a correction.
    ///
    /// Truncated importance sampling (Yao et al., 2025) limits a weight to `max`. Masked importance sampling sets it
    /// to 0 outside of `min` to `max`. Neither changes the divisor of the loss.
    pub fn new(
        config: &RolloutCorrection,
        old_logprobs: &Tensor,
        rollout_logprobs: &Tensor,
        lengths: &[i64],
    ) -> Result<Option<Self>> {
        let all = |level| importance(level, old_logprobs, rollout_logprobs, lengths);
        let (weights, changed) = match *config {
            RolloutCorrection::None => return Ok(None),
            RolloutCorrection::Truncate(TruncateConfig { level, max }) => {
                let weights = all(level)?;
                (weights.f_clamp_max(max)?, weights.f_gt(max)?)
            }
            RolloutCorrection::Mask(MaskConfig { level, min, max }) => {
                let weights = all(level)?;
                let outside = weights.f_lt(min)?.f_logical_or(&weights.f_gt(max)?)?;
                (weights.f_masked_fill(&outside, 0.0)?, outside)
            }
        };
        let sum = |tensor: &Tensor| tensor.f_sum(Kind::Double);
        let sums = CorrectionSums {
            weights: sum(&weights)?,
            squares: sum(&weights.f_square()?)?,
            changed: sum(&changed)?,
        };
        Ok(Some(Self { weights, sums }))
    }
}

fn importance(level: Level, old: &Tensor, rollout: &Tensor, lengths: &[i64]) -> Result<Tensor> {
    let of_token = old.f_sub(rollout)?;
    let log_weights = match level {
        Level::Token => of_token,
        Level::Sequence => sequence_sums(&of_token, lengths)?,
        Level::Geometric => sequence_means(&of_token, lengths)?,
    };
    log_weights.f_clamp(-MOST_LOG_WEIGHT, MOST_LOG_WEIGHT)?.f_exp()
}

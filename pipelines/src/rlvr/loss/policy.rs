//! The losses of a token, by its log-prob l, old log-prob o and advantage A; r = exp(l - o) is its ratio.

use tch::Tensor;

use super::{Result, Targets, sequence_means};
use crate::config::{CispoConfig, ClippedConfig, GspoConfig, PolicyLoss, SapoConfig, ToprConfig};

/// Differences of log-probs are clamped to minus and plus this, since exp overflows.
const MOST_LOG_RATIO: f64 = 20.0;
/// GSPO's own clamp from above, as verl's.
const MOST_SEQUENCE_LOG_RATIO: f64 = 10.0;

/// What a loss says of each token, `[M]`.
#[derive(Debug)]
pub struct Terms {
    /// The loss, with its gradient.
    pub loss: Tensor,
    /// l - o.
    pub log_ratio: Tensor,
    /// The ratio; for a loss of sequences, their sequence's.
    pub ratio: Tensor,
    /// Whether the ratio is kept from below, and from above, from moving the policy as it would; `None` for a loss
    /// without bounds.
    pub clipped: Option<[Tensor; 2]>,
}

/// The terms of `loss`.
pub fn terms(loss: &PolicyLoss, logprobs: &Tensor, targets: &Targets) -> Result<Terms> {
    let log_ratio = logprobs.f_sub(&targets.old_logprobs)?;
    let ratio = log_ratio.f_clamp(-MOST_LOG_RATIO, MOST_LOG_RATIO)?.f_exp()?;
    let advantages = &targets.advantages;
    match loss {
        PolicyLoss::Clipped(config) => clipped(config, advantages, log_ratio, ratio),
        PolicyLoss::Gspo(GspoConfig { clip_low, clip_high }) => {
            let ratio = sequence_ratio(logprobs, &log_ratio, targets)?;
            let config = ClippedConfig { clip_low: *clip_low, clip_high: *clip_high, dual_clip: None };
            clipped(&config, advantages, log_ratio, ratio)
        }
        PolicyLoss::Cispo(CispoConfig { min_ratio, max_ratio }) => {
            let weights = ratio.f_clamp(*min_ratio, *max_ratio)?.f_detach()?;
            let bounds = [ratio.f_lt(*min_ratio)?, ratio.f_gt(*max_ratio)?];
            let loss = weighted(&weights, advantages, logprobs)?;
            Ok(Terms { loss, log_ratio, ratio, clipped: Some(bounds) })
        }
        PolicyLoss::Reinforce => {
            let loss = advantages.f_neg()?.f_mul(logprobs)?;
            Ok(Terms { loss, log_ratio, ratio, clipped: None })
        }
        PolicyLoss::Sapo(config) => {
            let loss = sapo(config, advantages, &ratio)?;
            Ok(Terms { loss, log_ratio, ratio, clipped: None })
        }
        PolicyLoss::Topr(ToprConfig { positive_weight, negative_weight }) => {
            let rises = advantages.f_gt(0.0)?;
            let falls = ratio.f_clamp(0.0, 1.0)?.f_mul_scalar(*negative_weight)?;
            let weights = falls.f_masked_fill(&rises, *positive_weight)?.f_detach()?;
            let loss = weighted(&weights, advantages, logprobs)?;
            Ok(Terms { loss, log_ratio, ratio, clipped: None })
        }
    }
}

/// max(-A r, -A clip(r, 1 - low, 1 + high)) (Schulman et al., 2017, with the separate bounds of DAPO, Yu et al.,
/// 2025); with `dual_clip` c and A below 0 at most -c A (Ye et al., 2020).
fn clipped(config: &ClippedConfig, advantages: &Tensor, log_ratio: Tensor, ratio: Tensor) -> Result<Terms> {
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

/// exp(mean of l - o over the token's sequence) (Zheng et al., 2025), in their token form: its gradient is that of
/// the token's own l. Summed over a sequence of equal advantages this is the gradient of the sequence's ratio.
fn sequence_ratio(logprobs: &Tensor, log_ratio: &Tensor, targets: &Targets) -> Result<Tensor> {
    let mean = sequence_means(log_ratio, &targets.lengths)?;
    let of_token = logprobs.f_sub(&logprobs.f_detach()?)?; // 0, with a gradient
    mean.f_add(&of_token)?.f_clamp_max(MOST_SEQUENCE_LOG_RATIO)?.f_exp()
}

/// -w A l: a policy gradient with weights through which nothing flows.
fn weighted(weights: &Tensor, advantages: &Tensor, logprobs: &Tensor) -> Result<Tensor> {
    weights.f_mul(advantages)?.f_neg()?.f_mul(logprobs)
}

/// -A sigmoid(tau (r - 1)) 4 / tau, whose slope is -A at r = 1 (Gao et al., 2025).
fn sapo(config: &SapoConfig, advantages: &Tensor, ratio: &Tensor) -> Result<Tensor> {
    let rises = advantages.f_gt(0.0)?;
    let tau = ratio.f_full_like(config.tau_negative)?.f_detach()?;
    let tau = tau.f_masked_fill(&rises, config.tau_positive)?;
    let gate = ratio.f_sub_scalar(1.0)?.f_mul(&tau)?.f_sigmoid()?;
    gate.f_mul_scalar(4.0)?.f_div(&tau)?.f_mul(&advantages.f_neg()?)
}

//! The losses of a token, by its log-prob l, old log-prob o and advantage A; r = exp(l - o) is its ratio.

use tch::Tensor;

use super::{Result, Targets, sequence_means, sequence_sums};
use crate::config::{
    CispoConfig, ClippedConfig, GmpoConfig, GspoConfig, PolicyLoss, SapoConfig, ToprConfig, VespoConfig,
};

/// Differences of log-probs are clamped to minus and plus this, since exp overflows.
const MOST_LOG_RATIO: f64 = 20.0;
/// GSPO's own clamp from above, as verl's.
const MOST_SEQUENCE_LOG_RATIO: f64 = 10.0;
/// The least ratio of a sequence that VESPO's weights tell from 0, as in the paper's code.
const LEAST_SEQUENCE_RATIO: f64 = 1e-8;

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
    let ratio = ratio(&log_ratio)?;
    let advantages = &targets.advantages;
    match loss {
        PolicyLoss::Clipped(config) => clipped(config, advantages, log_ratio, ratio),
        PolicyLoss::Gspo(GspoConfig { clip_low, clip_high }) => {
            let ratio = sequence_ratio(&log_ratio, &targets.lengths)?;
            let config = ClippedConfig { clip_low: *clip_low, clip_high: *clip_high, dual_clip: None };
            clipped(&config, advantages, log_ratio, ratio)
        }
        PolicyLoss::Gmpo(config) => gmpo(config, advantages, log_ratio, &targets.lengths),
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
        PolicyLoss::Vespo(config) => {
            let bounded = log_ratio.f_clamp(-MOST_LOG_RATIO, MOST_LOG_RATIO)?;
            let product = sequence_sums(&bounded, &targets.lengths)?;
            let product = product.f_clamp(LEAST_SEQUENCE_RATIO.ln(), MOST_LOG_RATIO)?;
            let loss = weighted(&vespo(config, advantages, &product)?, advantages, logprobs)?;
            Ok(Terms { loss, log_ratio, ratio: product.f_exp()?, clipped: None })
        }
    }
}

/// exp(l - o), the exponent clamped.
pub fn ratio(log_ratio: &Tensor) -> Result<Tensor> {
    log_ratio.f_clamp(-MOST_LOG_RATIO, MOST_LOG_RATIO)?.f_exp()
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

/// -A exp(mean over the sequence of c), where c is l - o clipped on the side to which the advantage pushes (Zhao et al., 2025, 2507.20673).
fn gmpo(config: &GmpoConfig, advantages: &Tensor, log_ratio: Tensor, lengths: &[i64]) -> Result<Terms> {
    let (low, high) = (-config.clip_low, config.clip_high);
    let (falls, rises) = (advantages.f_lt(0.0)?, advantages.f_gt(0.0)?);
    let kept = log_ratio.f_clamp_max(high)?.f_where_self(&rises, &log_ratio.f_clamp_min(low)?)?;
    let ratio = sequence_ratio(&kept, lengths)?;
    let loss = advantages.f_neg()?.f_mul(&ratio)?;
    let bounds = [log_ratio.f_lt(low)?.f_logical_and(&falls)?, log_ratio.f_gt(high)?.f_logical_and(&rises)?];
    Ok(Terms { loss, log_ratio, ratio, clipped: Some(bounds) })
}

/// exp(mean of `log_ratio` over the token's sequence) (Zheng et al., 2025), in their token form: its gradient is that of
/// the token's own. Summed over a sequence of equal advantages this is the gradient of the sequence's ratio.
fn sequence_ratio(log_ratio: &Tensor, lengths: &[i64]) -> Result<Tensor> {
    let mean = sequence_means(log_ratio, lengths)?;
    let of_token = log_ratio.f_sub(&log_ratio.f_detach()?)?; // 0, with a gradient
    mean.f_add(&of_token)?.f_clamp_max(MOST_SEQUENCE_LOG_RATIO)?.f_exp()
}

/// -w A l: a policy gradient with weights through which nothing flows.
fn weighted(weights: &Tensor, advantages: &Tensor, logprobs: &Tensor) -> Result<Tensor> {
    weights.f_mul(advantages)?.f_neg()?.f_mul(logprobs)
}

/// exp(lambda) W^k exp(-lambda W) of sequences' ratios W by their logarithms (2602.10693, section 3.4), without a gradient.
fn vespo(config: &VespoConfig, advantages: &Tensor, log_ratio: &Tensor) -> Result<Tensor> {
    let falls = advantages.f_lt(0.0)?;
    let choose =
        |positive: f64, negative: f64| advantages.f_full_like(positive)?.f_masked_fill(&falls, negative);
    let k = choose(config.k_positive, config.k_negative)?;
    let lambda = choose(config.lambda_positive, config.lambda_negative)?;
    let decayed = lambda.f_mul(&log_ratio.f_exp()?.f_neg()?.f_add_scalar(1.0)?)?;
    k.f_mul(log_ratio)?.f_add(&decayed)?.f_exp()?.f_detach()
}

/// -A sigmoid(tau (r - 1)) 4 / tau, whose slope is -A at r = 1 (Gao et al., 2025).
fn sapo(config: &SapoConfig, advantages: &Tensor, ratio: &Tensor) -> Result<Tensor> {
    let rises = advantages.f_gt(0.0)?;
    let tau = ratio.f_full_like(config.tau_negative)?.f_detach()?;
    let tau = tau.f_masked_fill(&rises, config.tau_positive)?;
    let gate = ratio.f_sub_scalar(1.0)?.f_mul(&tau)?.f_sigmoid()?;
    gate.f_mul_scalar(4.0)?.f_div(&tau)?.f_mul(&advantages.f_neg()?)
}

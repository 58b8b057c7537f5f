//! The loss of a mini-batch as a gradient on per-token log-probs.
//!
//! Tokens of several sequences are concatenated, `[M]`, without padding, so that no mask is needed.
//! [`anyroll_algorithm::losses`] has the losses of a token, and [`aggregation`] combines them. [`correction`] has
//! weights for the difference between sampling and training, and [`uncertain`] selects tokens. [`stats`] has
//! statistics, and [`value`] is the critic's loss. Only the `read` functions wait for the device.
//!
//! `docs/reference/algorithms.md` has the sources, and the differences between systems.

mod aggregation;
mod correction;
mod stats;
#[cfg(test)]
mod tests;
mod uncertain;
mod value;

pub use aggregation::{count, token_weights};
pub use correction::{Correction, CorrectionSums};
pub use stats::{LossStats, LossTotals};
pub use uncertain::most_uncertain;
pub use value::{ValueStats, ValueTargets, value_loss};

use std::ops::Range;

use anyroll_algorithm::losses::{Tokens, ratio, sequence_means};
use anyroll_config::{AlgorithmConfig, KlEstimator, KlTerm};
use anyroll_models::{Scores, ScoresGrad};
use tch::{TchError, Tensor};

type Result<T> = std::result::Result<T, TchError>;

/// Targets of the tokens of some sequences: each tensor is fp32 `[M]`, in the order of the scores.
#[derive(Debug)]
pub struct Targets {
    /// Tokens of each sequence.
    pub lengths: Vec<i64>,
    /// Log-probs at sampling time.
    pub rollout_logprobs: Tensor,
    /// Log-probs under the policy before the first update of the step: those of sampling, or training's own.
    pub old_logprobs: Tensor,
    /// Advantage of each token.
    pub advantages: Tensor,
    /// Log-probs under the reference; `None` without a KL term in the loss.
    pub ref_logprobs: Option<Tensor>,
    /// Weights of the policy loss; `None` for 1.
    pub policy_weights: Option<Tensor>,
    /// Weights from [`token_weights`].
    pub token_weights: Tensor,
}

impl Targets {
    /// Targets of a range of the sequences, as views.
    pub fn part(&self, sequences: Range<usize>) -> Result<Targets> {
        let start: i64 = self.lengths[..sequences.start].iter().sum();
        let lengths = self.lengths[sequences].to_vec();
        let tokens = lengths.iter().sum();
        let part = |tensor: &Tensor| tensor.f_narrow(0, start, tokens);
        Ok(Targets {
            lengths,
            rollout_logprobs: part(&self.rollout_logprobs)?,
            old_logprobs: part(&self.old_logprobs)?,
            advantages: part(&self.advantages)?,
            ref_logprobs: self.ref_logprobs.as_ref().map(part).transpose()?,
            policy_weights: self.policy_weights.as_ref().map(part).transpose()?,
            token_weights: part(&self.token_weights)?,
        })
    }
}

/// Returns the gradient of the loss with respect to log-probs and entropies. The loss is a sum over tokens, weighted
/// by their token weights and divided by `count`. A token's part is policy weight times policy loss, plus `kl_coef`
/// times KL if KL is in the loss, minus `entropy_coef` times entropy. The policy loss is 0 where `off_policy_mask`
/// applies. `count` is [`count`] of the whole mini-batch, over all ranks and micro-batches.
pub fn policy_loss(
    algorithm: &AlgorithmConfig,
    scores: &Scores,
    targets: &Targets,
    count: f64,
    stats: &mut LossStats,
) -> Result<ScoresGrad> {
    let logprobs = scores.logprobs.f_detach()?.f_set_requires_grad(true)?;
    let Targets { old_logprobs, advantages, lengths, .. } = targets;
    let terms =
        algorithm.loss.formula().terms(&Tokens { logprobs: &logprobs, old_logprobs, advantages, lengths })?;
    let masked = algorithm.off_policy_mask.map(|most| off_policy(most, &logprobs, targets)).transpose()?;
    let mut policy = terms.loss.shallow_clone();
    if let Some(weights) = &targets.policy_weights {
        policy = policy.f_mul(weights)?;
    }
    if let Some(masked) = &masked {
        policy = policy.f_masked_fill(masked, 0.0)?;
    }
    let mut loss = policy.shallow_clone();
    let mut kl = None;
    if let (Some(reference), KlTerm::Loss(config)) = (&targets.ref_logprobs, algorithm.kl_in) {
        let mut divergence = kl_divergence(config.estimator, &logprobs, reference)?;
        if config.weighted {
            divergence = divergence.f_mul(&ratio(&terms.log_ratio)?)?;
        }
        loss = loss.f_add(&divergence.f_mul_scalar(algorithm.kl_coef)?)?;
        kl = Some(divergence);
    }
    let loss = loss.f_mul(&targets.token_weights)?;
    let mean = loss.f_sum(loss.kind())?.f_div_scalar(count)?;
    let gradient = Tensor::f_run_backward(&[&mean], &[&logprobs], false, false)?.swap_remove(0);
    let entropy = (algorithm.entropy_coef > 0.0)
        .then(|| targets.token_weights.f_mul_scalar(-algorithm.entropy_coef / count))
        .transpose()?;
    stats.add(&stats::Seen { policy, kl, masked, terms, scores, targets })?;
    Ok(ScoresGrad { logprobs: gradient, entropy, divergence: None })
}

/// Returns true for tokens with a negative advantage in a sequence that has become unlikely under the policy. The
/// sequence's mean of the rollout's log-prob minus the new one must be above `most` (DeepSeek-AI, 2025, 2512.02556,
/// section 3.1).
fn off_policy(most: f64, logprobs: &Tensor, targets: &Targets) -> Result<Tensor> {
    let moved = sequence_means(&targets.rollout_logprobs.f_sub(logprobs)?, &targets.lengths)?;
    moved.f_gt(most)?.f_logical_and(&targets.advantages.f_lt(0.0)?)
}

/// Schulman's estimators of the KL divergence of the policy from the reference, one value per token. With d =
/// `logprobs` - `reference`, they are k1 = d, k2 = d² / 2 and k3 = exp(-d) + d - 1.
fn kl_divergence(estimator: KlEstimator, logprobs: &Tensor, reference: &Tensor) -> Result<Tensor> {
    match estimator {
        KlEstimator::K1 => logprobs.f_sub(reference),
        KlEstimator::K2 => logprobs.f_sub(reference)?.f_square()?.f_mul_scalar(0.5),
        KlEstimator::K3 => {
            let difference = reference.f_sub(logprobs)?;
            difference.f_exp()?.f_sub(&difference)?.f_sub_scalar(1.0)
        }
    }
}

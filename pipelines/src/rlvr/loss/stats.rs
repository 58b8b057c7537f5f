//! Statistics of a step's updates, kept on the device until read.

use anyroll_algorithm::losses::Terms;
use anyroll_models::model::Scores;
use tch::{Kind, Tensor};

use super::{Result, Targets};
use crate::train::{device_sums, reduced};

device_sums! {
    /// Sums over tokens of all mini-batches.
    pub struct LossSums {
        /// Policy loss, weighted as in the loss.
        policy,
        /// KL divergence in the loss, weighted as in the loss.
        kl,
        /// k1 of the old policy against the new one, on the old one's samples.
        kl_old,
        /// Sum of entropies.
        entropy,
        /// Tokens whose ratio is clipped from below.
        clipped_low,
        /// Tokens whose ratio is clipped from above.
        clipped_high,
        /// Sum of ratios.
        ratio,
        /// Tokens that are excluded as off-policy.
        off_policy,
    }
}

reduced! {
    /// Statistics of a step's updates, over all ranks.
    pub struct LossTotals {
        /// Sums over tokens of all mini-batches.
        nested sums: LossSums,
        /// Largest ratio.
        max ratio: f64,
        /// Differences of log-probs between sampling and training, over tokens of the first mini-batch.
        sum drift: f64,
        /// Largest such difference.
        max largest_drift: f64,
    }
}

/// Sums over a step's micro-batches, on the device.
#[derive(Debug, Default)]
pub struct LossStats {
    sums: Option<Tensor>,
    largest: Option<Tensor>,
    drift: Drift,
}

/// Data of a micro-batch.
pub(super) struct Seen<'a> {
    /// Policy loss of each token, including its correction.
    pub policy: Tensor,
    /// KL divergence in the loss.
    pub kl: Option<Tensor>,
    /// True for tokens that are excluded as off-policy.
    pub masked: Option<Tensor>,
    pub terms: Terms,
    pub scores: &'a Scores,
    pub targets: &'a Targets,
}

impl LossStats {
    /// Adds a micro-batch.
    pub(super) fn add(&mut self, seen: &Seen) -> Result<()> {
        let _guard = tch::no_grad_guard();
        let Seen { policy, kl, masked, terms, scores, targets } = seen;
        if scores.logprobs.numel() == 0 {
            return Ok(()); // no token, so no maximum
        }
        let sum = |tensor: &Tensor| tensor.f_detach()?.f_sum(Kind::Double);
        let weighted = |tensor: &Tensor| sum(&tensor.f_mul(&targets.token_weights)?);
        let zero = Tensor::f_zeros_like(&sum(&scores.entropy)?)?;
        let [clipped_low, clipped_high] = match &terms.clipped {
            Some([low, high]) => [sum(low)?, sum(high)?],
            None => [zero.shallow_clone(), zero.shallow_clone()],
        };
        let sums = LossSums {
            policy: weighted(policy)?,
            kl: kl.as_ref().map_or(Ok(zero.shallow_clone()), weighted)?,
            kl_old: sum(&terms.log_ratio)?.f_neg()?,
            entropy: sum(&scores.entropy)?,
            clipped_low,
            clipped_high,
            ratio: sum(&terms.ratio)?,
            off_policy: masked.as_ref().map_or(Ok(zero), sum)?,
        };
        let sums = sums.stack()?;
        let largest = terms.ratio.f_detach()?.f_max()?.f_to_kind(Kind::Double)?;
        self.sums = Some(match self.sums.take() {
            Some(before) => before.f_add(&sums)?,
            None => sums,
        });
        self.largest = Some(match self.largest.take() {
            Some(before) => before.f_maximum(&largest)?,
            None => largest,
        });
        Ok(())
    }

    /// Adds the tokens of a micro-batch that is computed with the weights of sampling.
    pub fn add_drift(&mut self, logprobs: &Tensor, sampled: &Tensor) -> Result<()> {
        self.drift.add(logprobs, sampled)
    }

    /// Reads this rank's sums, which are 0 if nothing was added; waits for the device.
    pub fn read(&self) -> Result<LossTotals> {
        let (drift, largest_drift) = self.drift.read()?;
        Ok(LossTotals {
            sums: self.sums.as_ref().map_or(Ok(LossSums::default()), LossSums::read)?,
            ratio: self.largest.as_ref().map_or(Ok(0.0), |largest| largest.f_double_value(&[]))?,
            drift,
            largest_drift,
        })
    }
}

/// Differences of log-probs between sampling and training with the same weights: their sum and maximum.
#[derive(Debug, Default)]
struct Drift(Option<[Tensor; 2]>);

impl Drift {
    fn add(&mut self, logprobs: &Tensor, sampled: &Tensor) -> Result<()> {
        if logprobs.numel() == 0 {
            return Ok(());
        }
        let apart = logprobs.f_sub(sampled)?.f_abs()?.f_to_kind(Kind::Double)?;
        let (sum, max) = (apart.f_sum(Kind::Double)?, apart.f_max()?);
        self.0 = Some(match self.0.take() {
            Some([sums, maxima]) => [sums.f_add(&sum)?, maxima.f_maximum(&max)?],
            None => [sum, max],
        });
        Ok(())
    }

    fn read(&self) -> Result<(f64, f64)> {
        match &self.0 {
            Some([sum, max]) => Ok((sum.f_double_value(&[])?, max.f_double_value(&[])?)),
            None => Ok((0.0, 0.0)),
        }
    }
}

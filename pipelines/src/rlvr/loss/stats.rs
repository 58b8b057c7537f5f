//! Statistics of a step's updates, kept on the device until they are read.

use anyroll_algorithm::losses::Terms;
use anyroll_models::model::Scores;
use tch::{Kind, Tensor};

use super::{Result, Targets};
use crate::train::{device_sums, reduced};

device_sums! {
    /// Sums over tokens of all mini-batches.
    pub struct LossSums {
        /// The policy loss, weighted as the loss is.
        policy,
        /// The KL divergence in the loss, weighted likewise.
        kl,
        /// k1 of the old policy against the new one, under the old one's samples.
        kl_old,
        /// Entropies.
        entropy,
        /// Tokens whose ratio is kept from below.
        clipped_low,
        /// Tokens whose ratio is kept from above.
        clipped_high,
        /// Ratios.
        ratio,
        /// Tokens that are left out as off-policy.
        off_policy,
    }
}

reduced! {
    /// Statistics of a step's updates, over all ranks.
    pub struct LossTotals {
        /// Over tokens of all mini-batches.
        nested sums: LossSums,
        /// The largest ratio.
        max ratio: f64,
        /// Difference of log-probs between sampling and training, of the first mini-batch's tokens.
        sum drift: f64,
        /// The largest such difference.
        max largest_drift: f64,
    }
}

/// Adds up a step's micro-batches on the device.
#[derive(Debug, Default)]
pub struct LossStats {
    sums: Option<Tensor>,
    largest: Option<Tensor>,
    drift: Drift,
}

/// A micro-batch.
pub(super) struct Seen<'a> {
    /// The policy loss of each token, its correction included.
    pub policy: Tensor,
    /// The KL divergence in the loss.
    pub kl: Option<Tensor>,
    /// True where a token is left out as off-policy.
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
            return Ok(()); // no token is the largest
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

    /// Adds the tokens of a micro-batch whose weights are still those that sampled.
    pub fn add_drift(&mut self, logprobs: &Tensor, sampled: &Tensor) -> Result<()> {
        self.drift.add(logprobs, sampled)
    }

    /// Reads this rank's sums, 0 if it added nothing; waits for the device.
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

/// Differences of log-probs between sampling and training on the same weights: their sum and the largest.
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

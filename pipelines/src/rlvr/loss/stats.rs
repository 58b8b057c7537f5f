//! What a step's updates show, kept on the device until it is read.

use anyroll_models::model::Scores;
use tch::{Kind, Tensor};

use super::{Result, Targets, policy::Terms};

/// Sums over tokens of what a step's mini-batches show, and the largest value.
#[derive(Debug, Default)]
pub struct LossStats {
    sums: Option<Tensor>,
    largest: Option<Tensor>,
}

/// The names of [`LossStats`]' sums. The first two are weighted as the loss is, and become what the loss is; the
/// others become means over tokens.
pub const SUMS: [&str; 8] = [
    "loss/policy",
    "loss/kl",
    "kl/old",
    "entropy",
    "clip_fraction/low",
    "clip_fraction/high",
    "ratio/mean",
    "off_policy_fraction",
];
/// The names of its largest values.
pub const LARGEST: [&str; 1] = ["ratio/max"];

/// A micro-batch.
pub(super) struct Seen<'a> {
    /// The policy loss of each token, its correction included.
    pub policy: Tensor,
    /// The KL divergence in the loss.
    pub kl: Option<Tensor>,
    /// Whether each token is left out as off-policy.
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
        let [low, high] = match &terms.clipped {
            Some([low, high]) => [sum(low)?, sum(high)?],
            None => [zero.shallow_clone(), zero.shallow_clone()],
        };
        let sums = [
            weighted(policy)?,
            kl.as_ref().map_or(Ok(zero.shallow_clone()), weighted)?,
            sum(&terms.log_ratio)?.f_neg()?, // k1 of the old against the new policy, under the old one's samples
            sum(&scores.entropy)?,
            low,
            high,
            sum(&terms.ratio)?,
            masked.as_ref().map_or(Ok(zero), sum)?,
        ];
        let sums = Tensor::f_stack(&sums, 0)?;
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

    /// Reads the sums in the order of [`SUMS`], then the largest values in the order of [`LARGEST`]; waits for the
    /// device. Zeros if nothing was added.
    pub fn read(&self) -> Result<([f64; SUMS.len()], [f64; LARGEST.len()])> {
        let (mut sums, mut largest) = ([0.0; SUMS.len()], [0.0; LARGEST.len()]);
        if let (Some(sum), Some(max)) = (&self.sums, &self.largest) {
            sums.copy_from_slice(&Vec::<f64>::try_from(sum.f_to_device(tch::Device::Cpu)?)?);
            largest[0] = max.f_double_value(&[])?;
        }
        Ok((sums, largest))
    }
}

/// How far the log-probs of sampling and of training are apart on the same weights.
#[derive(Debug, Default)]
pub struct Drift(Option<[Tensor; 2]>);

impl Drift {
    /// Adds the tokens of a micro-batch.
    pub fn add(&mut self, logprobs: &Tensor, sampled: &Tensor) -> Result<()> {
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

    /// The sum and the largest of the absolute differences; waits for the device.
    pub fn read(&self) -> Result<(f64, f64)> {
        match &self.0 {
            Some([sum, max]) => Ok((sum.f_double_value(&[])?, max.f_double_value(&[])?)),
            None => Ok((0.0, 0.0)),
        }
    }
}

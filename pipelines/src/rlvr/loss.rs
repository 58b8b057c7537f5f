//! The clipped policy-gradient loss, on per-token log-probs.

use anyroll_models::{OutputGrad, model::Scores};
use tch::{Kind, TchError, Tensor};

use crate::config::AlgorithmConfig;

type Result<T> = std::result::Result<T, TchError>;

/// What the tokens of a micro-batch are trained towards: each fp32 `[M]`, in the order of the scores.
#[derive(Debug)]
pub struct Targets {
    /// Log-probs under the policy that sampled them.
    pub old_logprobs: Tensor,
    /// Advantages, a sample's repeated for each of its tokens.
    pub advantages: Tensor,
    /// Log-probs under the frozen reference; `None` without a KL term.
    pub ref_logprobs: Option<Tensor>,
    /// Tokens of the whole mini-batch, over all ranks and micro-batches: what makes a mean of the sum, so that
    /// the split does not change the gradient.
    pub tokens: f64,
}

/// Sums over tokens of what a mini-batch shows, and two largest values; kept on the device until they are read.
#[derive(Debug, Default)]
pub struct LossStats {
    sums: Option<Tensor>,
    largest: Option<Tensor>,
}

/// The names of [`LossStats`]' sums, which become means over tokens.
pub const SUMS: [&str; 7] =
    ["loss/policy", "loss/kl", "kl/old", "entropy", "clip_fraction/low", "clip_fraction/high", "ratio/mean"];
/// The names of its largest values.
pub const LARGEST: [&str; 1] = ["ratio/max"];

/// The gradient of the mean loss over `targets.tokens` tokens, with respect to log-probs and entropies.
///
/// With r = exp(lp - old), A the advantage: max(-A r, -A clip(r, 1 - clip_low, 1 + clip_high)) (Schulman et al.
/// 2017, with the separate bounds of DAPO, Yu et al. 2025); plus `kl_coef` times Schulman's k3,
/// exp(ref - lp) - (ref - lp) - 1; minus `entropy_coef` times the entropy.
pub fn policy_loss(
    algorithm: &AlgorithmConfig,
    scores: &Scores,
    targets: &Targets,
    stats: &mut LossStats,
) -> Result<OutputGrad> {
    let logprobs = scores.logprobs.f_detach()?.f_set_requires_grad(true)?;
    let log_ratio = logprobs.f_sub(&targets.old_logprobs)?;
    let ratio = log_ratio.f_clamp(-20.0, 20.0)?.f_exp()?;
    let clipped = ratio.f_clamp(1.0 - algorithm.clip_low, 1.0 + algorithm.clip_high)?;
    let gain = targets.advantages.f_neg()?;
    let policy = gain.f_mul(&ratio)?.f_maximum(&gain.f_mul(&clipped)?)?;
    let mut loss = policy.shallow_clone();
    let mut kl = None;
    if let Some(reference) = &targets.ref_logprobs {
        let difference = reference.f_sub(&logprobs)?;
        let k3 = difference.f_exp()?.f_sub(&difference)?.f_sub_scalar(1.0)?;
        loss = loss.f_add(&k3.f_mul_scalar(algorithm.kl_coef)?)?;
        kl = Some(k3);
    }
    let mean = loss.f_sum(Kind::Float)?.f_div_scalar(targets.tokens)?;
    let gradient = Tensor::f_run_backward(&[&mean], &[&logprobs], false, false)?.swap_remove(0);
    let entropy = (algorithm.entropy_coef > 0.0)
        .then(|| scores.entropy.f_full_like(-algorithm.entropy_coef / targets.tokens))
        .transpose()?;
    stats.add(
        algorithm,
        &Seen { policy, kl, log_ratio, ratio, entropy: &scores.entropy, advantages: &targets.advantages },
    )?;
    Ok(OutputGrad::Scores { logprobs: gradient, entropy })
}

struct Seen<'a> {
    policy: Tensor,
    kl: Option<Tensor>,
    log_ratio: Tensor,
    ratio: Tensor,
    entropy: &'a Tensor,
    advantages: &'a Tensor,
}

impl LossStats {
    fn add(&mut self, algorithm: &AlgorithmConfig, seen: &Seen) -> Result<()> {
        let _guard = tch::no_grad_guard();
        let sum = |tensor: &Tensor| tensor.f_detach()?.f_sum(Kind::Double);
        let (falls, rises) = (seen.advantages.f_lt(0.0)?, seen.advantages.f_gt(0.0)?);
        let low = seen.ratio.f_lt(1.0 - algorithm.clip_low)?.f_logical_and(&falls)?;
        let high = seen.ratio.f_gt(1.0 + algorithm.clip_high)?.f_logical_and(&rises)?;
        let kl = match &seen.kl {
            Some(kl) => sum(kl)?,
            None => Tensor::f_zeros_like(&sum(seen.entropy)?)?,
        };
        let sums = [
            sum(&seen.policy)?,
            kl,
            sum(&seen.log_ratio)?.f_neg()?, // k1 of the old against the new policy, under the old one's samples
            sum(seen.entropy)?,
            sum(&low)?,
            sum(&high)?,
            sum(&seen.ratio)?,
        ];
        let sums = Tensor::f_stack(&sums, 0)?;
        let largest = seen.ratio.f_detach()?.f_max()?.f_to_kind(Kind::Double)?;
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

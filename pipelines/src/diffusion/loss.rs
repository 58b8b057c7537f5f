//! Losses of a micro-batch, as functions of the policy's velocities.
//!
//! All are sums over samples, to be divided by the number of samples in the mini-batch over all ranks.

use anyroll_config::KlScale;
use anyroll_models::diffusion::SdeStep;
use tch::Tensor;

use crate::Result;

/// A stochastic denoising step of some samples, with its targets.
pub struct StepTargets<'a> {
    /// The step.
    pub step: SdeStep,
    /// Start of the step: `[B, ..]`.
    pub x: Tensor,
    /// End of the step.
    pub next: Tensor,
    /// Log-probability at sampling time: `[B]`.
    pub old_logprobs: Tensor,
    /// `[B]`.
    pub advantages: Tensor,
    /// The ratio is clipped to 1 plus and minus this.
    pub clip: f64,
    /// Velocity of the frozen model, weight of the KL divergence from it, and the divisor of that.
    pub kl: Option<(&'a Tensor, f64, KlScale)>,
}

/// Terms of a loss, without a gradient: fp32 `[B]` each.
#[derive(Debug)]
pub struct StepTerms {
    /// The clipped policy loss.
    pub policy: Tensor,
    /// KL divergence from the frozen model, unweighted.
    pub kl: Option<Tensor>,
    /// New over old probability.
    pub ratio: Tensor,
    /// New less old log-probability.
    pub log_ratio: Tensor,
}

/// Returns the loss of a stochastic step, and its terms. The loss is
/// `sum_i max(-A_i r_i, -A_i clip(r_i, 1 - clip, 1 + clip)) + kl_coef KL_i`, with the ratio `r_i` of the sample's
/// probabilities at this step (Flow-GRPO, equation 5).
pub fn step_loss(targets: &StepTargets, velocity: &Tensor) -> Result<(Tensor, StepTerms)> {
    let StepTargets { step, x, next, old_logprobs, advantages, clip, kl } = targets;
    let mean = step.mean(x, velocity)?;
    let log_ratio = step.logprobs(&mean, next)?.f_sub(old_logprobs)?;
    let ratio = log_ratio.f_exp()?;
    let gain = advantages.f_mul(&ratio)?;
    let clipped = advantages.f_mul(&ratio.f_clamp(1.0 - clip, 1.0 + clip)?)?;
    let policy = gain.f_minimum(&clipped)?.f_neg()?;
    let mut loss = sum(&policy)?;
    let mut divergence = None;
    if let Some((reference, coef, scale)) = kl {
        let variance = match scale {
            KlScale::Variance => step.std * step.std,
            KlScale::Noise => step.std * step.std / step.length,
        };
        let distance = mean_square(&mean.f_sub(&step.mean(x, reference)?)?)?;
        let of_samples = distance.f_mul_scalar(0.5 / variance)?;
        loss = loss.f_add(&sum(&of_samples)?.f_mul_scalar(*coef)?)?;
        divergence = Some(of_samples.f_detach()?);
    }
    let (policy, ratio, log_ratio) = (policy.f_detach()?, ratio.f_detach()?, log_ratio.f_detach()?);
    Ok((loss, StepTerms { policy, kl: divergence, ratio, log_ratio }))
}

/// Noised samples with their targets.
pub struct NftTargets<'a> {
    /// The samples: `[B, ..]`.
    pub images: Tensor,
    /// The samples with added noise.
    pub noised: Tensor,
    /// Noise levels: `[B, 1, 1, 1]`.
    pub sigmas: Tensor,
    /// Goodness from 0 to 1: `[B]`.
    pub goodness: Tensor,
    /// Velocity of the old policy.
    pub old_velocity: Tensor,
    /// Distance of the implicit policies from the old one.
    pub beta: f64,
    /// Factor of the loss.
    pub scale: f64,
    /// Velocity of the frozen model, and weight of the squared distance from it.
    pub kl: Option<(&'a Tensor, f64)>,
}

/// Terms of the loss, without a gradient: fp32 `[B]` each.
#[derive(Debug)]
pub struct NftTerms {
    /// Loss towards good samples and away from bad ones.
    pub policy: Tensor,
    /// Squared distance from the frozen model's velocity, unweighted.
    pub kl: Option<Tensor>,
}

/// Returns the loss of DiffusionNFT, and its terms (DiffusionNFT, equation 5). The loss is
/// `sum_i scale / beta (g_i |x0(v+) - x0|^2 / w+ + (1 - g_i) |x0(v-) - x0|^2 / w-) + kl_coef |v - v_ref|^2`.
/// The implicit positive policy is `v+ = beta v + (1 - beta) v_old`.
/// The implicit negative policy is `v- = (1 + beta) v_old - beta v`. The predicted image is `x0(v) = x - sigma v`.
/// The divisor `w` is the mean `|x0(v) - x0|`, without a gradient. Squares are means over an image's values.
pub fn nft_loss(targets: &NftTargets, velocity: &Tensor) -> Result<(Tensor, NftTerms)> {
    let NftTargets { goodness, old_velocity: old, beta, .. } = targets;
    let positive = old.f_lerp(velocity, *beta)?;
    let negative = old.f_lerp(velocity, -beta)?;
    let good = miss(targets, &positive)?.f_mul(goodness)?;
    let bad = miss(targets, &negative)?.f_mul(&goodness.f_neg()?.f_add_scalar(1.0)?)?;
    let policy = good.f_add(&bad)?.f_mul_scalar(targets.scale / beta)?;
    let mut loss = sum(&policy)?;
    let mut divergence = None;
    if let Some((reference, coef)) = targets.kl {
        let distance = mean_square(&velocity.f_sub(reference)?)?;
        loss = loss.f_add(&sum(&distance)?.f_mul_scalar(coef)?)?;
        divergence = Some(distance.f_detach()?);
    }
    Ok((loss, NftTerms { policy: policy.f_detach()?, kl: divergence }))
}

/// Distance of the images that a velocity predicts from the samples: `|x0(v) - x0|^2 / w`, `[B]`.
fn miss(targets: &NftTargets, velocity: &Tensor) -> Result<Tensor> {
    const LEAST_WEIGHT: f64 = 1e-5;
    let predicted = targets.noised.f_sub(&targets.sigmas.f_mul(velocity)?)?;
    let off = predicted.f_sub(&targets.images)?;
    let weight = off.f_detach()?.f_abs()?.f_flatten(1, -1)?.f_mean_dim(-1, false, None)?;
    Ok(mean_square(&off)?.f_div(&weight.f_clamp_min(LEAST_WEIGHT)?)?)
}

/// Mean square over all dimensions except the first.
fn mean_square(values: &Tensor) -> Result<Tensor> {
    Ok(values.f_square()?.f_flatten(1, -1)?.f_mean_dim(-1, false, None)?)
}

/// Gradient of `loss(velocity) / count`, with the other result of `loss`.
pub fn gradient<T>(
    velocity: &Tensor,
    count: f64,
    loss: impl FnOnce(&Tensor) -> Result<(Tensor, T)>,
) -> Result<(Tensor, T)> {
    let velocity = velocity.f_detach()?.f_set_requires_grad(true)?;
    let (sum, terms) = loss(&velocity)?;
    let mean = sum.f_div_scalar(count)?;
    let gradient = Tensor::f_run_backward(&[mean], &[&velocity], false, false)?.swap_remove(0);
    Ok((gradient, terms))
}

fn sum(values: &Tensor) -> Result<Tensor> {
    Ok(values.f_sum(values.kind())?)
}

#[cfg(test)]
mod tests {
    use anyroll_close::largest_difference;
    use anyroll_models::diffusion::{SdeNoise, SdeStep};
    use anyroll_models::normals;

    use super::*;

    fn random(seed: u64) -> Tensor {
        let values: Vec<f64> = normals(seed, 2 * 3 * 2 * 2).into_iter().map(f64::from).collect();
        Tensor::from_slice(&values).view([2, 3, 2, 2])
    }

    fn step() -> SdeStep {
        SdeStep::new(SdeNoise::Level(0.7), &[1.0, 0.75, 0.5, 0.25, 0.0], 2)
    }

    /// A step from `random(1)` to `random(2)`, sampled with the velocity `random(3)`.
    fn targets(advantages: [f64; 2], clip: f64) -> StepTargets<'static> {
        let (x, next) = (random(1), random(2));
        let mean = step().mean(&x, &random(3)).unwrap();
        let old_logprobs = step().logprobs(&mean, &next).unwrap();
        StepTargets {
            step: step(),
            x,
            next,
            old_logprobs,
            advantages: Tensor::from_slice(&advantages),
            clip,
            kl: None,
        }
    }

    /// Compares the gradient at `velocity` with finite differences, at every value.
    fn check_gradient(velocity: &Tensor, loss: impl Fn(&Tensor) -> Tensor) {
        let (found, ()) = gradient(velocity, 2.0, |velocity| Ok((loss(velocity), ()))).unwrap();
        let found = found.view([-1]);
        assert!(found.abs().max().double_value(&[]) > 1e-3, "nothing to compare");
        const H: f64 = 1e-5;
        for index in 0..velocity.numel() as i64 {
            let moved = |by: f64| {
                let moved = velocity.copy();
                let _ = moved.view([-1]).narrow(0, index, 1).g_add_scalar_(by);
                loss(&moved).double_value(&[]) / 2.0
            };
            let expected = (moved(H) - moved(-H)) / (2.0 * H);
            assert!((found.double_value(&[index]) - expected).abs() < 1e-6, "{index}: {expected}");
        }
    }

    #[test]
    fn on_policy_the_ratio_is_exactly_one_and_the_gradient_that_of_the_log_prob() {
        let targets = targets([0.5, -2.0], 1e-4);
        let velocity = random(3);
        let (loss, terms) = step_loss(&targets, &velocity).unwrap();
        assert_eq!(Vec::<f64>::try_from(&terms.ratio).unwrap(), [1.0, 1.0]);
        assert_eq!(loss.double_value(&[]), -0.5 + 2.0);
        check_gradient(&velocity, |velocity| {
            let mean = step().mean(&targets.x, velocity).unwrap();
            let weighted = step().logprobs(&mean, &targets.next).unwrap() * &targets.advantages;
            -weighted.sum(weighted.kind())
        });
        check_gradient(&velocity, |velocity| {
            let wide = StepTargets { clip: 0.5, ..self::targets([0.5, -2.0], 0.5) };
            step_loss(&wide, velocity).unwrap().0
        });
    }

    #[test]
    fn a_clipped_sample_has_no_gradient() {
        let off = random(3) + random(4) * 0.1;
        let ratio = |velocity: &Tensor| {
            let terms = step_loss(&targets([1.0, 1.0], 0.5), velocity).unwrap().1;
            Vec::<f64>::try_from(&terms.ratio).unwrap()
        };
        // Each advantage pulls the ratio further in its direction.
        let pulls = ratio(&off).into_iter().map(|ratio| if ratio > 1.0 { 1.0 } else { -1.0 });
        let pulls: Vec<f64> = pulls.collect();
        let advantages = [pulls[0], -pulls[1]];
        let (found, terms) =
            gradient(&off, 1.0, |velocity| step_loss(&targets(advantages, 1e-4), velocity)).unwrap();
        let of_sample = |sample: i64| found.select(0, sample).abs().max().double_value(&[]);
        assert_eq!(of_sample(0), 0.0, "{terms:?}");
        assert!(of_sample(1) > 1e-3, "{terms:?}");
    }

    #[test]
    fn kl_is_that_of_gaussians_or_without_the_length_of_the_step() {
        let (velocity, reference) = (random(3), random(5));
        let step = step();
        let kl = |scale| {
            let kl = Some((&reference, 1.0, scale));
            let (_, terms) = step_loss(&StepTargets { kl, ..targets([0.0, 0.0], 1e-4) }, &velocity).unwrap();
            Vec::<f64>::try_from(terms.kl.unwrap()).unwrap()
        };
        // KL(N(a, s^2) | N(b, s^2)) = (a - b)^2 / (2 s^2), a mean over 12 values here.
        let apart = (&velocity - &reference) * step.v_coef;
        let expected = apart.square().view([2, 12]).mean_dim(1, false, None) / (2.0 * step.std.powi(2));
        for (sample, expected) in Vec::<f64>::try_from(&expected).unwrap().into_iter().enumerate() {
            assert!((kl(KlScale::Variance)[sample] - expected).abs() < 1e-12);
            assert!((kl(KlScale::Noise)[sample] - expected * 0.25).abs() < 1e-12);
        }
        check_gradient(&random(3), |velocity| {
            let kl = Some((&reference, 0.3, KlScale::Noise));
            step_loss(&StepTargets { kl, ..targets([0.5, -2.0], 0.5) }, velocity).unwrap().0
        });
    }

    fn nft<'a>(kl: Option<(&'a Tensor, f64)>) -> NftTargets<'a> {
        let sigmas = Tensor::from_slice(&[0.25, 0.75]).view([2, 1, 1, 1]);
        let (images, noise) = (random(1), random(2));
        let noised = &images + (&noise - &images) * &sigmas;
        let goodness = Tensor::from_slice(&[0.75, 0.1]);
        NftTargets { images, noised, sigmas, goodness, old_velocity: random(3), beta: 0.5, scale: 5.0, kl }
    }

    /// The formula again, element by element, on the host.
    fn nft_by_hand(velocity: &Tensor, reference: &Tensor, kl_coef: f64) -> f64 {
        let values = |tensor: &Tensor| Vec::<f64>::try_from(tensor.view([-1])).unwrap();
        let targets = nft(None);
        let [x0, x, old, v, v_ref] =
            [&targets.images, &targets.noised, &targets.old_velocity, velocity, reference].map(values);
        let mut total = 0.0;
        for (sample, (sigma, good)) in [(0.25, 0.75), (0.75, 0.1)].into_iter().enumerate() {
            let own = sample * 12..(sample + 1) * 12;
            let miss = |sign: f64| {
                let off: Vec<f64> = own
                    .clone()
                    .map(|i| x[i] - sigma * (old[i] + sign * 0.5 * (v[i] - old[i])) - x0[i])
                    .collect();
                let mean = |of: &dyn Fn(&f64) -> f64| off.iter().map(of).sum::<f64>() / 12.0;
                mean(&|off| off * off) / mean(&|off| off.abs()).max(1e-5)
            };
            total += 5.0 / 0.5 * (good * miss(1.0) + (1.0 - good) * miss(-1.0));
            total += kl_coef * own.map(|i| (v[i] - v_ref[i]).powi(2)).sum::<f64>() / 12.0;
        }
        total
    }

    #[test]
    fn nft_is_its_formula_and_its_gradient_takes_the_weights_as_given() {
        let (velocity, reference) = (random(4), random(5));
        let (loss, _) = nft_loss(&nft(Some((&reference, 0.3))), &velocity).unwrap();
        assert!((loss.double_value(&[]) - nft_by_hand(&velocity, &reference, 0.3)).abs() < 1e-9);

        // With the weights of `velocity` inserted by hand, finite differences do not change them.
        let targets = nft(Some((&reference, 0.3)));
        let weight = |velocity: &Tensor, sign: f64| {
            let implicit = targets.old_velocity.lerp(velocity, sign * 0.5);
            let off = &targets.noised - &targets.sigmas * implicit - &targets.images;
            off.abs().view([2, 12]).mean_dim(1, false, None)
        };
        let weights = [weight(&velocity, 1.0), weight(&velocity, -1.0)];
        let (found, _) = gradient(&velocity, 2.0, |velocity| nft_loss(&targets, velocity)).unwrap();
        let fixed = |velocity: &Tensor| {
            let miss = |sign: f64, weight: &Tensor| {
                let implicit = targets.old_velocity.lerp(velocity, sign * 0.5);
                let off = &targets.noised - &targets.sigmas * implicit - &targets.images;
                off.square().view([2, 12]).mean_dim(1, false, None) / weight
            };
            let bad = targets.goodness.ones_like() - &targets.goodness;
            let policy = (miss(1.0, &weights[0]) * &targets.goodness + miss(-1.0, &weights[1]) * bad) * 10.0;
            let kl = (velocity - &reference).square().view([2, 12]).mean_dim(1, false, None) * 0.3;
            (policy + kl).sum(velocity.kind())
        };
        let (expected, ()) = gradient(&velocity, 2.0, |velocity| Ok((fixed(velocity), ()))).unwrap();
        assert!(largest_difference(&found, &expected) < 1e-9);
        check_gradient(&velocity, fixed);
    }
}

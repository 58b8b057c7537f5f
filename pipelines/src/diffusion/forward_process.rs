//! Flow matching towards good samples and away from bad ones: DiffusionNFT.

use std::{ops::Range, time::Instant};

use anyroll_config::{NftConfig, Scale};
use anyroll_models::diffusion::DenoiseBatch;
use tch::{Kind, Tensor};

use super::{
    ImageModels, ImageTask, Samples,
    loss::{NftTargets, gradient, nft_loss},
    noise::{Purpose, order_of},
    stats::Stats,
    step::{Clock, rows},
    task::beside,
};
use crate::{
    Result,
    train::{Exchange, StepOutcome},
};

/// This rank's samples of step `step`, and their goodness from 0 to 1: fp32 `[N]`.
struct ScoredSamples<'a> {
    nft: &'a NftConfig,
    samples: Samples,
    goodness: Tensor,
    step: u64,
}

impl ImageTask {
    /// Samples with the old policy, scores the images, adds noise to them, and trains the velocities at these points.
    pub fn step_by_forward_process(
        &self,
        models: &mut ImageModels,
        exchange: &Exchange,
        step: u64,
        stop: bool,
        nft: &NftConfig,
    ) -> Result<StepOutcome> {
        let started = Instant::now();
        models.learner.offload()?;
        let old = models.old.as_mut().expect("DiffusionNFT has an old policy");
        let weights = old.weights()?;
        let samples = self.sample(&weights, exchange.rank(), step)?;
        drop(weights);
        models.learner.load()?;
        let generated = Instant::now();
        let scored = self.score(exchange, samples.latents(), &samples.labels, step, stop)?;
        let clock = Clock::new(started, generated);

        let clip = nft.advantage_clip;
        let advantages = self.advantages(&scored, &samples.numbers, Scale::BatchStd, clip)?;
        let goodness = advantages.f_mul_scalar(0.5 / clip)?.f_add_scalar(0.5)?;
        let scored_samples = ScoredSamples { nft, samples, goodness, step };
        let (mut stats, mut update) = (Stats::default(), models.learner.begin(step));
        for mini_batch in 0..self.share.mini_batches {
            for part in self.share.micro_batches(mini_batch, models.learner.micro_batch.sequences) {
                for draw in 0..nft.timesteps {
                    self.accumulate_noised(models, &scored_samples, &part, draw, &mut stats)?;
                }
            }
            models.learner.step(&mut update)?;
        }
        let keeps = (nft.old_decay_rate * (step + 1) as f64).min(nft.old_decay_max);
        let old = models.old.as_mut().expect("DiffusionNFT has an old policy");
        old.move_towards(&mut models.learner.model, 1.0 - keeps)?;
        let losses = stats.read(exchange, (self.share.samples() * nft.timesteps) as f64)?;
        self.finish(models, update, &scored, losses, &clock)
    }

    /// Adds the gradient at the `draw`-th sigma of each of the samples `part`.
    fn accumulate_noised(
        &self,
        models: &mut ImageModels,
        scored: &ScoredSamples,
        part: &Range<usize>,
        draw: usize,
        stats: &mut Stats,
    ) -> Result<()> {
        let &ScoredSamples { nft, ref samples, ref goodness, step } = scored;
        let images = rows(samples.latents(), part)?;
        let numbers = &samples.numbers[part.clone()];
        let sigmas = self.drawn_sigmas(step, numbers, draw)?;
        let noise = self.noise(Purpose::Forward, step, numbers.iter().map(|n| n * nft.timesteps + draw))?;
        let wide = beside(&sigmas, &images)?;
        let noised = images.f_add(&noise.f_sub(&images)?.f_mul(&wide)?)?;
        let labels = rows(&samples.labels, part)?;
        let batch = DenoiseBatch {
            latents: noised.shallow_clone(),
            sigmas,
            labels,
            adapters: true,
            latents_grad: false,
        };
        let old = models.old.as_mut().expect("DiffusionNFT has an old policy");
        let old_velocity = old.score(&batch)?;
        let reference = models.reference_velocity(&batch)?;
        let targets = NftTargets {
            images,
            noised,
            sigmas: wide,
            goodness: rows(goodness, part)?,
            old_velocity,
            beta: nft.beta,
            scale: nft.advantage_clip,
            kl: reference.as_ref().map(|reference| (reference, nft.kl_coef)),
        };
        let count = self.mini_batch_len() * nft.timesteps as f64;
        let (velocity, tape) = models.learner.model.record(&batch)?;
        let (grad, terms) = gradient(&velocity, count, |velocity| nft_loss(&targets, velocity))?;
        models.learner.model.backward(&batch, tape, grad)?;
        stats.add("loss/policy", &terms.policy)?;
        match &terms.kl {
            Some(kl) => stats.add("loss/kl", kl),
            None => Ok(()),
        }
    }

    /// The `draw`-th of the sampler's sigmas for each sample, in a random order per sample: fp32 `[B]`.
    fn drawn_sigmas(&self, step: u64, numbers: &[usize], draw: usize) -> Result<Tensor> {
        let steps = self.sampler.steps();
        let of_sample = |&number: &usize| {
            let order = order_of(Purpose::Timesteps, self.seed, step, number, steps);
            self.sampler.sigmas[order[draw]]
        };
        let sigmas: Vec<f64> = numbers.iter().map(of_sample).collect();
        Ok(Tensor::f_from_slice(&sigmas)?.f_to_device(self.device)?.f_to_kind(Kind::Float)?)
    }
}

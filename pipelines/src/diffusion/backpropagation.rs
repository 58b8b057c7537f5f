//! Backpropagation of the reward through the last denoising steps: ReFL as in ROLL's reward flow, and
//! DRaFT-K.

use std::{ops::Range, time::Instant};

use anyroll_config::{DraftKConfig, ReflConfig, StartNoise};
use anyroll_models::diffusion::DenoiseBatch;
use anyroll_strategy::Tape;
use tch::Tensor;

use super::{
    ImageModels, ImageTask,
    scorer::Scores,
    stats::Stats,
    step::{Clock, rows},
    task::without,
};
use crate::{
    Result,
    train::{Exchange, StepOutcome},
};

/// A denoising step with a gradient.
struct Recorded {
    timestep: usize,
    batch: DenoiseBatch,
    tape: Tape,
    velocity: Tensor,
    /// Velocity of the frozen model.
    reference: Option<Tensor>,
}

impl ImageTask {
    /// Options of DRaFT-K as fields of `refl`.
    pub fn as_refl(&self, draft: &DraftKConfig) -> ReflConfig {
        ReflConfig {
            mid_step: self.sampler.steps() - draft.k,
            noise: StartNoise::Free,
            kl_coef: 0.0,
            score_mean: 0.0,
            score_std: 1.0,
            score_scale: 1.0,
        }
    }

    /// Denoises noise to images, the last steps with a gradient, and backpropagates the reward.
    pub fn step_by_backpropagation(
        &self,
        models: &mut ImageModels,
        exchange: &Exchange,
        step: u64,
        stop: bool,
        refl: &ReflConfig,
    ) -> Result<StepOutcome> {
        let started = Instant::now();
        let clock = Clock::new(started, started); // sampling and training are one phase
        models.learner.load()?;
        let (numbers, labels) = self.own_prompts(exchange.rank(), step)?;
        let noise_step = match refl.noise {
            StartNoise::Free => step,
            StartNoise::Fixed => 0,
        };
        let noise = self.start_noise(noise_step, &numbers)?;
        let (mut stats, mut update, mut scores) = (Stats::default(), models.learner.begin(step), Vec::new());
        for mini_batch in 0..self.share.mini_batches {
            for part in self.share.micro_batches(mini_batch, models.learner.micro_batch.sequences) {
                scores.push(self.follow_back(models, refl, &noise, &labels, &part, &mut stats)?);
            }
            models.learner.step(&mut update)?;
        }
        let scored = self.exchange_scores(exchange, Scores::cat(scores)?, step, stop)?;
        let losses = stats.read(exchange, self.share.samples() as f64)?;
        self.finish(models, update, &scored, losses, &clock)
    }

    /// Scores the samples `part` and adds their gradient to that of the step.
    fn follow_back(
        &self,
        models: &mut ImageModels,
        refl: &ReflConfig,
        noise: &Tensor,
        labels: &Tensor,
        part: &Range<usize>,
        stats: &mut Stats,
    ) -> Result<Scores> {
        let (noise, labels) = (rows(noise, part)?, rows(labels, part)?);
        let (latents, recorded) = self.walk_recording(models, refl.mid_step, noise, &labels)?;
        let (scores, gradient) = self.score_with_gradient(&latents, &labels)?;
        // A sample without a score has no gradient.
        let total = &scores.total;
        let refused = total.f_isfinite()?.f_logical_not()?;
        let count = self.mini_batch_len();
        let weight = refl.score_scale / refl.score_std / count;
        let mut dx = gradient.f_mul_scalar(-weight)?;
        let gradient_steps = recorded.len() as f64;
        let loss = total.f_sub_scalar(refl.score_mean)?.f_mul_scalar(-refl.score_scale / refl.score_std)?;
        stats.add("loss/policy", &loss.f_masked_fill(&refused, 0.0)?)?;

        for recorded in recorded.into_iter().rev() {
            let timestep = recorded.timestep;
            let sigmas = &self.sampler.sigmas;
            let (sigma, dt) = (sigmas[timestep], sigmas[timestep + 1] - sigmas[timestep]);
            let mut dv = dx.f_mul_scalar(dt)?;
            if let Some(reference) = &recorded.reference {
                // KL is the mean over the recorded steps and over an image's values of (v - v_ref)^2 / (2
                // sigma^2).
                let apart = without(&recorded.velocity.f_sub(reference)?, &refused)?;
                let values = apart.numel() as f64 / apart.size()[0] as f64;
                let scale = 1.0 / (sigma * sigma * values * gradient_steps);
                dv = dv.f_add(&apart.f_mul_scalar(refl.kl_coef * scale / count)?)?;
                stats.add("loss/kl", &apart.f_square()?.f_mul_scalar(0.5 * scale)?)?;
            }
            let guidance = self.sampler.guidance[timestep];
            let below =
                models.learner.model.backward(&recorded.batch, recorded.tape, guidance.combine_grad(&dv)?)?;
            if let Some(below) = below {
                dx = dx.f_add(&guidance.batch_grad(&below)?)?;
            }
        }
        Ok(scores)
    }

    /// Denoises by Euler's method and records the steps from `mid_step` on.
    fn walk_recording(
        &self,
        models: &mut ImageModels,
        mid_step: usize,
        noise: Tensor,
        labels: &Tensor,
    ) -> Result<(Tensor, Vec<Recorded>)> {
        let mut x = noise;
        let mut recorded = Vec::new();
        for timestep in 0..self.sampler.steps() {
            let guidance = self.sampler.guidance[timestep];
            // The first step with a gradient needs none for its input.
            let batch = guidance.batch(&x, self.sampler.sigmas[timestep], labels, timestep > mid_step)?;
            if timestep < mid_step {
                let velocity = guidance.combine(&models.learner.model.score(&batch)?)?;
                x = self.sampler.euler(timestep, &x, &velocity)?;
                continue;
            }
            let (velocity, tape) = models.learner.model.record(&batch)?;
            let velocity = guidance.combine(&velocity)?;
            let reference = models.reference_velocity(&batch)?;
            let reference = reference.map(|velocity| guidance.combine(&velocity)).transpose()?;
            x = self.sampler.euler(timestep, &x, &velocity)?;
            recorded.push(Recorded { timestep, batch, tape, velocity, reference });
        }
        Ok((x, recorded))
    }
}

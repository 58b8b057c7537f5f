//! Policy gradients on stochastic denoising steps: Flow-GRPO and DanceGRPO.

use std::{ops::Range, time::Instant};

use anyroll_config::{DanceGrpoConfig, FlowGrpoConfig, MethodConfig, Scale};
use tch::Tensor;

use super::{
    ImageModels, ImageTask, Samples,
    loss::{StepTargets, gradient, step_loss},
    stats::Stats,
    step::{Clock, rows},
};
use crate::{
    Result,
    train::{Exchange, StepOutcome},
};

/// Options of DanceGRPO as Flow-GRPO's; [`ImageTask::sde_noise`] has its noise.
pub fn as_flow_grpo(dance: &DanceGrpoConfig) -> FlowGrpoConfig {
    let DanceGrpoConfig { timestep_fraction, clip, advantage_clip, .. } = *dance;
    FlowGrpoConfig { timestep_fraction, clip, advantage_clip, ..FlowGrpoConfig::default() }
}

impl ImageTask {
    /// Samples by stochastic steps, scores the images, and trains some of the denoising steps towards the better
    /// images of each group.
    pub fn step_by_policy_gradient(
        &self,
        models: &mut ImageModels,
        exchange: &Exchange,
        step: u64,
        stop: bool,
        grpo: &FlowGrpoConfig,
    ) -> Result<StepOutcome> {
        let started = Instant::now();
        models.learner.offload()?;
        let weights = models.learner.model.weights()?;
        let samples = self.sample(&weights, exchange.rank(), step)?;
        drop(weights);
        models.learner.load()?;
        let generated = Instant::now();
        let scored = self.score(exchange, samples.latents(), &samples.labels, step, stop)?;
        let clock = Clock::new(started, generated);

        // Flow-GRPO divides by the standard deviation of all rewards, DanceGRPO by that of the group.
        let scale = match self.config.method {
            MethodConfig::DanceGrpo(_) => Scale::GroupStd,
            _ => Scale::BatchStd,
        };
        let advantages = self.advantages(&scored, &samples.numbers, scale, grpo.advantage_clip)?;
        let timesteps = self.trained_timesteps(step, grpo.timestep_fraction);
        let (mut stats, mut update) = (Stats::default(), models.learner.begin(step));
        for mini_batch in 0..self.share.mini_batches {
            for part in self.share.micro_batches(mini_batch, models.learner.micro_batch.sequences) {
                for &timestep in &timesteps {
                    let one = Denoised { grpo, timestep, of: timesteps.len(), is_first: mini_batch == 0 };
                    self.accumulate_step(models, &samples, &advantages, &part, one, &mut stats)?;
                }
            }
            models.learner.step(&mut update)?;
        }
        let losses = stats.read(exchange, (self.share.samples() * timesteps.len()) as f64)?;
        self.finish(models, update, &scored, losses, &clock)
    }

    /// Adds the gradient of one denoising step of the samples `part`.
    fn accumulate_step(
        &self,
        models: &mut ImageModels,
        samples: &Samples,
        advantages: &Tensor,
        part: &Range<usize>,
        Denoised { grpo, timestep, of, is_first }: Denoised,
        stats: &mut Stats,
    ) -> Result<()> {
        let noise = self.sde_noise().expect("the method's denoising steps have noise");
        let guidance = self.sampler.guidance[timestep];
        let x = rows(&samples.walk.points[timestep], part)?;
        let labels = rows(&samples.labels, part)?;
        let batch = guidance.batch(&x, self.sampler.sigmas[timestep], &labels, false)?;
        let reference = models.reference_velocity(&batch)?;
        let reference = reference.map(|velocity| guidance.combine(&velocity)).transpose()?;
        let targets = StepTargets {
            step: self.sampler.sde_step(noise, timestep),
            x,
            next: rows(&samples.walk.points[timestep + 1], part)?,
            old_logprobs: rows(&samples.walk.logprobs[timestep], part)?,
            advantages: rows(advantages, part)?,
            clip: grpo.clip,
            kl: reference.as_ref().map(|reference| (reference, grpo.kl_coef, grpo.kl_scale)),
        };
        let (velocity, tape) = models.learner.model.record(&batch)?;
        let count = self.mini_batch_len() * of as f64;
        let (grad, terms) =
            gradient(&guidance.combine(&velocity)?, count, |velocity| step_loss(&targets, velocity))?;
        models.learner.model.backward(&batch, tape, guidance.combine_grad(&grad)?)?;

        stats.add("loss/policy", &terms.policy)?;
        if let Some(kl) = &terms.kl {
            stats.add("loss/kl", kl)?;
        }
        stats.add("ratio/mean", &terms.ratio)?;
        stats.add("clip_fraction/low", &terms.ratio.f_lt(1.0 - grpo.clip)?)?;
        stats.add("clip_fraction/high", &terms.ratio.f_gt(1.0 + grpo.clip)?)?;
        if is_first {
            // The weights are still those that sampled, so the difference is rounding.
            stats.largest("rollout/logprob_diff_max", &terms.log_ratio.f_abs()?)?;
        }
        Ok(())
    }
}

/// A denoising step that is trained on.
#[derive(Clone, Copy)]
struct Denoised<'a> {
    grpo: &'a FlowGrpoConfig,
    /// The denoising step.
    timestep: usize,
    /// Number of trained steps.
    of: usize,
    /// True before the first optimizer step after sampling.
    is_first: bool,
}

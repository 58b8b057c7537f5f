//! The supervised warm-up: flow matching on the data.

use anyroll_config::FlowMatchingConfig;
use anyroll_models::diffusion::DenoiseBatch;
use tch::Kind;

use super::{
    ImageModels, ImageTask,
    noise::{Purpose, gaussian, uniforms},
    shapes,
    step::rows,
};
use crate::{
    Result,
    train::{Exchange, Learner, WarmupStep, chunks, learning_rate},
};

impl ImageTask {
    /// Runs one step. The loss is the mean squared error of the velocities. Sigmas are the logistic of
    /// normal numbers (Esser et al. 2024).
    pub fn warmup_step(
        &self,
        models: &mut ImageModels,
        exchange: &Exchange,
        warmup: &FlowMatchingConfig,
        step: u64,
    ) -> Result<WarmupStep> {
        let Learner { model: policy, micro_batch, .. } = &mut models.learner;
        let (images, mut labels) = shapes::train_batch(self.seed, step, warmup.batch_size, self.device)?;
        let dropped = uniforms(Purpose::Dropout, self.seed, step, labels.len());
        for (label, drawn) in labels.iter_mut().zip(dropped) {
            if drawn < warmup.class_dropout {
                *label = shapes::CLASSES as i64;
            }
        }
        let labels = self.labels(&labels)?;
        let noise = self.noise(Purpose::WarmupNoise, step, 0..warmup.batch_size)?;
        let numbers = 0..warmup.batch_size;
        let logits = gaussian(Purpose::WarmupSigmas, self.seed, step, numbers, &[1, 1, 1], self.device)?;
        let sigmas = logits.f_sigmoid()?;
        let noised = images.f_add(&noise.f_sub(&images)?.f_mul(&sigmas)?)?;
        let velocities = noise.f_sub(&images)?;

        let per_rank = warmup.batch_size / exchange.world_size();
        let own = exchange.rank() * per_rank..(exchange.rank() + 1) * per_rank;
        let mut loss = 0.0;
        for part in chunks(own, micro_batch.sequences) {
            let batch = DenoiseBatch {
                latents: rows(&noised, &part)?,
                sigmas: rows(&sigmas, &part)?.f_flatten(0, -1)?,
                labels: rows(&labels, &part)?,
                adapters: true,
                latents_grad: false,
            };
            let wanted = rows(&velocities, &part)?;
            policy.accumulate(&batch, |velocity| {
                let off = velocity.f_sub(&wanted)?;
                loss += off.f_square()?.f_sum(Kind::Double)?.f_double_value(&[])?;
                Ok(off.f_mul_scalar(2.0 / velocities.numel() as f64)?)
            })?;
        }
        let learning_rate = learning_rate(&warmup.optimizer, step, warmup.steps);
        let stats = policy.step(learning_rate)?;
        policy.finish_step(&stats)?;
        Ok(WarmupStep { loss: exchange.reduce(&loss)? / velocities.numel() as f64, learning_rate })
    }
}

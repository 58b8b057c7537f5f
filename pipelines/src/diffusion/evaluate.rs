//! Evaluation of the policy on held-out noise, and pictures of the results.

use std::ops::Range;

use anyroll_models::diffusion::Transformer;
use anyroll_strategy::Zero;
use tch::{Device, Kind, Tensor};

use super::{
    ImageTask,
    frames::{as_images, evenly_spaced, is_video},
    noise::Purpose,
    scorer::{Failures, Painted},
};
use crate::{
    Result,
    metrics::Metrics,
    picture::{Picture, grid},
    train::{Evaluation, Exchange, Learner, reduced},
};

reduced! {
    /// A quantity that is measured of images.
    struct Measured {
        /// Sum over images.
        sum total: f64,
        /// Number of images in the sum: those with a finite value.
        sum images: f64,
    }
}

reduced! {
    /// Sums over an evaluation's images.
    struct Evaluated {
        /// Squared distances between pixels and those of before training.
        sum apart: f64,
        /// Number of pixel values.
        sum values: f64,
        /// Quantities in the order of the scorer's names; the first one is the reward.
        nested measured: Vec<Measured>,
        /// Number of images on which each term of the reward failed.
        nested failed: Vec<f64>,
    }
}

/// Columns of the picture; for videos frames of each.
const COLUMNS: usize = 8;
/// Maximum rows of the picture; it has one per class or video.
const ROWS: usize = 4;

impl ImageTask {
    /// Denoises this rank's part of the fixed noise with the policy by Euler's method, with its adapters or without
    /// them. All results are on the host.
    pub fn evaluation_images(
        &self,
        policy: &mut Zero<Transformer>,
        exchange: &Exchange,
        adapters: bool,
    ) -> Result<Painted> {
        let weights = policy.weights()?;
        let own: Vec<usize> = self.own_evaluation(exchange).collect();
        let empty = || Ok(Tensor::f_zeros([0, 1, 1, 1], (Kind::Float, Device::Cpu))?);
        let labels: Vec<i64> = own.iter().map(|number| self.evaluated_label(*number)).collect();
        let (mut images, mut latents) = (Vec::new(), Vec::new());
        for part in own.chunks(self.config.sampler.batch_size) {
            let noise = self.noise(Purpose::Evaluation, 0, part.iter().copied())?;
            let first = part[0] - own[0];
            let labels = self.labels(&labels[first..first + part.len()])?;
            let denoised = self.denoise(&weights, noise, &labels, adapters)?;
            images.push(self.paint(&denoised, &labels)?.images.f_to_device(Device::Cpu)?);
            latents.push(denoised.f_to_device(Device::Cpu)?);
        }
        let join = |parts: Vec<Tensor>| -> Result<Tensor> {
            if parts.is_empty() { empty() } else { Ok(Tensor::f_cat(&parts, 0)?) }
        };
        Ok(Painted { images: join(images)?, latents: join(latents)?, labels: Tensor::f_from_slice(&labels)? })
    }

    /// Reward and other measurements, and the drift: the squared distance of pixels from `base`, the policy's
    /// images of the same noise before its first RL step. Images without a finite reward are in no mean.
    pub fn evaluate(
        &self,
        learner: &mut Learner<Transformer>,
        base: &Tensor,
        exchange: &Exchange,
    ) -> Result<Evaluation> {
        learner.offload()?;
        let painted = self.evaluation_images(&mut learner.model, exchange, true)?;
        let apart = painted.images.f_sub(base)?.f_square()?.f_sum(Kind::Double)?.f_double_value(&[])?;
        let (measured, failures) = self.measure(&painted)?;
        let values = painted.images.numel() as f64;
        let all =
            exchange.reduce(&Evaluated { apart, values, measured, failed: self.scorer.failed(&failures) })?;
        self.scorer.check_error_rates(&all.failed, self.config.evaluation.images, failures)?;
        let mut metrics = Metrics::new();
        for (name, measured) in self.scorer.measured().iter().zip(&all.measured) {
            if measured.images > 0.0 {
                metrics.insert(format!("eval/{name}"), measured.total / measured.images);
            }
        }
        let drift = all.apart / all.values;
        metrics.insert("eval/drift", drift);
        let refused = self.config.evaluation.images as f64 - all.measured[0].images;
        if refused > 0.0 {
            metrics.insert("eval/dropped", refused);
        }
        let reward =
            metrics.get("eval/reward").map_or_else(|| "of no image".to_owned(), |it| format!("{it:.3}"));
        let summary = format!("held-out reward {reward}, drift {drift:.3}");
        let picture = self.picture(&painted.images)?;
        Ok(Evaluation { metrics, samples: Vec::new(), picture, summary })
    }

    /// Measurements of this rank's images, and failures of terms.
    fn measure(&self, painted: &Painted) -> Result<(Vec<Measured>, Failures)> {
        let mut measured = vec![Measured::default(); self.scorer.measured().len()];
        let mut failures = Vec::new();
        let count = painted.labels.size()[0];
        let batch_size = self.config.sampler.batch_size;
        for start in (0..count).step_by(batch_size) {
            let len = (batch_size as i64).min(count - start);
            let part = |tensor: &Tensor| tensor.f_narrow(0, start, len)?.f_to_device(self.device);
            let painted = Painted {
                images: part(&painted.images)?,
                latents: part(&painted.latents)?,
                labels: part(&painted.labels)?,
            };
            let (scores, errors) = self.scorer.measure(&painted)?;
            failures.extend(errors);
            for (Measured { total, images }, scores) in measured.iter_mut().zip(scores) {
                let finite = scores.f_isfinite()?;
                let kept = scores.f_masked_fill(&finite.f_logical_not()?, 0.0)?;
                *total += kept.f_sum(Kind::Double)?.f_double_value(&[])?;
                *images += finite.f_sum(Kind::Double)?.f_double_value(&[])?;
            }
        }
        Ok((measured, failures))
    }

    /// Class or text of an image in an evaluation: all in turn.
    fn evaluated_label(&self, number: usize) -> i64 {
        (self.evaluated.start + number % self.evaluated.len()) as i64
    }

    /// The first of this rank's images, one row per class or text; for videos one row of frames each.
    fn picture(&self, images: &Tensor) -> Result<Option<Picture>> {
        let count = images.size()[0] as usize;
        let labels = self.evaluated.len();
        // If there are too few of each, they are shown in order.
        let (rows, columns) = match labels <= ROWS && count >= labels {
            true => (labels, (count / labels).min(COLUMNS)),
            false => (ROWS.min(count.div_ceil(COLUMNS)), COLUMNS.min(count)),
        };
        let are_latents = is_video(images) && self.decoder.is_none();
        if count == 0 || are_latents {
            return Ok(None);
        }
        if is_video(images) {
            let shown = evenly_spaced(&images.f_narrow(0, 0, count.min(ROWS) as i64)?, COLUMNS)?;
            return Ok(Some(grid(&Picture::of_images(&as_images(&shown)?)?, shown.size()[2] as usize)));
        }
        let shown = (rows * columns).min(count);
        let mut pictures = Picture::of_images(&images.f_narrow(0, 0, shown as i64)?)?;
        if labels <= ROWS && count >= labels {
            // Numbers run over the labels first: the second label's first image is the second image.
            let by_row = (0..rows).flat_map(|row| (0..columns).map(move |column| column * rows + row));
            pictures = by_row.map(|image| pictures[image].clone()).collect();
        }
        Ok(Some(grid(&pictures, columns)))
    }

    /// This rank's part of the images of an evaluation, by index.
    fn own_evaluation(&self, exchange: &Exchange) -> Range<usize> {
        let images = self.config.evaluation.images;
        let per_rank = images.div_ceil(exchange.world_size());
        let start = (exchange.rank() * per_rank).min(images);
        start..(start + per_rank).min(images)
    }
}

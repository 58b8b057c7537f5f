//! Measuring the policy on noise that it is never trained on, and showing what it makes of it.

use std::ops::Range;

use anyroll_strategy::Zero;
use tch::{Kind, Tensor};

use super::{Dit, Setup, noise::Purpose, shapes};
use crate::{
    Result,
    config::ImageReward,
    metrics::Metrics,
    picture::{Picture, grid},
    train::{Evaluation, Exchange},
};

/// Columns of the picture; it has a row for each class.
const COLUMNS: usize = 8;

impl Setup {
    /// Images of this rank's part of the fixed noise, by Euler's method: fp32 `[N, channels, height, width]`, and their
    /// classes.
    pub fn evaluation_images(&self, policy: &mut Zero<Dit>, exchange: &Exchange) -> Result<(Tensor, Tensor)> {
        let weights = policy.weights()?;
        let own = self.own_evaluation(exchange);
        let labels: Vec<i64> = own.clone().map(|number| (number % shapes::CLASSES) as i64).collect();
        let labels = self.labels(&labels)?;
        let noise = self.noise(Purpose::Evaluation, 0, own)?;
        let batch = self.config.sampler.batch_size as i64;
        let mut images = vec![Tensor::f_empty_like(&noise)?.f_narrow(0, 0, 0)?];
        for (noise, labels) in noise.f_split(batch, 0)?.into_iter().zip(labels.f_split(batch, 0)?) {
            if noise.numel() > 0 {
                let mut walk = self.walk(&weights, noise, &labels, None)?;
                images.extend(walk.points.pop());
            }
        }
        Ok((Tensor::f_cat(&images, 0)?, labels))
    }

    /// The verifiable reward, the brightness and the drift: how far, squared, pixels are from those that the policy made
    /// of the same noise before its first RL step, `base`.
    pub fn evaluate(&self, policy: &mut Zero<Dit>, base: &Tensor, exchange: &Exchange) -> Result<Evaluation> {
        policy.offload_states(&self.offloaded)?;
        let (images, labels) = self.evaluation_images(policy, exchange)?;
        let score = |reward| -> Result<f64> {
            let scores = self.scorer.score(reward, &images, &labels)?;
            Ok(scores.f_sum(Kind::Double)?.f_double_value(&[])?)
        };
        let apart = images.f_sub(base)?.f_square()?.f_sum(Kind::Double)?.f_double_value(&[])?;
        let own = [score(ImageReward::Lit)?, score(ImageReward::Brightness)?, apart, images.numel() as f64];
        let [lit, brightness, apart, pixels] = exchange.sum(&own)?[..] else { unreachable!("four sums") };
        let count = self.config.evaluation.images as f64;
        let mut metrics = Metrics::new();
        metrics.insert("eval/reward", lit / count);
        metrics.insert("eval/brightness", brightness / count);
        metrics.insert("eval/drift", apart / pixels);
        let summary = format!("held-out reward {:.3}, drift {:.3}", lit / count, apart / pixels);
        Ok(Evaluation { metrics, samples: Vec::new(), picture: Some(self.picture(&images)?), summary })
    }

    /// The first of this rank's images, a row for each class.
    fn picture(&self, images: &Tensor) -> Result<Picture> {
        let (classes, size) = (shapes::CLASSES, shapes::SIZE);
        let columns = (images.size()[0] as usize / classes).min(COLUMNS);
        let shown = images.f_narrow(0, 0, (columns * classes) as i64)?.f_flatten(0, -1)?;
        let pixels = Vec::<f32>::try_from(shown.f_to_device(tch::Device::Cpu)?)?;
        // Numbered over the classes first: the second class's first image is the second image.
        let by_row = (0..classes).flat_map(|class| (0..columns).map(move |column| column * classes + class));
        let cells: Vec<&[f32]> =
            by_row.map(|image| &pixels[image * size * size..(image + 1) * size * size]).collect();
        Ok(grid(&cells, columns, size))
    }

    /// This rank's part of the images of an evaluation, by number.
    fn own_evaluation(&self, exchange: &Exchange) -> Range<usize> {
        let images = self.config.evaluation.images;
        let per_rank = images.div_ceil(exchange.world_size());
        let start = (exchange.rank() * per_rank).min(images);
        start..(start + per_rank).min(images)
    }
}

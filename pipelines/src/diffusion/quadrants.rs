//! What an image earns.

use tch::{Device, Kind, Tensor};

use super::shapes;
use crate::{Result, config::ImageReward};

/// Scores images by their class.
#[derive(Debug)]
pub struct Scorer {
    /// A map of each class's quadrant: fp32 `[classes, height, width]`.
    quadrants: Tensor,
}

impl Scorer {
    /// For the images of `shapes`.
    pub fn new(device: Device) -> Result<Self> {
        Ok(Self { quadrants: shapes::quadrants(device)? })
    }

    /// The score of each of the images `[B, 1, height, width]`, of the classes `labels`, int64 `[B]`: fp32 `[B]`.
    pub fn score(&self, reward: ImageReward, images: &Tensor, labels: &Tensor) -> Result<Tensor> {
        let inside = self.quadrants.f_index_select(0, labels)?;
        let outside = inside.f_neg()?.f_add_scalar(1.0)?;
        let pixels = images.f_squeeze_dim(1)?;
        match reward {
            ImageReward::Brightness => {
                let pixels = pixels.f_clamp(-1.0, 1.0)?;
                let light = pixels.f_add_scalar(1.0)?;
                let elsewhere = mean_within(&light, &outside)?;
                Ok(mean_within(&pixels, &inside)?.f_sub(&elsewhere.f_mul_scalar(0.5)?)?)
            }
            ImageReward::Lit => {
                // What is no number is not dark either: it stays as it is, and its image is left out.
                let lit = pixels.f_gt(0.0)?.f_to_kind(Kind::Float)?.f_add(&pixels.f_mul_scalar(0.0)?)?;
                Ok(mean_within(&lit, &inside)?.f_sub(&mean_within(&lit, &outside)?)?)
            }
        }
    }

    /// Scores, and the gradient of each with respect to its image; of a reward that is differentiable.
    pub fn score_with_gradient(
        &self,
        reward: ImageReward,
        images: &Tensor,
        labels: &Tensor,
    ) -> Result<(Tensor, Tensor)> {
        let images = images.f_detach()?.f_set_requires_grad(true)?;
        let scores = self.score(reward, &images, labels)?;
        let total = scores.f_sum(Kind::Float)?;
        let gradient = Tensor::f_run_backward(&[total], &[&images], false, false)?.swap_remove(0);
        Ok((scores.f_detach()?, gradient))
    }
}

/// The mean of the `pixels` `[B, height, width]` where `map` is 1: `[B]`.
fn mean_within(pixels: &Tensor, map: &Tensor) -> Result<Tensor> {
    let sum =
        |values: &Tensor| values.f_flatten(1, -1)?.f_sum_dim_intlist([1].as_slice(), false, Kind::Float);
    Ok(sum(&pixels.f_mul(map)?)?.f_div(&sum(map)?)?)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn images(top_left: f64, elsewhere: f64) -> Tensor {
        let images = Tensor::full([1, 1, 8, 8], elsewhere, (Kind::Float, Device::Cpu));
        let _ = images.narrow(2, 0, 4).narrow(3, 0, 4).fill_(top_left);
        images
    }

    #[test]
    fn scores_are_those_of_the_definition() {
        let scorer = Scorer::new(Device::Cpu).unwrap();
        let check = |reward, image: &Tensor, label: i64, expected: f64| {
            let score = scorer.score(reward, image, &Tensor::from_slice(&[label])).unwrap();
            assert!((score.double_value(&[0]) - expected).abs() < 1e-6, "{reward:?} {label}: {score}");
        };
        check(ImageReward::Brightness, &images(1.0, -1.0), 0, 1.0);
        check(ImageReward::Brightness, &images(3.0, -3.0), 0, 1.0);
        check(ImageReward::Brightness, &images(0.5, 0.0), 0, 0.5 - 0.5);
        check(ImageReward::Brightness, &images(1.0, -1.0), 3, -1.0 - 0.5 * 2.0 / 3.0);
        check(ImageReward::Lit, &images(0.2, -0.1), 0, 1.0);
        check(ImageReward::Lit, &images(0.2, -0.1), 1, -1.0 / 3.0);
        check(ImageReward::Lit, &images(0.2, 0.1), 2, 0.0);
    }

    #[test]
    fn what_is_not_finite_has_no_score() {
        let scorer = Scorer::new(Device::Cpu).unwrap();
        let image = images(1.0, -1.0);
        let _ = image.narrow(2, 7, 1).fill_(f64::NAN);
        for reward in [ImageReward::Brightness, ImageReward::Lit] {
            let score = scorer.score(reward, &image, &Tensor::from_slice(&[0i64])).unwrap();
            assert!(score.double_value(&[0]).is_nan(), "{reward:?}");
        }
    }

    #[test]
    fn the_gradient_is_that_of_finite_differences() {
        let scorer = Scorer::new(Device::Cpu).unwrap();
        let labels = Tensor::from_slice(&[2i64]);
        let image = images(0.5, -0.25);
        let (_, gradient) = scorer.score_with_gradient(ImageReward::Brightness, &image, &labels).unwrap();
        let score = |image: &Tensor| {
            scorer.score(ImageReward::Brightness, image, &labels).unwrap().double_value(&[0])
        };
        for (y, x) in [(0, 0), (6, 1), (7, 7)] {
            let moved = |by: f64| {
                let moved = image.copy();
                let _ = moved.narrow(2, y, 1).narrow(3, x, 1).g_add_scalar_(by);
                score(&moved)
            };
            let expected = (moved(0.125) - moved(-0.125)) / 0.25;
            assert!((gradient.double_value(&[0, 0, y, x]) - expected).abs() < 1e-6, "({y}, {x})");
        }
    }
}

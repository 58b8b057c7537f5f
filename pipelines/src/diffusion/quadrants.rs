//! The `shapes` reward: light in the quadrant of an image's class.

use tch::{Device, Kind, Tensor};

use super::shapes;
use crate::Result;

/// Measure of light.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Light {
    /// The config's `brightness`.
    Brightness,
    /// The config's `lit`.
    Lit,
}

/// Scores images by their class.
#[derive(Debug)]
pub struct Quadrants {
    /// Mask of each class's quadrant: fp32 `[classes, height, width]`.
    quadrants: Tensor,
}

impl Quadrants {
    /// Creates the masks for the images of `shapes`.
    pub fn new(device: Device) -> Result<Self> {
        Ok(Self { quadrants: shapes::quadrants(device)? })
    }

    /// Score of each of the images `[B, 1, height, width]` with classes `labels`, int64 `[B]`: fp32 `[B]`.
    pub fn score(&self, light: Light, images: &Tensor, labels: &Tensor) -> Result<Tensor> {
        let inside = self.quadrants.f_index_select(0, labels)?;
        let outside = inside.f_neg()?.f_add_scalar(1.0)?;
        let pixels = images.f_squeeze_dim(1)?;
        match light {
            Light::Brightness => {
                let pixels = pixels.f_clamp(-1.0, 1.0)?;
                let light = pixels.f_add_scalar(1.0)?;
                let elsewhere = mean_within(&light, &outside)?;
                Ok(mean_within(&pixels, &inside)?.f_sub(&elsewhere.f_mul_scalar(0.5)?)?)
            }
            Light::Lit => {
                // NaN must stay NaN, so that the image is excluded.
                let lit = pixels.f_gt(0.0)?.f_to_kind(Kind::Float)?.f_add(&pixels.f_mul_scalar(0.0)?)?;
                Ok(mean_within(&lit, &inside)?.f_sub(&mean_within(&lit, &outside)?)?)
            }
        }
    }
}

/// Mean of the `pixels` `[B, height, width]` where `map` is 1: `[B]`.
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
        let quadrants = Quadrants::new(Device::Cpu).unwrap();
        let check = |reward, image: &Tensor, label: i64, expected: f64| {
            let score = quadrants.score(reward, image, &Tensor::from_slice(&[label])).unwrap();
            assert!((score.double_value(&[0]) - expected).abs() < 1e-6, "{reward:?} {label}: {score}");
        };
        check(Light::Brightness, &images(1.0, -1.0), 0, 1.0);
        check(Light::Brightness, &images(3.0, -3.0), 0, 1.0);
        check(Light::Brightness, &images(0.5, 0.0), 0, 0.5 - 0.5);
        check(Light::Brightness, &images(1.0, -1.0), 3, -1.0 - 0.5 * 2.0 / 3.0);
        check(Light::Lit, &images(0.2, -0.1), 0, 1.0);
        check(Light::Lit, &images(0.2, -0.1), 1, -1.0 / 3.0);
        check(Light::Lit, &images(0.2, 0.1), 2, 0.0);
    }

    #[test]
    fn what_is_not_finite_has_no_score() {
        let quadrants = Quadrants::new(Device::Cpu).unwrap();
        let image = images(1.0, -1.0);
        let _ = image.narrow(2, 7, 1).fill_(f64::NAN);
        for reward in [Light::Brightness, Light::Lit] {
            let score = quadrants.score(reward, &image, &Tensor::from_slice(&[0i64])).unwrap();
            assert!(score.double_value(&[0]).is_nan(), "{reward:?}");
        }
    }
}

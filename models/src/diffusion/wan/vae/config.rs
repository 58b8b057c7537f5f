//! The shape of the video decoder.

use crate::Result;
use crate::error::check_config;

/// The shape of a [`WanVaeDecoder`](super::WanVaeDecoder), with the field names of diffusers' `config.json`.
#[derive(Clone, Debug, PartialEq)]
pub struct WanVaeConfig {
    /// Channels at the videos' resolution; the decoder's own, if the encoder's differ.
    pub base_dim: i64,
    /// Channels of the latents.
    pub z_dim: i64,
    /// Channels at each resolution, the videos' first, as multiples of `base_dim`.
    pub dim_mult: Vec<i64>,
    /// Residual blocks per resolution, minus one.
    pub num_res_blocks: usize,
    /// True for each transition to the next resolution, the videos' first, that also halves the frames; one
    /// fewer than resolutions.
    pub temperal_downsample: Vec<bool>,
    /// Offset of each channel that was subtracted from the encoder's latents.
    pub latents_mean: Vec<f64>,
    /// Divisor of each channel that was applied afterwards.
    pub latents_std: Vec<f64>,
    /// Output channels of the last convolution: those of the videos, times the pixels of a patch.
    pub out_channels: i64,
    /// Side in pixels of the patch that one pixel of the last convolution becomes.
    pub patch_size: i64,
    /// True if upsampling has a shortcut, and channels change within it and not after it, like in Wan 2.2's
    /// 5B.
    pub is_residual: bool,
}

impl WanVaeConfig {
    /// Returns the number of frames per latent after the first; the first latent is one frame.
    pub fn zoom_in_time(&self) -> i64 {
        1 << self.temperal_downsample.iter().filter(|&&doubled| doubled).count()
    }

    /// Returns the ratio of a frame's side to its latents' side.
    pub fn zoom(&self) -> i64 {
        self.patch_size << self.temperal_downsample.len()
    }

    /// Returns the channels at each resolution, the latents' first.
    pub(super) fn channels(&self) -> impl Iterator<Item = i64> {
        self.dim_mult.iter().rev().map(|multiple| multiple * self.base_dim)
    }

    /// Checks that the sizes are valid.
    ///
    /// # Errors
    /// [`Error::Config`](crate::Error::Config) with the field and the valid values.
    pub fn validate(&self) -> Result<()> {
        for (field, size) in [
            ("base_dim", self.base_dim),
            ("z_dim", self.z_dim),
            ("out_channels", self.out_channels),
            ("patch_size", self.patch_size),
        ] {
            check_config(size > 0, field, || format!("is {size}, must be at least 1"))?;
        }
        let multiples = &self.dim_mult;
        let fit = !multiples.is_empty() && multiples.iter().all(|&multiple| multiple > 0);
        check_config(fit, "dim_mult", || format!("is {multiples:?}, must be numbers above 0"))?;
        check_config(self.temperal_downsample.len() + 1 == multiples.len(), "temperal_downsample", || {
            let found = self.temperal_downsample.len();
            format!("has {found} entries, must have one fewer than the {} of dim_mult", multiples.len())
        })?;
        self.validate_channels()?;
        let pixels = self.patch_size.saturating_mul(self.patch_size);
        check_config(self.out_channels % pixels == 0, "out_channels", || {
            format!("is {}, must be a multiple of the {pixels} pixels of a patch", self.out_channels)
        })?;
        for (field, values) in [("latents_mean", &self.latents_mean), ("latents_std", &self.latents_std)] {
            let fit = values.len() as i64 == self.z_dim && values.iter().all(|value| value.is_finite());
            check_config(fit, field, || format!("is {values:?}, must be {} numbers, as z_dim", self.z_dim))?;
        }
        Ok(())
    }

    /// Checks that upsampling can halve the channels or, with a shortcut, repeat its input.
    fn validate_channels(&self) -> Result<()> {
        let channels: Vec<i64> = self.channels().collect();
        let doubled = &channels[..channels.len() - 1];
        if !self.is_residual {
            return check_config(doubled.iter().all(|own| own % 2 == 0), "dim_mult", || {
                format!(
                    "is {:?} and base_dim {}; all products but the first must be even",
                    self.dim_mult, self.base_dim
                )
            });
        }
        let before = std::iter::once(&channels[0]).chain(doubled);
        let fills = |((own, before), repeat): ((&i64, &i64), i64)| own * 4 * repeat % before == 0;
        let fit = doubled.iter().zip(before).zip(self.frames_of_each()).all(fills);
        check_config(fit, "dim_mult", || {
            format!("is {:?}; upsampling must repeat channels a whole number of times", self.dim_mult)
        })
    }

    /// Returns the number of frames that one frame becomes, at each resolution but the videos', the latents'
    /// first.
    pub(super) fn frames_of_each(&self) -> impl Iterator<Item = i64> {
        self.temperal_downsample.iter().rev().map(|&doubled| if doubled { 2 } else { 1 })
    }
}

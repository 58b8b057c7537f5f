//! The shape of the decoder.

use crate::Result;
use crate::error::check_config;

/// The shape of a [`WanVaeDecoder`](super::WanVaeDecoder), with the names of diffusers' `config.json`.
#[derive(Clone, Debug, PartialEq)]
pub struct WanVaeConfig {
    /// Channels at the videos' resolution: the decoder's own, if the encoder has others.
    pub base_dim: i64,
    /// Channels of the latents.
    pub z_dim: i64,
    /// Channels at each resolution, the videos' first, as multiples of `base_dim`.
    pub dim_mult: Vec<i64>,
    /// Residual blocks at each resolution, less one.
    pub num_res_blocks: usize,
    /// From which resolutions to the next, the videos' first, there are half of the frames as well; one fewer than
    /// resolutions.
    pub temperal_downsample: Vec<bool>,
    /// What was taken off the encoder's latents, of each channel.
    pub latents_mean: Vec<f64>,
    /// What they were then divided by.
    pub latents_std: Vec<f64>,
    /// Channels of the videos.
    pub out_channels: i64,
}

impl WanVaeConfig {
    /// How many frames a latent behind the first stands for; the first stands for one.
    pub fn zoom_in_time(&self) -> i64 {
        1 << self.temperal_downsample.iter().filter(|&&doubled| doubled).count()
    }

    /// How many times larger a frame's sides are than its latents'.
    pub fn zoom(&self) -> i64 {
        1 << self.temperal_downsample.len()
    }

    /// Channels at each resolution, that of the latents first.
    pub(super) fn channels(&self) -> impl Iterator<Item = i64> {
        self.dim_mult.iter().rev().map(|multiple| multiple * self.base_dim)
    }

    /// Checks that the sizes make a model.
    ///
    /// # Errors
    /// [`Error::Config`](crate::Error::Config) with the field and what it should be.
    pub fn validate(&self) -> Result<()> {
        for (field, size) in
            [("base_dim", self.base_dim), ("z_dim", self.z_dim), ("out_channels", self.out_channels)]
        {
            check_config(size > 0, field, || format!("is {size}, must be at least 1"))?;
        }
        let multiples = &self.dim_mult;
        let fit = !multiples.is_empty() && multiples.iter().all(|&multiple| multiple > 0);
        check_config(fit, "dim_mult", || format!("is {multiples:?}, must be numbers above 0"))?;
        // Doubling a side takes half of the channels.
        let halved = self.channels().take(multiples.len() - 1).all(|own| own % 2 == 0);
        check_config(halved, "dim_mult", || {
            format!(
                "is {multiples:?} and base_dim {}; all products but the first must be even",
                self.base_dim
            )
        })?;
        check_config(self.temperal_downsample.len() + 1 == multiples.len(), "temperal_downsample", || {
            let found = self.temperal_downsample.len();
            format!("has {found} entries, must have one fewer than the {} of dim_mult", multiples.len())
        })?;
        for (field, values) in [("latents_mean", &self.latents_mean), ("latents_std", &self.latents_std)] {
            let fit = values.len() as i64 == self.z_dim && values.iter().all(|value| value.is_finite());
            check_config(fit, field, || format!("is {values:?}, must be {} numbers, as z_dim", self.z_dim))?;
        }
        Ok(())
    }
}

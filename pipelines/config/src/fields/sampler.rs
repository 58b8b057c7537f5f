//! The `sampler` of `pipeline.diffusion`, which denoises images.

use anyroll_models::diffusion::{sigmas, sigmas_of_diffusers};
use serde::{Deserialize, Serialize};

use crate::document::Section;

/// Sampler that denoises images.
#[derive(Clone, Debug, PartialEq, Deserialize, Serialize)]
#[serde(deny_unknown_fields)]
pub struct SamplerConfig {
    /// Number of denoising steps; 2 or above.
    pub steps: usize,
    /// Spacing of the sigmas before the shift. Default even.
    #[serde(default)]
    pub spacing: Spacing,
    /// Shift of the sigmas towards noise, `s sigma / (1 + (s - 1) sigma)`; above 0. Default: the value of the scheduler
    /// in the model's folder; without a folder 1, evenly spaced.
    #[serde(default)]
    pub shift: Option<f64>,
    /// Scale of classifier-free guidance, in sampling and in training; 0 or above, and 1 is none. Default 1.
    #[serde(default = "one_f64")]
    pub guidance: f64,
    /// Scale of guidance for the second transformer of a pair, as in Wan 2.2's 14B; 0 or above. Default: `guidance`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub guidance_2: Option<f64>,
    /// Number of images that a rank samples at a time; 1 or above.
    pub batch_size: usize,
    /// Number of images that a rank decodes from latents at a time, if the model has latents; 1 or above. Default 1.
    #[serde(default = "one")]
    pub decode_batch_size: usize,
    /// Number of first frames of a video that are decoded, for rewards, evaluations and pictures: one more than a
    /// multiple of the autoencoder's temporal factor. Default: all.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub decode_frames: Option<usize>,
    /// Tiles that overlap, for decoding images larger than a tile, as in diffusers' `enable_tiling`. Tiles need less
    /// memory, and change pixels slightly. Default: no tiles.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub decode_tiles: Option<TilesConfig>,
}

/// Square tiles of images or frames.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Deserialize, Serialize)]
#[serde(deny_unknown_fields)]
pub struct TilesConfig {
    /// Side of a tile in pixels; a multiple of a latent's side in pixels.
    pub size: usize,
    /// Pixels from one tile to the next, from half of `size` to all of it. Default: three quarters of `size`, in whole
    /// latents.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub stride: Option<usize>,
}

impl TilesConfig {
    /// Returns the pixels from one tile to the next. `zoom` is the number of pixels of a latent's side.
    pub fn stride(&self, zoom: usize) -> usize {
        self.stride.unwrap_or(self.size / zoom * 3 / 4 * zoom)
    }
}

impl SamplerConfig {
    /// Returns the sigmas of the denoising steps, from 1 to 0.
    ///
    /// # Errors
    /// Fails for a number of steps or a shift that has no sigmas.
    pub fn sigmas(&self, shift: f64) -> anyroll_models::Result<Vec<f64>> {
        match self.spacing {
            Spacing::Even => sigmas(self.steps, shift),
            Spacing::Diffusers => sigmas_of_diffusers(self.steps, shift),
        }
    }

    /// Returns the guidance at `sigma`, for a pair of transformers with this `boundary`.
    pub fn guidance_at(&self, sigma: f64, boundary: Option<f64>) -> f64 {
        let of_second = boundary.is_some_and(|boundary| is_of_second(sigma, boundary));
        self.guidance_2.filter(|_| of_second).unwrap_or(self.guidance)
    }

    /// Returns true if any step has guidance.
    pub fn is_guided(&self) -> bool {
        self.guided_by().is_some()
    }

    /// Returns the first field by which any step has guidance.
    pub fn guided_by(&self) -> Option<&'static str> {
        let fields = [("guidance", Some(self.guidance)), ("guidance_2", self.guidance_2)];
        fields.into_iter().find(|(_, value)| value.is_some_and(|value| value != 1.0)).map(|(name, _)| name)
    }
}

/// Returns true if the second transformer of a pair denoises at `sigma`; the comparison is in fp32, as in the model.
pub fn is_of_second(sigma: f64, boundary: f64) -> bool {
    (sigma as f32) < boundary as f32
}

/// Spacing of a sampler's sigmas.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Deserialize, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum Spacing {
    /// From 1 to 0 in equal steps, as in ROLL.
    #[default]
    Even,
    /// The spacing of diffusers' `FlowMatchEulerDiscreteScheduler`: equal steps to the sigma of the first timestep, and
    /// one step to 0.
    Diffusers,
}

impl SamplerConfig {
    pub(super) fn validate(&self, at: &Section) {
        at.positive("steps", self.steps);
        // Stochastic steps divide by 1 minus the second sigma.
        at.ensure(self.steps >= 2, "steps", "one step is no walk", "write 2 or above");
        let shift = self.shift.unwrap_or(1.0);
        at.number("shift", shift, shift > 0.0, "above 0");
        at.number("guidance", self.guidance, self.guidance >= 0.0, "0 or above");
        let second = self.guidance_2.unwrap_or(1.0);
        at.number("guidance_2", second, second >= 0.0, "0 or above");
        at.positive("decode_batch_size", self.decode_batch_size);
        at.positive("batch_size", self.batch_size);
    }

    /// Refuses a second guidance without a second transformer.
    pub fn validate_second_guidance(&self, has_second: bool, at: &Section) {
        at.ensure(
            self.guidance_2.is_none() || has_second,
            "guidance_2",
            "the model has no second transformer",
            "leave it out; `guidance` holds at all sigmas",
        );
    }
}

// serde's attributes take functions only.

fn one() -> usize {
    1
}

fn one_f64() -> f64 {
    1.0
}

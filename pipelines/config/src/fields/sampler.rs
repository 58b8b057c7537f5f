//! The `sampler` of `pipeline.diffusion`: how noise becomes an image.

use anyroll_models::diffusion::{sigmas, sigmas_of_diffusers};
use serde::{Deserialize, Serialize};

use crate::document::Section;

/// How noise becomes an image.
#[derive(Clone, Debug, PartialEq, Deserialize, Serialize)]
#[serde(deny_unknown_fields)]
pub struct SamplerConfig {
    /// Denoising steps.
    pub steps: usize,
    /// How the sigmas are spaced before they are shifted. Default even.
    #[serde(default)]
    pub spacing: Spacing,
    /// Moves the sigmas towards noise, `s sigma / (1 + (s - 1) sigma)`; above 0. Default: what the scheduler in the
    /// model's folder says; without a folder 1, evenly spaced.
    #[serde(default)]
    pub shift: Option<f64>,
    /// Classifier-free guidance, in sampling and in training; 1 is none. Default 1.
    #[serde(default = "one_f64")]
    pub guidance: f64,
    /// The same where the second of a pair of transformers paints, as Wan 2.2's 14B is one. Default: `guidance`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub guidance_2: Option<f64>,
    /// Images that a rank samples at a time.
    pub batch_size: usize,
    /// Images that a rank decodes from latents at a time, where the model has any. Default: one.
    #[serde(default = "one")]
    pub decode_batch_size: usize,
    /// Of videos the first so many frames are decoded, for rewards, evaluations and pictures: one more than a multiple of
    /// what the autoencoder needs. Default: all.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub decode_frames: Option<usize>,
    /// Decode what is larger than a tile in tiles that overlap, as diffusers' `enable_tiling` does: less memory, and slightly
    /// other pixels. Default: whole.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub decode_tiles: Option<TilesConfig>,
}

/// Square tiles of images or frames.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Deserialize, Serialize)]
#[serde(deny_unknown_fields)]
pub struct TilesConfig {
    /// Pixels of a tile's side; a multiple of what a latent stands for.
    pub size: usize,
    /// Pixels from one tile to the next, from half of `size` to all of it. Default: three quarters of `size`, in whole latents.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub stride: Option<usize>,
}

impl TilesConfig {
    /// Pixels from one tile to the next, where a latent stands for `zoom` of a side.
    pub fn stride(&self, zoom: usize) -> usize {
        self.stride.unwrap_or(self.size / zoom * 3 / 4 * zoom)
    }
}

impl SamplerConfig {
    /// Every sigma on the way, from 1 to 0.
    ///
    /// # Errors
    /// For steps or a shift that make none.
    pub fn sigmas(&self, shift: f64) -> anyroll_models::Result<Vec<f64>> {
        match self.spacing {
            Spacing::Even => sigmas(self.steps, shift),
            Spacing::Diffusers => sigmas_of_diffusers(self.steps, shift),
        }
    }

    /// The guidance at `sigma`, of a pair of transformers with this `boundary`.
    pub fn guidance_at(&self, sigma: f64, boundary: Option<f64>) -> f64 {
        let of_second = boundary.is_some_and(|boundary| is_of_second(sigma, boundary));
        self.guidance_2.filter(|_| of_second).unwrap_or(self.guidance)
    }

    /// Whether any step has guidance.
    pub fn is_guided(&self) -> bool {
        self.guided_by().is_some()
    }

    /// The first field by which any step has guidance.
    pub fn guided_by(&self) -> Option<&'static str> {
        let fields = [("guidance", Some(self.guidance)), ("guidance_2", self.guidance_2)];
        fields.into_iter().find(|(_, value)| value.is_some_and(|value| value != 1.0)).map(|(name, _)| name)
    }
}

/// Whether the second of a pair of transformers paints at `sigma`; as the model compares them, in fp32.
pub fn is_of_second(sigma: f64, boundary: f64) -> bool {
    (sigma as f32) < boundary as f32
}

/// How a sampler's sigmas are spaced.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Deserialize, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum Spacing {
    /// From 1 to 0 in equal steps, as ROLL has it.
    #[default]
    Even,
    /// As diffusers' `FlowMatchEulerDiscreteScheduler`: in equal steps to the first timestep's, and one step to 0.
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

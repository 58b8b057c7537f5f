//! Flow-matching models of images and videos, and sampling from them.
//!
//! Straight lines connect data `x_0` and noise `eps`, `x_sigma = (1 - sigma) x_0 + sigma eps`. A model
//! predicts the velocity `v = eps - x_0` at a point of such a line (Lipman et al. 2023; Liu et al. 2023).
//! Sampling moves noise from sigma 1 to sigma 0 over a few [`sigmas`].
//!
//! [`dit`] is a class-conditional model, [`sd3`] a text-to-image model in latents that [`vae`] decodes, and
//! [`wan`] a text-to-video model with its decoder. [`tiles`] decodes large images in parts, and
//! [`transformer`] is any of the models. [`sampler`] runs the steps, [`sde`] is a step with noise and so with
//! a log-probability, and [`guidance`] evaluates a model twice.

pub mod dit;
mod footprint;
pub mod guidance;
pub(crate) mod layers;
mod lora_linear;
pub mod sampler;
pub mod sd3;
pub mod sde;
mod texts;
pub mod tiles;
pub mod transformer;
pub mod vae;
pub mod wan;

use std::sync::{Mutex, PoisonError};

use anyroll_backends::ops;
use tch::Tensor;

use crate::Result;
use crate::model::Model;

pub use dit::{Dit, DitConfig};
pub use footprint::DenoiseSize;
pub use guidance::Guidance;
pub use layers::Lora;
pub use sampler::{Sampler, Walk, sigmas, sigmas_of_diffusers, velocity};
pub use sd3::{Sd3, Sd3Config};
pub use sde::{SdeNoise, SdeStep};
pub use texts::{TextWidths, Texts};
pub use tiles::Tiles;
pub use transformer::{LatentSizes, Transformer, TransformerConfig};
pub use vae::{LatentBatch, LatentSize, VaeConfig, VaeDecoder};
pub use wan::{EXPERTS, VideoLatentSize, Wan, WanConfig, WanVaeConfig, WanVaeDecoder, WanVaeTape};

/// A velocity model.
pub trait Denoiser: Model<Batch = DenoiseBatch, Scores = Tensor, ScoresGrad = Tensor> {}

impl<M: Model<Batch = DenoiseBatch, Scores = Tensor, ScoresGrad = Tensor>> Denoiser for M {}

/// Points on the lines from data to noise, on a device.
#[derive(Debug)]
pub struct DenoiseBatch {
    /// The points: fp32 `[B, channels, height, width]`; videos have `[B, channels, frames, height, width]`.
    pub latents: Tensor,
    /// Sigma of each point, from 0 (data) to 1 (noise): fp32 `[B]`.
    pub sigmas: Tensor,
    /// Class of each point, or the number of classes for none; for text models the index of the text: int64
    /// `[B]`.
    pub labels: Tensor,
    /// True if the model runs with its adapters, if it has any.
    pub adapters: bool,
    /// True if backward should also compute the gradient of the points.
    pub latents_grad: bool,
}

impl DenoiseBatch {
    /// Returns the number of points B.
    pub fn len(&self) -> i64 {
        self.latents.size()[0]
    }

    /// Returns true if there are no points.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }
    /// Returns the same points for the model with its adapters off.
    pub fn without_adapters(&self) -> DenoiseBatch {
        let [latents, sigmas, labels] =
            [&self.latents, &self.sigmas, &self.labels].map(Tensor::shallow_clone);
        DenoiseBatch { latents, sigmas, labels, adapters: false, latents_grad: false }
    }
}

/// A tensor that models only read. Behind a lock only because tch's tensors are not `Sync`.
#[derive(Debug)]
struct Shared(Mutex<Tensor>);

impl Shared {
    fn new(tensor: Tensor) -> Shared {
        Shared(Mutex::new(tensor))
    }

    fn get(&self) -> Tensor {
        self.0.lock().unwrap_or_else(PoisonError::into_inner).shallow_clone()
    }

    /// Returns it on the device of `x`, where it is unless `x` is of a measurement.
    fn beside(&self, x: &Tensor) -> Result<Tensor> {
        Ok(ops::moved(&self.get(), x.device())?)
    }
}

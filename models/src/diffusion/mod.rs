//! Flow-matching models of images, and sampling from them.
//!
//! Data `x_0` and noise `eps` are joined by straight lines, `x_sigma = (1 - sigma) x_0 + sigma eps`, and a model
//! says the velocity `v = eps - x_0` at a point of such a line (Lipman et al. 2023; Liu et al. 2023). A sample is
//! noise that has been walked from sigma 1 to sigma 0 in a few [`sigmas`].
//!
//! [`dit`] is a model of classes, [`sd3`] one of texts, in latents that [`vae`] decodes, and [`wan`] one of videos
//! with its decoder; [`tiles`] decodes large ones in parts;
//! [`transformer`] is any of them. [`sampler`] walks, [`sde`] is a step of the walk with noise of its own, and so with a log-probability;
//! [`guidance`] asks a model twice.

mod adapted;
pub mod dit;
mod footprint;
pub mod guidance;
pub(crate) mod layers;
pub mod sampler;
pub mod sd3;
pub mod sde;
mod texts;
pub mod tiles;
pub mod transformer;
pub mod vae;
pub mod wan;

use std::sync::{Mutex, PoisonError};

use tch::Tensor;

use crate::model::Model;

pub use dit::{Dit, DitConfig};
pub use footprint::DenoiseSize;
pub use guidance::Guidance;
pub use layers::Lora;
pub use sampler::{Sampler, Walk, sigmas, sigmas_of_diffusers, velocity};
pub use sd3::{Sd3, Sd3Config};
pub use sde::{SdeNoise, SdeStep};
pub use texts::Texts;
pub use tiles::Tiles;
pub use transformer::{LatentSizes, Transformer, TransformerConfig};
pub use vae::{LatentBatch, LatentSize, VaeConfig, VaeDecoder};
pub use wan::{EXPERTS, VideoLatentSize, Wan, WanConfig, WanVaeConfig, WanVaeDecoder, WanVaeTape};

/// A model of velocities.
pub trait Denoiser: Model<Batch = DenoiseBatch, Scores = Tensor, ScoresGrad = Tensor> {}

impl<M: Model<Batch = DenoiseBatch, Scores = Tensor, ScoresGrad = Tensor>> Denoiser for M {}

/// Points on the lines from data to noise, on a device.
#[derive(Debug)]
pub struct DenoiseBatch {
    /// The points: fp32 `[B, channels, height, width]`, of videos `[B, channels, frames, height, width]`.
    pub latents: Tensor,
    /// How far each is from the data, 0 to 1: fp32 `[B]`.
    pub sigmas: Tensor,
    /// The class of each, or the number of classes for none; of a model of texts the number of the text: int64 `[B]`.
    pub labels: Tensor,
    /// Whether the model runs with its adapters, if it has any.
    pub adapters: bool,
    /// Whether backward should find the gradient of the points as well.
    pub latents_grad: bool,
}

impl DenoiseBatch {
    /// The number of points B.
    pub fn len(&self) -> i64 {
        self.latents.size()[0]
    }

    /// Whether there is no point.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }
    /// The same points for the model with its adapters off.
    pub fn without_adapters(&self) -> DenoiseBatch {
        let [latents, sigmas, labels] =
            [&self.latents, &self.sigmas, &self.labels].map(Tensor::shallow_clone);
        DenoiseBatch { latents, sigmas, labels, adapters: false, latents_grad: false }
    }
}

/// A tensor that models read and nobody writes. Behind a lock only because tch's tensors are not `Sync`.
#[derive(Debug)]
struct Shared(Mutex<Tensor>);

impl Shared {
    fn new(tensor: Tensor) -> Shared {
        Shared(Mutex::new(tensor))
    }

    fn get(&self) -> Tensor {
        self.0.lock().unwrap_or_else(PoisonError::into_inner).shallow_clone()
    }
}

//! From what is denoised to pixels.

use anyroll_models::{
    Model, Saved, Unit,
    diffusion::{LatentBatch, VaeDecoder, WanVaeDecoder, WanVaeTape},
    hf::{LatentDecoderConfig, LatentDecoderFolder},
    init::whole,
    passes,
};
use tch::{Device, Kind, Tensor};

use crate::{Result, config::Precision};

/// Frames of latents that a video is decoded by: as few as there are, since each is several frames of pixels.
const LATENTS_AT_A_TIME: i64 = 1;

/// A frozen decoder of latents, whole on every rank: it is small beside what makes the latents.
#[derive(Debug)]
pub struct ImageDecoder {
    model: Network,
    weights: Vec<Vec<Tensor>>,
    /// Latents at a time.
    batch_size: i64,
}

#[derive(Debug)]
enum Network {
    Images(VaeDecoder),
    Videos {
        model: WanVaeDecoder,
        /// Of each video's latents the first so many frames are decoded: what comes behind changes nothing in them.
        latents: i64,
    },
}

/// Images or videos, and what the gradient of their latents needs.
pub struct Decoded {
    /// fp32 `[B, channels, height, width]`, of videos `[B, channels, frames, height, width]`.
    pub images: Tensor,
    parts: Vec<Part>,
}

enum Part {
    Images(LatentBatch, Vec<Saved>),
    Videos {
        tape: WanVaeTape,
        /// Frames of latents that were not decoded.
        left: i64,
    },
}

impl ImageDecoder {
    /// Reads the weights from `folder`; values of 16 bits are bf16, since fp16 overflows in such decoders. Of videos
    /// `frames` are decoded, which come of whole latents.
    pub fn new(
        folder: &LatentDecoderFolder,
        frames: i64,
        precision: Precision,
        batch_size: usize,
        device: Device,
    ) -> Result<Self> {
        let model = match folder.config() {
            LatentDecoderConfig::Images(config) => Network::Images(VaeDecoder::new(config.clone(), false)?),
            LatentDecoderConfig::Videos(config) => Network::Videos {
                latents: (frames - 1) / config.zoom_in_time() + 1,
                model: WanVaeDecoder::new(config.clone())?,
            },
        };
        let kind = if precision == Precision::Fp32 { Kind::Float } else { Kind::BFloat16 };
        let mut weights = Vec::with_capacity(model.units().len());
        for unit in model.units() {
            let read = unit.params.iter().map(|spec| whole(folder, spec, kind, device));
            weights.push(read.collect::<anyroll_models::Result<Vec<_>>>()?);
        }
        Ok(Self { model, weights, batch_size: batch_size as i64 })
    }

    /// The images of `latents` `[B, channels, height, width]`, or the videos of such with frames in the middle; with
    /// `latents_grad`, their gradient can be followed back.
    pub fn decode(&self, latents: &Tensor, latents_grad: bool) -> Result<Decoded> {
        let (units, mut images, mut parts) = (self.weights(), Vec::new(), Vec::new());
        for latents in latents.f_split(self.batch_size, 0)? {
            match &self.model {
                Network::Images(model) => {
                    let batch = LatentBatch { latents, latents_grad };
                    let (decoded, saved) = passes::forward(model, &units, &batch, latents_grad)?;
                    images.push(decoded);
                    parts.extend(latents_grad.then_some(Part::Images(batch, saved)));
                }
                Network::Videos { model, latents: count } => {
                    let seen = latents.f_narrow(2, 0, *count)?;
                    let (decoded, tape) = model.decode(&units, &seen, LATENTS_AT_A_TIME, latents_grad)?;
                    images.push(decoded);
                    let left = latents.size()[2] - count;
                    parts.extend(tape.map(|tape| Part::Videos { tape, left }));
                }
            }
        }
        Ok(Decoded { images: Tensor::f_cat(&images, 0)?, parts })
    }

    /// The gradient of the latents from that of the images.
    pub fn follow_back(&self, decoded: Decoded, gradient: &Tensor) -> Result<Tensor> {
        let units = self.weights();
        let gradients = gradient.f_split(self.batch_size, 0)?;
        let parts =
            decoded.parts.into_iter().zip(gradients).map(|(part, gradient)| match (&self.model, part) {
                (Network::Images(model), Part::Images(batch, saved)) => {
                    let found = passes::input_gradient(model, &units, &batch, saved, gradient)?;
                    Ok(found.expect("the gradient of the latents was asked for"))
                }
                (Network::Videos { model, .. }, Part::Videos { tape, left }) => {
                    let found = model.latents_grad(&units, tape, &gradient)?;
                    Ok(found.f_constant_pad_nd([0, 0, 0, 0, 0, left])?)
                }
                _ => unreachable!("one network has made all parts"),
            });
        Ok(Tensor::f_cat(&parts.collect::<Result<Vec<_>>>()?, 0)?)
    }

    fn weights(&self) -> Vec<&[Tensor]> {
        self.weights.iter().map(Vec::as_slice).collect()
    }
}

impl Network {
    fn units(&self) -> &[Unit] {
        match self {
            Self::Images(model) => model.units(),
            Self::Videos { model, .. } => model.units(),
        }
    }
}

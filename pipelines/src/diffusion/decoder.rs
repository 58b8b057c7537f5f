//! From what is denoised to pixels.

use std::sync::Arc;

use anyroll_models::{
    Model, Saved,
    diffusion::{LatentBatch, VaeDecoder},
    init::{WeightSource, whole},
    passes,
};
use tch::{Device, Kind, Tensor};

use crate::{Result, config::Precision};

/// A frozen decoder of latents, whole on every rank: it is small beside what makes the latents.
#[derive(Debug)]
pub struct ImageDecoder {
    model: Arc<VaeDecoder>,
    weights: Vec<Vec<Tensor>>,
    /// Latents at a time.
    batch_size: i64,
}

/// Images, and what the gradient of their latents needs.
pub struct Decoded {
    /// fp32 `[B, channels, height, width]`.
    pub images: Tensor,
    parts: Vec<(LatentBatch, Vec<Saved>)>,
}

impl ImageDecoder {
    /// Reads the weights from `source`; values of 16 bits are bf16, since fp16 overflows in such decoders.
    pub fn new(
        model: VaeDecoder,
        source: &dyn WeightSource,
        precision: Precision,
        batch_size: usize,
        device: Device,
    ) -> Result<Self> {
        let kind = if precision == Precision::Fp32 { Kind::Float } else { Kind::BFloat16 };
        let mut weights = Vec::with_capacity(model.units().len());
        for unit in model.units() {
            let read = unit.params.iter().map(|spec| whole(source, spec, kind, device));
            weights.push(read.collect::<anyroll_models::Result<Vec<_>>>()?);
        }
        Ok(Self { model: Arc::new(model), weights, batch_size: batch_size as i64 })
    }

    /// The images of `latents` `[B, channels, height, width]`; with `latents_grad`, their gradient can be followed back.
    pub fn decode(&self, latents: &Tensor, latents_grad: bool) -> Result<Decoded> {
        let (mut images, mut parts) = (Vec::new(), Vec::new());
        for latents in latents.f_split(self.batch_size, 0)? {
            let batch = LatentBatch { latents, latents_grad };
            let (decoded, saved) = passes::forward(&*self.model, &self.units(), &batch, latents_grad)?;
            images.push(decoded);
            if latents_grad {
                parts.push((batch, saved));
            }
        }
        Ok(Decoded { images: Tensor::f_cat(&images, 0)?, parts })
    }

    /// The gradient of the latents from that of the images.
    pub fn follow_back(&self, decoded: Decoded, gradient: &Tensor) -> Result<Tensor> {
        let gradients = gradient.f_split(self.batch_size, 0)?;
        let parts = decoded.parts.into_iter().zip(gradients).map(|((batch, saved), gradient)| {
            let found = passes::input_gradient(&*self.model, &self.units(), &batch, saved, gradient)?;
            Ok(found.expect("the gradient of the latents was asked for"))
        });
        Ok(Tensor::f_cat(&parts.collect::<Result<Vec<_>>>()?, 0)?)
    }

    fn units(&self) -> Vec<&[Tensor]> {
        self.weights.iter().map(Vec::as_slice).collect()
    }
}

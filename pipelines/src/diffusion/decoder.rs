//! Decoder of latents to pixels.

use anyroll_config::{Precision, SamplerConfig};
use anyroll_models::{
    Model, Saved, Unit,
    diffusion::{LatentBatch, Tiles, VaeDecoder, WanVaeDecoder, WanVaeTape},
    hf::{LatentDecoderConfig, LatentDecoderFolder},
    init::whole,
    passes,
};
use tch::{Device, Kind, Tensor};

use crate::Result;

/// Latent frames of a video decoded at a time: the fewest possible, since each gives several frames of
/// pixels.
const LATENTS_AT_A_TIME: i64 = 1;

/// A frozen decoder, replicated on every rank, since it is small compared with the transformer.
#[derive(Debug)]
pub struct ImageDecoder {
    model: Network,
    weights: Vec<Vec<Tensor>>,
    /// Latents in a batch.
    batch_size: i64,
    /// Tiling of larger latents.
    tiles: Option<Tiles>,
    /// Number of first latent frames to decode of each video; later ones do not affect them.
    latent_frames: Option<i64>,
}

#[derive(Debug)]
enum Network {
    Images(VaeDecoder),
    Videos(WanVaeDecoder),
}

/// Images or videos, with the data for the gradient of their latents.
pub struct Decoded {
    /// fp32 `[B, channels, height, width]`, of videos `[B, channels, frames, height, width]`.
    pub images: Tensor,
    parts: Vec<Part>,
}

/// A batch of the latents.
struct Part {
    passes: Passes,
    /// Latent frames that were not decoded.
    left: i64,
}

/// Data for backpropagation to some latents.
struct Passes {
    latents: Tensor,
    /// Mask of pixels that were not clamped, which have a gradient. `None` if nothing is clamped.
    within: Option<Tensor>,
    /// `None` for tiled latents: a tile's forward is recomputed in backward, one tile at a time.
    tape: Option<Tape>,
}

enum Tape {
    Images(LatentBatch, Vec<Saved>),
    Videos(WanVaeTape),
}

impl ImageDecoder {
    /// Reads the weights from `folder`; 16-bit values become bf16, since fp16 overflows in such decoders.
    /// Videos have `frames` frames or fewer, which must be whole latent frames.
    pub fn new(
        folder: &LatentDecoderFolder,
        frames: usize,
        sampler: &SamplerConfig,
        precision: Precision,
        device: Device,
    ) -> Result<Self> {
        let (in_time, zoom) = folder.config().zoom();
        let model = match folder.config() {
            LatentDecoderConfig::Images(config) => Network::Images(VaeDecoder::new(config.clone(), false)?),
            LatentDecoderConfig::Videos(config) => Network::Videos(WanVaeDecoder::new(config.clone())?),
        };
        let frames = sampler.decode_frames.unwrap_or(frames) as i64;
        let patch = model.patch();
        let tiles = sampler.decode_tiles.map(|tiles| Tiles {
            size: tiles.size as i64 / zoom,
            stride: tiles.stride(zoom as usize) as i64 / zoom,
            zoom,
            patch,
        });
        let kind = if precision == Precision::Fp32 { Kind::Float } else { Kind::BFloat16 };
        let mut weights = Vec::with_capacity(model.units().len());
        for unit in model.units() {
            let read = unit.params.iter().map(|spec| whole(folder, spec, kind, device));
            weights.push(read.collect::<anyroll_models::Result<Vec<_>>>()?);
        }
        Ok(Self {
            latent_frames: matches!(model, Network::Videos(_)).then_some((frames - 1) / in_time + 1),
            batch_size: sampler.decode_batch_size as i64,
            model,
            weights,
            tiles,
        })
    }

    /// Decodes `latents` `[B, channels, height, width]` to images, or to videos with frames after the
    /// channels. With `latents_grad`, their gradient can be computed.
    pub fn decode(&self, latents: &Tensor, latents_grad: bool) -> Result<Decoded> {
        let (mut images, mut parts) = (Vec::new(), Vec::new());
        for latents in latents.f_split(self.batch_size, 0)? {
            let frames = self.latent_frames.unwrap_or(0);
            let left = self.latent_frames.map_or(0, |frames| latents.size()[2] - frames);
            let seen = if left > 0 { latents.f_narrow(2, 0, frames)? } else { latents };
            let (decoded, passes) = self.decode_part(seen, latents_grad)?;
            images.push(decoded);
            parts.extend(passes.map(|passes| Part { passes, left }));
        }
        Ok(Decoded { images: Tensor::f_cat(&images, 0)?, parts })
    }

    fn decode_part(&self, latents: Tensor, record: bool) -> Result<(Tensor, Option<Passes>)> {
        let units = self.weights();
        let (pixels, tape) = match self.tiles.filter(|tiles| tiles.divide(&latents)) {
            Some(tiles) => {
                let decode = |tile: &Tensor| Ok(self.model.decode(&units, tile, false)?.0);
                (tiles.decode(&latents, decode)?, None)
            }
            None => self.model.decode(&units, &latents, record)?,
        };
        // Clamped as in diffusers, and so in ROLL.
        let clamps = matches!(self.model, Network::Videos(_));
        let within = (record && clamps).then(|| pixels.f_abs()?.f_le(1.0)).transpose()?;
        let images = if clamps { pixels.f_clamp(-1.0, 1.0)? } else { pixels };
        Ok((images, record.then_some(Passes { latents, within, tape })))
    }

    /// Gradient of the latents from that of the images.
    pub fn follow_back(&self, decoded: Decoded, gradient: &Tensor) -> Result<Tensor> {
        let gradients = gradient.f_split(self.batch_size, 0)?;
        let parts = decoded.parts.into_iter().zip(gradients).map(|(part, gradient)| {
            let found = self.follow_part_back(part.passes, gradient)?;
            Ok(if part.left > 0 { found.f_constant_pad_nd([0, 0, 0, 0, 0, part.left])? } else { found })
        });
        Ok(Tensor::f_cat(&parts.collect::<Result<Vec<_>>>()?, 0)?)
    }

    fn follow_part_back(&self, passes: Passes, gradient: Tensor) -> Result<Tensor> {
        let (units, Passes { latents, within, tape }) = (self.weights(), passes);
        let gradient = within.map_or(Ok(gradient.shallow_clone()), |within| gradient.f_mul(&within))?;
        if let Some(tape) = tape {
            return Ok(self.model.latents_grad(&units, tape, gradient)?);
        }
        let tiles = self.tiles.expect("latents without a tape were decoded in tiles");
        Ok(tiles.latents_grad(&latents, &gradient, |tile, gradient| {
            let (_, tape) = self.model.decode(&units, tile, true)?;
            self.model.latents_grad(&units, tape.expect("it was asked for"), gradient.shallow_clone())
        })?)
    }

    fn weights(&self) -> Vec<&[Tensor]> {
        self.weights.iter().map(Vec::as_slice).collect()
    }
}

impl Network {
    fn units(&self) -> &[Unit] {
        match self {
            Self::Images(model) => model.units(),
            Self::Videos(model) => model.units(),
        }
    }

    /// Pixels per side for one pixel of the last convolution.
    fn patch(&self) -> i64 {
        match self {
            Self::Images(_) => 1,
            Self::Videos(model) => model.config().patch_size,
        }
    }

    /// Decodes some latents; with `record` also returns the data for their gradient.
    fn decode(
        &self,
        units: &[&[Tensor]],
        latents: &Tensor,
        record: bool,
    ) -> anyroll_models::Result<(Tensor, Option<Tape>)> {
        match self {
            Self::Images(model) => {
                let batch = LatentBatch { latents: latents.shallow_clone(), latents_grad: record };
                let (decoded, saved) = passes::forward(model, units, &batch, record)?;
                Ok((decoded, record.then_some(Tape::Images(batch, saved))))
            }
            Self::Videos(model) => {
                let (decoded, tape) = model.decode(units, latents, LATENTS_AT_A_TIME, record)?;
                Ok((decoded, tape.map(Tape::Videos)))
            }
        }
    }

    fn latents_grad(
        &self,
        units: &[&[Tensor]],
        tape: Tape,
        gradient: Tensor,
    ) -> anyroll_models::Result<Tensor> {
        match (self, tape) {
            (Self::Images(model), Tape::Images(batch, saved)) => {
                let found = passes::input_gradient(model, units, &batch, saved, gradient)?;
                Ok(found.expect("the gradient of the latents was asked for"))
            }
            (Self::Videos(model), Tape::Videos(tape)) => model.latents_grad(units, tape, &gradient),
            _ => unreachable!("one network has made all parts"),
        }
    }
}

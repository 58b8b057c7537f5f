//! Frozen networks of image runs, whole on every rank: the decoder of latents and the models that score
//! images.

use anyroll_config::{
    ImageReward, ImageTerm, Precision, RewardDtype, SamplerConfig, ScorerInput, TorchscriptConfig,
};
use anyroll_models::{
    Model, Runs, Unit,
    clip::Clip,
    diffusion::{LatentSize, VaeDecoder, VideoLatentSize, WanVaeDecoder},
    hf::{ClipFolder, LatentDecoderConfig},
};
use anyroll_strategy::{
    ZeroStage,
    plan::{recorded_activations, scoring_activations},
};

use super::images::{file_bytes, frozen_runs};
use crate::Result;

const F32: usize = size_of::<f32>();

/// Approximate memory of tiled decoding, as a multiple of the bytes of all pixels.
const OF_TILES: usize = 5;

/// A decoder of latents.
pub(super) struct Decoder {
    network: Network,
    is_fp32: bool,
    batch_size: usize,
    /// Frames, height and width of the latents decoded at a time, a tile's at most.
    latents: [usize; 3],
    is_tiled: bool,
    /// Frames, height and width of the pixels.
    pixels: [usize; 3],
}

enum Network {
    Images(VaeDecoder),
    Videos(WanVaeDecoder),
}

impl Decoder {
    /// Opens the decoder for `frames` frames and latents of these sides.
    pub(super) fn new(
        config: &LatentDecoderConfig,
        frames: usize,
        [latent_frames, height, width]: [usize; 3],
        sampler: &SamplerConfig,
        precision: Precision,
    ) -> Result<Self> {
        let (in_time, zoom) = config.zoom();
        let (in_time, zoom) = (in_time as usize, zoom as usize);
        let network = match config {
            LatentDecoderConfig::Images(config) => Network::Images(VaeDecoder::new(config.clone(), false)?),
            LatentDecoderConfig::Videos(config) => Network::Videos(WanVaeDecoder::new(config.clone())?),
        };
        let frames = sampler.decode_frames.unwrap_or(frames);
        let side = sampler.decode_tiles.map_or(usize::MAX, |tiles| tiles.size / zoom);
        let latent_frames = latent_frames.min((frames - 1) / in_time + 1);
        Ok(Self {
            network,
            is_fp32: precision == Precision::Fp32,
            batch_size: sampler.decode_batch_size,
            latents: [latent_frames, height.min(side), width.min(side)],
            is_tiled: height.max(width) > side,
            pixels: [frames, height * zoom, width * zoom],
        })
    }

    /// Bytes of the weights.
    pub(super) fn weights(&self) -> usize {
        let units = match &self.network {
            Network::Images(model) => model.units(),
            Network::Videos(model) => model.units(),
        };
        units.iter().map(elements).sum::<usize>() * self.runs(false).dtype.size_bytes()
    }

    /// Frames, height and width of the decoded pixels.
    pub(super) fn pixels(&self) -> [usize; 3] {
        self.pixels
    }

    /// Number of values in an image or a video.
    pub(super) fn values(&self) -> usize {
        const COLOURS: usize = 3;
        COLOURS * self.pixels.iter().product::<usize>()
    }

    fn runs(&self, on_host: bool) -> Runs {
        frozen_runs(self.is_fp32, on_host)
    }

    /// Activations for `count` latents, a batch at a time. `followed` adds those of a backward pass.
    pub(super) fn activations(&self, count: usize, followed: bool, on_host: bool) -> usize {
        let (batch, runs) = (self.batch_size.min(count), self.runs(on_host));
        let [frames, height, width] = self.latents;
        let one = match &self.network {
            Network::Images(model) => {
                let size = LatentSize { images: batch, sides: [height, width] };
                // The weights are not marked as lasting, so blocks save what they read, as at stage 3.
                let passes = || recorded_activations(model, &size, ZeroStage::Zero3.into(), runs);
                match followed {
                    false => scoring_activations(model, &size, runs),
                    true => passes().forward.max(passes().backward),
                }
            }
            Network::Videos(model) => {
                let size = VideoLatentSize { videos: batch, sides: [frames, height, width], part: 1 };
                match followed {
                    false => model.decoding_bytes(&size, runs),
                    true => model.following_bytes(&size, runs),
                }
            }
        };
        one + if self.is_tiled { OF_TILES * batch * self.values() * F32 } else { 0 }
    }
}

/// A model that scores images.
pub(super) enum RewardNetwork {
    /// A CLIP whose image tower is loaded; of a video it sees `frames` frames.
    Clip { clip: Box<Clip>, is_fp32: bool, frames: Option<usize> },
    /// A TorchScript network of the user's.
    Script { bytes: usize, input: ScorerInput },
    /// A reward without a network on the device.
    Host,
}

impl RewardNetwork {
    /// Opens the network of a term of the reward.
    pub(super) fn open(term: &ImageTerm) -> Result<Self> {
        let (path, dtype) = match &term.kind {
            ImageReward::Clip(config) => (&config.path, config.dtype),
            ImageReward::Aesthetic(config) => (&config.clip, config.dtype),
            ImageReward::Torchscript(TorchscriptConfig { path, input, .. }) => {
                return Ok(Self::Script { bytes: file_bytes(path), input: *input });
            }
            ImageReward::Brightness | ImageReward::Lit | ImageReward::Python(_) => return Ok(Self::Host),
        };
        let folder = ClipFolder::open(path).map_err(anyroll_models::Error::from)?;
        let clip = Box::new(Clip::new(folder.config().clone())?);
        Ok(Self::Clip { clip, is_fp32: dtype == RewardDtype::Fp32, frames: term.frames })
    }

    /// Bytes of the weights on the device.
    pub(super) fn weights(&self) -> usize {
        match self {
            Self::Clip { clip, is_fp32, .. } => {
                elements(clip.units()[0]) * frozen_runs(*is_fp32, false).dtype.size_bytes()
            }
            Self::Script { bytes, .. } => *bytes,
            Self::Host => 0,
        }
    }

    /// Returns true if it reads pixels, false if it reads latents.
    pub(super) fn reads_images(&self) -> bool {
        !matches!(self, Self::Script { input: ScorerInput::Latents, .. })
    }

    /// Activations for `count` images or videos of these sides, with latents of `latent_bytes`.
    pub(super) fn activations(
        &self,
        count: usize,
        [frames, height, width]: [usize; 3],
        latents: usize,
        followed: bool,
        on_host: bool,
    ) -> usize {
        let pixels = |frames: usize| 3 * count * frames * height * width * F32;
        match self {
            Self::Clip { clip, is_fp32, frames: seen } => {
                let seen = seen.unwrap_or(frames).min(frames);
                let runs = frozen_runs(*is_fp32, on_host);
                // The frames scaled to 0..1, and their clamped copy.
                3 * pixels(seen) + clip.image_bytes(count * seen, [height, width], followed, runs)
            }
            Self::Script { input: ScorerInput::Images, .. } => 2 * pixels(frames),
            Self::Script { input: ScorerInput::Latents, .. } => latents,
            Self::Host => 0,
        }
    }
}

fn elements(unit: &Unit) -> usize {
    unit.params.iter().map(|param| param.elements()).sum()
}

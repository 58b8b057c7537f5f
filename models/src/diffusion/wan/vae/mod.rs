//! Decoder from latents to videos: diffusers' `AutoencoderKLWan`, in the variants of Wan 2.1 and Wan 2.2's
//! 5B, with the same weight names.
//!
//! Its convolutions are causal: they see a frame and the two frames before it. So a video is decoded in
//! parts, each with the last two input frames of every convolution in the part before (`frame_cache`). Up to
//! rounding, this equals decoding everything at once, and needs the memory of one part.
//!
//! The gradient of the latents is computed part by part as well: the cached frames have a gradient, which is
//! added in the part before. Cached frames are kept only for about every sqrt(n)-th of n parts. Those between
//! are recomputed, as are the inputs of a part's layers and then, layer by layer, libtorch's graph. So
//! backward takes three more forward passes, and no more memory than these.

mod config;
mod footprint;
mod frame_cache;
mod gradient;
mod layers;

use tch::Tensor;

pub use config::WanVaeConfig;
pub use footprint::VideoLatentSize;
pub use gradient::WanVaeTape;

use crate::Result;
use crate::diffusion::layers::Params;
use crate::footprint::Memo;
use crate::model::{Init, Unit, Weights};
use frame_cache::FrameCache;
use layers::{Layer, Repeat, cube};

/// The decoder. It holds no weights.
#[derive(Debug)]
pub struct WanVaeDecoder {
    config: WanVaeConfig,
    units: Vec<Unit>,
    layers: Vec<Layer>,
    measured: Memo<usize>,
}

impl WanVaeDecoder {
    /// Lays out a decoder with frozen units.
    ///
    /// # Errors
    /// [`Error::Config`](crate::Error::Config) for invalid sizes.
    pub fn new(config: WanVaeConfig) -> Result<WanVaeDecoder> {
        config.validate()?;
        let mut blocks = Blocks::default();
        let channels: Vec<i64> = config.channels().collect();
        blocks.input(&config, channels[0]);
        blocks.residual("decoder.mid_block.resnets.0", channels[0], channels[0]);
        blocks.attention("decoder.mid_block.attentions.0", channels[0]);
        blocks.residual("decoder.mid_block.resnets.1", channels[0], channels[0]);
        let mut before = channels[0];
        let frames: Vec<i64> = config.frames_of_each().collect();
        for (index, &own) in channels.iter().enumerate() {
            let name = format!("decoder.up_blocks.{index}");
            let doubled = frames.get(index).copied();
            match doubled.filter(|_| config.is_residual) {
                Some(frames) => blocks.beside(&name, before, own, config.num_res_blocks, frames),
                None => {
                    for layer in 0..=config.num_res_blocks {
                        let before = if layer == 0 { before } else { own };
                        blocks.residual(&format!("{name}.resnets.{layer}"), before, own);
                    }
                    if let Some(frames) = doubled {
                        blocks.double(&format!("{name}.upsamplers.0"), own, frames > 1);
                    }
                }
            }
            before = if config.is_residual || doubled.is_none() { own } else { own / 2 };
        }
        blocks.output(&config, before);
        let Blocks { units, layers } = blocks;
        Ok(WanVaeDecoder { config, units, layers, measured: Memo::default() })
    }

    /// Returns the shape.
    pub fn config(&self) -> &WanVaeConfig {
        &self.config
    }

    /// Returns the parameters, one unit per layer.
    pub fn units(&self) -> &[Unit] {
        &self.units
    }

    /// Decodes `latents` as in a diffusion model, fp32 `[B, z_dim, frames, height, width]`, `part` of their
    /// frames at a time, at least one. With `record`, also returns the state that their gradient needs.
    /// `weights` has a list for each unit. Videos are fp32 `[B, channels, frames, height, width]` with
    /// natural values from -1 to 1. The caller clips values outside, like diffusers and ROLL do, since tiles
    /// are blended before.
    ///
    /// # Errors
    /// libtorch's.
    pub fn decode(
        &self,
        weights: &[&[Tensor]],
        latents: &Tensor,
        part: i64,
        record: bool,
    ) -> Result<(Tensor, Option<WanVaeTape>)> {
        let parts = latents.f_detach()?.f_split(part, 2)?;
        let run_length = (parts.len() as f64).sqrt().ceil() as usize;
        let (mut videos, mut seen, mut kept) = (Vec::new(), Vec::new(), Vec::new());
        for (number, part) in parts.iter().enumerate() {
            if record && number % run_length == 0 {
                kept.push(seen.iter().map(Tensor::shallow_clone).collect());
            }
            let (frames, after) = self.run(weights, part, &seen)?;
            videos.push(frames);
            seen = after;
        }
        let tape = record.then_some(WanVaeTape { parts, seen: kept, run_length });
        Ok((Tensor::f_cat(&videos, 2)?, tape))
    }

    /// Decodes latents after those whose frames the convolutions have `seen`. Returns the frames, and the
    /// convolutions' new cached frames.
    fn run(&self, weights: &[&[Tensor]], latents: &Tensor, seen: &[Tensor]) -> Result<(Tensor, Vec<Tensor>)> {
        let (mut x, mut cache) = (self.first_input(weights, latents)?, FrameCache::new(seen));
        for (layer, unit) in self.layers.iter().zip(weights) {
            x = layer.run(&Weights::new(&[unit]), &x, &mut cache)?;
        }
        Ok((x, cache.into_kept()))
    }

    /// Undoes the encoder's normalization of latents, in the weights' dtype.
    fn first_input(&self, weights: &[&[Tensor]], latents: &Tensor) -> Result<Tensor> {
        let WanVaeConfig { latents_mean, latents_std, .. } = &self.config;
        let scaled = latents.f_mul(&of_channels(latents_std, latents)?)?;
        Ok(scaled.f_add(&of_channels(latents_mean, latents)?)?.f_to_kind(weights[0][0].kind())?)
    }
}

/// Returns one number per channel, in a shape that broadcasts to `latents`.
fn of_channels(values: &[f64], latents: &Tensor) -> Result<Tensor> {
    let values = Tensor::f_from_slice(values)?.f_to_kind(latents.kind())?;
    Ok(values.f_view([1, -1, 1, 1, 1])?.f_to_device(latents.device())?)
}

/// Collects a decoder's layers.
#[derive(Default)]
struct Blocks {
    units: Vec<Unit>,
    layers: Vec<Layer>,
}

impl Blocks {
    fn add(&mut self, name: &str, params: Params, layer: Layer) {
        self.units.push(Unit { trainable: false, ..params.into_unit(name) });
        self.layers.push(layer);
    }

    fn input(&mut self, config: &WanVaeConfig, channels: i64) {
        let (mut params, latents) = (Params::default(), config.z_dim);
        let post_quant = params.convolution("post_quant_conv", &[latents, latents, 1, 1, 1]);
        let conv = cube(&mut params, "decoder.conv_in", channels, latents);
        self.add("decoder.conv_in", params, Layer::Input { post_quant, conv });
    }

    fn residual(&mut self, name: &str, before: i64, own: i64) {
        let mut params = Params::default();
        let layer = residual(&mut params, name, before, own);
        self.add(name, params, layer);
    }

    fn attention(&mut self, name: &str, channels: i64) {
        let mut params = Params::default();
        let norm = gamma(&mut params, &format!("{name}.norm"), &[channels, 1, 1]);
        let qkv = params.convolution(&format!("{name}.to_qkv"), &[3 * channels, channels, 1, 1]);
        let out = params.convolution(&format!("{name}.proj"), &[channels, channels, 1, 1]);
        self.add(name, params, Layer::Attention { norm, qkv, out });
    }

    fn double(&mut self, name: &str, channels: i64, in_time: bool) {
        let mut params = Params::default();
        let layer = double(&mut params, name, [channels, channels / 2], in_time);
        self.add(name, params, layer);
    }

    /// Adds residual layers and an upsampling layer that gives `frames` frames for each, with a shortcut of
    /// their input.
    fn beside(&mut self, name: &str, before: i64, own: i64, residuals: usize, frames: i64) {
        let mut params = Params::default();
        let mut layers = Vec::with_capacity(residuals + 2);
        for layer in 0..=residuals {
            let before = if layer == 0 { before } else { own };
            layers.push(residual(&mut params, &format!("{name}.resnets.{layer}"), before, own));
        }
        layers.push(double(&mut params, &format!("{name}.upsampler"), [own, own], frames > 1));
        self.add(name, params, Layer::Beside { layers, repeat: Repeat { channels: own, frames } });
    }

    fn output(&mut self, config: &WanVaeConfig, channels: i64) {
        let mut params = Params::default();
        let norm = gamma(&mut params, "decoder.norm_out", &[channels, 1, 1, 1]);
        let conv = cube(&mut params, "decoder.conv_out", config.out_channels, channels);
        self.add("decoder.conv_out", params, Layer::Output { norm, conv, patch_size: config.patch_size });
    }
}

fn residual(params: &mut Params, name: &str, before: i64, own: i64) -> Layer {
    Layer::Residual {
        norm1: gamma(params, &format!("{name}.norm1"), &[before, 1, 1, 1]),
        conv1: cube(params, &format!("{name}.conv1"), own, before),
        norm2: gamma(params, &format!("{name}.norm2"), &[own, 1, 1, 1]),
        conv2: cube(params, &format!("{name}.conv2"), own, own),
        shortcut: (before != own)
            .then(|| params.convolution(&format!("{name}.conv_shortcut"), &[own, before, 1, 1, 1])),
    }
}

/// Adds an upsampling layer from `before` to `own` channels that doubles height and width.
fn double(params: &mut Params, name: &str, [before, own]: [i64; 2], in_time: bool) -> Layer {
    let in_time =
        in_time.then(|| params.convolution(&format!("{name}.time_conv"), &[2 * before, before, 3, 1, 1]));
    let conv = params.convolution(&format!("{name}.resample.1"), &[own, before, 3, 3]);
    Layer::Double { in_time, conv }
}

/// Adds the scale of a norm over channels.
fn gamma(params: &mut Params, name: &str, shape: &[i64]) -> usize {
    params.table(&format!("{name}.gamma"), shape, Init::Ones)
}

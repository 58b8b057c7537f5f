//! From latents to videos: the decoder of diffusers' `AutoencoderKLWan`, as Wan 2.1 has it or Wan 2.2's 5B, whose names the
//! weights have.
//!
//! Its convolutions are causal: they see a frame and the two before it. So a video is decoded a part at a time, each
//! with the last two frames that every convolution saw of the part before (`past`), which is the same as all at once, to
//! rounding, and needs a part's memory. The gradient of the latents goes back part by part as well: what convolutions
//! remember has a gradient of its own, which the part before takes on. Of what they remember only that of about every
//! sqrt(n)-th of n parts is kept; that of those between is made again, as are the inputs of a part's layers and then, layer
//! by layer, libtorch's graph. So following back takes three more forward passes, and no more memory than these.

mod config;
mod footprint;
mod gradient;
mod layers;
mod past;

use tch::Tensor;

pub use config::WanVaeConfig;
pub use footprint::VideoLatentSize;
pub use gradient::WanVaeTape;

use crate::Result;
use crate::diffusion::layers::Params;
use crate::model::{Init, Unit, Weights};
use layers::{Layer, Repeat, cube};
use past::Past;

/// The decoder. It holds no weights.
#[derive(Debug)]
pub struct WanVaeDecoder {
    config: WanVaeConfig,
    units: Vec<Unit>,
    layers: Vec<Layer>,
}

impl WanVaeDecoder {
    /// Lays out a decoder, its units frozen.
    ///
    /// # Errors
    /// [`Error::Config`](crate::Error::Config) for sizes that make no model.
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
        Ok(WanVaeDecoder { config, units: blocks.units, layers: blocks.layers })
    }

    /// The shape that it was made from.
    pub fn config(&self) -> &WanVaeConfig {
        &self.config
    }

    /// Its parameters, a unit for each layer.
    pub fn units(&self) -> &[Unit] {
        &self.units
    }

    /// The videos of `latents`, as a diffusion model has them, fp32 `[B, z_dim, frames, height, width]`, decoded `part` of
    /// their frames at a time, at least one; and with `record` what their gradient needs. `weights` has a list for each unit.
    /// Videos are fp32 `[B, channels, frames, height, width]`, -1 to 1 where they are natural. What is beyond is
    /// for the caller to cut off, as diffusers, and so ROLL, does: tiles are blended before.
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

    /// The frames of some latents, after those of which the convolutions have `seen` the last; and what they have then.
    fn run(&self, weights: &[&[Tensor]], latents: &Tensor, seen: &[Tensor]) -> Result<(Tensor, Vec<Tensor>)> {
        let (mut x, mut past) = (self.first_input(weights, latents)?, Past::new(seen));
        for (layer, unit) in self.layers.iter().zip(weights) {
            x = layer.run(&Weights::new(&[unit]), &x, &mut past)?;
        }
        Ok((x, past.into_kept()))
    }

    /// Latents as the encoder made them, in the weights' dtype.
    fn first_input(&self, weights: &[&[Tensor]], latents: &Tensor) -> Result<Tensor> {
        let WanVaeConfig { latents_mean, latents_std, .. } = &self.config;
        let scaled = latents.f_mul(&of_channels(latents_std, latents)?)?;
        Ok(scaled.f_add(&of_channels(latents_mean, latents)?)?.f_to_kind(weights[0][0].kind())?)
    }
}

/// A number for each channel of `latents`, to be put beside them.
fn of_channels(values: &[f64], latents: &Tensor) -> Result<Tensor> {
    let values = Tensor::f_from_slice(values)?.f_to_kind(latents.kind())?;
    Ok(values.f_view([1, -1, 1, 1, 1])?.f_to_device(latents.device())?)
}

/// Lists a decoder's layers.
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

    /// Residual layers and one that doubles, `frames` frames of each, with what they read beside them.
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

/// From channels `before` to channels `own`, of twice the height and the width.
fn double(params: &mut Params, name: &str, [before, own]: [i64; 2], in_time: bool) -> Layer {
    let in_time =
        in_time.then(|| params.convolution(&format!("{name}.time_conv"), &[2 * before, before, 3, 1, 1]));
    let conv = params.convolution(&format!("{name}.resample.1"), &[own, before, 3, 3]);
    Layer::Double { in_time, conv }
}

/// The scale of a norm of channels.
fn gamma(params: &mut Params, name: &str, shape: &[i64]) -> usize {
    params.table(&format!("{name}.gamma"), shape, Init::Ones)
}

//! Decoder from latents to pixels: diffusers' `AutoencoderKL`, whose weight names it uses.
//!
//! Each convolution, residual block, attention and upsampling is a block with its own unit. Blocks pass on
//! `[B, channels, height, width]`. Backward is libtorch's and also computes the gradient of the latents, so
//! that a reward on pixels can be differentiated through the decoder.

use anyroll_backends::ops;
use tch::{Kind, Tensor};

use super::layers::{Linear, Params};
use crate::Result;
use crate::autograd::{AutogradModel, Layout};
use crate::error::check_config;
use crate::footprint::{BlockBytes, Footprint, Runs};
use crate::measured::Paper;
use crate::model::{Unit, Weights};

/// The shape of a [`VaeDecoder`], with the field names of diffusers' `config.json`.
#[derive(Clone, Debug, PartialEq)]
pub struct VaeConfig {
    /// Channels of the latents.
    pub latent_channels: i64,
    /// Channels of the images.
    pub out_channels: i64,
    /// Channels at each resolution, the images' first; multiples of `norm_num_groups`.
    pub block_out_channels: Vec<i64>,
    /// Residual blocks per resolution, minus one.
    pub layers_per_block: usize,
    /// Groups of the norms.
    pub norm_num_groups: i64,
    /// Factor that the encoder's latents were multiplied by.
    pub scaling_factor: f64,
    /// Offset that was subtracted from them before.
    pub shift_factor: f64,
    /// True if latents first pass through a convolution with a 1x1 kernel.
    pub use_post_quant_conv: bool,
}

/// Latents on a device.
#[derive(Debug)]
pub struct LatentBatch {
    /// Latents as in a diffusion model, scaled and shifted: fp32 `[B, latent_channels, height, width]`.
    pub latents: Tensor,
    /// True if backward should compute their gradient.
    pub latents_grad: bool,
}

/// The decoder. It holds no weights.
#[derive(Debug)]
pub struct VaeDecoder {
    config: VaeConfig,
    layout: Layout,
    layers: Vec<Layer>,
}

/// A block.
#[derive(Clone, Copy, Debug)]
enum Layer {
    Input { post_quant: Option<Linear>, conv: Linear },
    Residual { norm1: Linear, conv1: Linear, norm2: Linear, conv2: Linear, shortcut: Option<Linear> },
    Attention { norm: Linear, q: Linear, k: Linear, v: Linear, out: Linear },
    Double { conv: Linear },
    Output { norm: Linear, conv: Linear },
}

impl VaeDecoder {
    /// Lays out a decoder with `trainable` or frozen units.
    ///
    /// # Errors
    /// [`Error::Config`](crate::Error::Config) for invalid sizes.
    pub fn new(config: VaeConfig, trainable: bool) -> Result<VaeDecoder> {
        config.validate()?;
        let mut blocks = Blocks { units: Vec::new(), layers: Vec::new(), trainable };
        let channels: Vec<i64> = config.block_out_channels.iter().rev().copied().collect();
        blocks.input(&config, channels[0]);
        blocks.residual("decoder.mid_block.resnets.0", channels[0], channels[0]);
        blocks.attention("decoder.mid_block.attentions.0", channels[0]);
        blocks.residual("decoder.mid_block.resnets.1", channels[0], channels[0]);
        let mut before = channels[0];
        for (index, &own) in channels.iter().enumerate() {
            let name = format!("decoder.up_blocks.{index}");
            for layer in 0..=config.layers_per_block {
                blocks.residual(&format!("{name}.resnets.{layer}"), before, own);
                before = own;
            }
            if index + 1 < channels.len() {
                blocks.double(&format!("{name}.upsamplers.0.conv"), own);
            }
        }
        blocks.output(&config, before);
        let Blocks { units, layers, .. } = blocks;
        Ok(VaeDecoder { layout: Layout::new(units), config, layers })
    }

    /// Returns the shape.
    pub fn config(&self) -> &VaeConfig {
        &self.config
    }
}

/// Outputs images with natural values from -1 to 1: fp32 `[B, out_channels, height, width]`. Each side is
/// `2^(resolutions - 1)` times that of the latents.
impl AutogradModel for VaeDecoder {
    type Batch = LatentBatch;

    fn layout(&self) -> &Layout {
        &self.layout
    }

    fn input<'a>(&self, batch: &'a LatentBatch) -> (&'a Tensor, bool) {
        (&batch.latents, batch.latents_grad)
    }

    fn run(&self, block: usize, weights: &Weights, x: &Tensor, _: &LatentBatch) -> Result<Tensor> {
        let groups = self.config.norm_num_groups;
        let normed = |norm: Linear, x: &Tensor| norm.group_norm(weights, x, groups);
        match self.layers[block] {
            Layer::Input { post_quant, conv } => {
                let unscaled = x.f_div_scalar(self.config.scaling_factor)?;
                let latents =
                    unscaled.f_add_scalar(self.config.shift_factor)?.f_to_kind(weights.get(0, 0).kind())?;
                let latents = post_quant.map_or(Ok(latents.shallow_clone()), |post_quant| {
                    post_quant.convolve(weights, &latents, 0)
                })?;
                conv.convolve(weights, &latents, 1)
            }
            Layer::Residual { norm1, conv1, norm2, conv2, shortcut } => {
                let inner = conv1.convolve(weights, &normed(norm1, x)?.f_silu()?, 1)?;
                let inner = conv2.convolve(weights, &normed(norm2, &inner)?.f_silu()?, 1)?;
                let x =
                    shortcut.map_or(Ok(x.shallow_clone()), |shortcut| shortcut.convolve(weights, x, 0))?;
                Ok(x.f_add(&inner)?)
            }
            Layer::Attention { norm, q, k, v, out } => {
                let pixels = normed(norm, x)?.f_flatten(2, -1)?.f_transpose(1, 2)?.f_contiguous()?;
                // With a separate head dimension; with three dimensions libtorch would compute all scores.
                let one_head =
                    |of: Linear| Ok::<_, crate::Error>(of.forward(weights, &pixels)?.f_unsqueeze(1)?);
                let attended = ops::attend(&one_head(q)?, &one_head(k)?, &one_head(v)?, false)?;
                let attended = out.forward(weights, &attended.f_squeeze_dim(1)?)?;
                let attended = attended.f_transpose(1, 2)?.f_reshape(x.size())?;
                Ok(x.f_add(&attended)?)
            }
            Layer::Double { conv } => {
                let size = x.size();
                let doubled = x.f_upsample_nearest2d([size[2] * 2, size[3] * 2], None, None)?;
                conv.convolve(weights, &doubled, 1)
            }
            Layer::Output { norm, conv } => {
                Ok(conv.convolve(weights, &normed(norm, x)?.f_silu()?, 1)?.f_to_kind(Kind::Float)?)
            }
        }
    }
}

/// Size of a [`LatentBatch`], with or without the gradient of its latents.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct LatentSize {
    /// Images B.
    pub images: usize,
    /// Height and width of the latents.
    pub sides: [usize; 2],
}

/// Backward includes the gradient of the latents.
impl Footprint for VaeDecoder {
    type Size = LatentSize;

    fn block_bytes(&self, block: usize, size: &LatentSize, runs: Runs, weights_last: bool) -> BlockBytes {
        let asked = (block, size, runs, weights_last);
        self.layout.measured.once(asked, || self.measure(block, size, runs, weights_last))
    }
}

impl VaeDecoder {
    fn measure(&self, block: usize, size: &LatentSize, runs: Runs, weights_last: bool) -> Result<BlockBytes> {
        let paper = Paper::new(runs)?;
        let latents = [size.images, self.config.latent_channels as usize, size.sides[0], size.sides[1]];
        let batch = LatentBatch { latents: paper.of_kind(&latents, Kind::Float)?, latents_grad: true };
        let run = |block: usize, weights: &Weights, x: &Tensor| self.run(block, weights, x, &batch);
        paper.block_bytes(self, block, (&batch.latents, true), weights_last, run)
    }
}

impl VaeConfig {
    /// Returns the ratio of an image's side to its latents' side.
    pub fn zoom(&self) -> i64 {
        1 << (self.block_out_channels.len() - 1)
    }

    /// Checks that the sizes are valid.
    ///
    /// # Errors
    /// [`Error::Config`](crate::Error::Config) with the field and the valid values.
    pub fn validate(&self) -> Result<()> {
        let sizes = [
            ("latent_channels", self.latent_channels),
            ("out_channels", self.out_channels),
            ("norm_num_groups", self.norm_num_groups),
        ];
        for (field, size) in sizes {
            check_config(size > 0, field, || format!("is {size}, must be at least 1"))?;
        }
        let groups = self.norm_num_groups;
        let fits = |&channels: &i64| channels > 0 && channels % groups == 0;
        let channels = &self.block_out_channels;
        check_config(!channels.is_empty() && channels.iter().all(fits), "block_out_channels", || {
            format!("are {channels:?}, must be multiples of norm_num_groups = {groups}, at least one")
        })?;
        check_config(
            self.scaling_factor != 0.0 && self.scaling_factor.is_finite(),
            "scaling_factor",
            || format!("is {}, must be a number other than 0", self.scaling_factor),
        )?;
        check_config(self.shift_factor.is_finite(), "shift_factor", || {
            format!("is {}, must be a number", self.shift_factor)
        })
    }
}

/// Collects a decoder's blocks.
struct Blocks {
    units: Vec<Unit>,
    layers: Vec<Layer>,
    trainable: bool,
}

impl Blocks {
    fn add(&mut self, name: &str, params: Params, layer: Layer) {
        self.units.push(Unit { trainable: self.trainable, ..params.into_unit(name) });
        self.layers.push(layer);
    }

    fn input(&mut self, config: &VaeConfig, channels: i64) {
        let (mut params, latents) = (Params::default(), config.latent_channels);
        let post_quant = config
            .use_post_quant_conv
            .then(|| params.convolution("post_quant_conv", &[latents, latents, 1, 1]));
        let conv = params.convolution("decoder.conv_in", &[channels, latents, 3, 3]);
        self.add("decoder.conv_in", params, Layer::Input { post_quant, conv });
    }

    fn residual(&mut self, name: &str, before: i64, own: i64) {
        let mut params = Params::default();
        let layer = Layer::Residual {
            norm1: params.group_norm(&format!("{name}.norm1"), before),
            conv1: params.convolution(&format!("{name}.conv1"), &[own, before, 3, 3]),
            norm2: params.group_norm(&format!("{name}.norm2"), own),
            conv2: params.convolution(&format!("{name}.conv2"), &[own, own, 3, 3]),
            shortcut: (before != own)
                .then(|| params.convolution(&format!("{name}.conv_shortcut"), &[own, before, 1, 1])),
        };
        self.add(name, params, layer);
    }

    fn attention(&mut self, name: &str, channels: i64) {
        let mut params = Params::default();
        let norm = params.group_norm(&format!("{name}.group_norm"), channels);
        let [q, k, v, out] = ["to_q", "to_k", "to_v", "to_out.0"]
            .map(|which| params.linear(&format!("{name}.{which}"), channels, channels));
        self.add(name, params, Layer::Attention { norm, q, k, v, out });
    }

    fn double(&mut self, name: &str, channels: i64) {
        let mut params = Params::default();
        let conv = params.convolution(name, &[channels, channels, 3, 3]);
        self.add(name, params, Layer::Double { conv });
    }

    fn output(&mut self, config: &VaeConfig, channels: i64) {
        let mut params = Params::default();
        let norm = params.group_norm("decoder.conv_norm_out", channels);
        let conv = params.convolution("decoder.conv_out", &[config.out_channels, channels, 3, 3]);
        self.add("decoder.conv_out", params, Layer::Output { norm, conv });
    }
}

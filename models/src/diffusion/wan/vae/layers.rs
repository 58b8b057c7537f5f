//! Layers of the video decoder.

use anyroll_backends::ops;
use tch::{Kind, Tensor};

use super::frame_cache::FrameCache;
use crate::Result;
use crate::diffusion::layers::{Linear, Params};
use crate::model::Weights;

/// A layer of the decoder. Layers pass on `[B, channels, frames, height, width]`.
#[derive(Clone, Debug)]
pub(super) enum Layer {
    Input {
        post_quant: Linear,
        conv: Linear,
    },
    Residual {
        norm1: usize,
        conv1: Linear,
        norm2: usize,
        conv2: Linear,
        shortcut: Option<Linear>,
    },
    Attention {
        norm: usize,
        qkv: Linear,
        out: Linear,
    },
    Double {
        in_time: Option<Linear>,
        conv: Linear,
    },
    /// Upsampling layers with a shortcut that repeats their input. All read the same unit.
    Beside {
        layers: Vec<Layer>,
        repeat: Repeat,
    },
    /// Each pixel of the last convolution becomes a square of `patch_size` pixels.
    Output {
        norm: usize,
        conv: Linear,
        patch_size: i64,
    },
}

/// Shortcut that changes the number of channels and doubles height and width.
#[derive(Clone, Copy, Debug)]
pub(super) struct Repeat {
    pub channels: i64,
    /// Output frames per input frame, except for a video's first frame, which stays single.
    pub frames: i64,
}

/// Kernel size: three pixels in each direction, and three frames, the own one and two before it.
const CUBE: [i64; 3] = [3, 3, 3];

/// Adds a convolution over frames.
pub(super) fn cube(params: &mut Params, name: &str, own: i64, before: i64) -> Linear {
    params.convolution(name, &[&[own, before], &CUBE[..]].concat())
}

impl Layer {
    /// Returns the layer's output for the frames that follow those of `cache`.
    pub(super) fn run(&self, weights: &Weights, x: &Tensor, cache: &mut FrameCache) -> Result<Tensor> {
        let mut causal = |conv: Linear, x: &Tensor| {
            let x = cache.before(x)?;
            conv.convolve_frames(weights, &x, [0, 1, 1])
        };
        let lit = |norm: usize, x: &Tensor| Ok::<_, crate::Error>(rms_norm(weights, norm, x)?.f_silu()?);
        match *self {
            Layer::Input { post_quant, conv } => causal(conv, &post_quant.patches(weights, x)?),
            Layer::Residual { norm1, conv1, norm2, conv2, shortcut } => {
                let inner = causal(conv1, &lit(norm1, x)?)?;
                let inner = causal(conv2, &lit(norm2, &inner)?)?;
                let x = shortcut.map_or(Ok(x.shallow_clone()), |shortcut| shortcut.patches(weights, x))?;
                Ok(x.f_add(&inner)?)
            }
            Layer::Attention { norm, qkv, out } => attend(weights, x, norm, qkv, out),
            Layer::Double { in_time, conv } => {
                let x = match in_time {
                    Some(in_time) => double_frames(weights, x, in_time, cache)?,
                    None => x.shallow_clone(),
                };
                of_each_frame(&x, |frames| {
                    let size = frames.size();
                    let doubled = frames.f_upsample_nearest2d([size[2] * 2, size[3] * 2], None, None)?;
                    conv.convolve(weights, &doubled, 1)
                })
            }
            Layer::Beside { ref layers, repeat } => {
                let beside = repeat.run(x, cache.is_beginning())?;
                let mut inner = x.shallow_clone();
                for layer in layers {
                    inner = layer.run(weights, &inner, cache)?;
                }
                Ok(inner.f_add(&beside)?)
            }
            Layer::Output { norm, conv, patch_size } => {
                let squares = causal(conv, &lit(norm, x)?)?.f_to_kind(Kind::Float)?;
                apart(&squares, patch_size)
            }
        }
    }
}

impl Repeat {
    /// Repeats every channel until the copies fill the frames and squares of the output channels in order.
    fn run(self, x: &Tensor, is_beginning: bool) -> Result<Tensor> {
        const SIDE: i64 = 2;
        let Repeat { channels, frames } = self;
        let &[batch, own, in_time, height, width] = &x.size()[..] else {
            unreachable!("a video has five dimensions")
        };
        let filled = x.f_repeat_interleave_self_int(channels * frames * SIDE * SIDE / own, 1, None)?;
        let split = filled.f_view(&[batch, channels, frames, SIDE, SIDE, in_time, height, width][..])?;
        let placed = split.f_permute([0, 1, 5, 2, 6, 3, 7, 4])?;
        let all = placed.f_reshape([batch, channels, in_time * frames, height * SIDE, width * SIDE])?;
        let left_out = if is_beginning { frames - 1 } else { 0 };
        Ok(all.f_narrow(2, left_out, in_time * frames - left_out)?)
    }
}

/// Turns channels that hold the pixels of squares, column by column, into these pixels.
fn apart(x: &Tensor, side: i64) -> Result<Tensor> {
    let &[batch, channels, frames, height, width] = &x.size()[..] else {
        unreachable!("a video has five dimensions")
    };
    let channels = channels / (side * side);
    let split = x.f_view(&[batch, channels, side, side, frames, height, width][..])?;
    let placed = split.f_permute([0, 1, 4, 5, 3, 6, 2])?;
    Ok(placed.f_reshape([batch, channels, frames, height * side, width * side])?)
}

/// Scales each pixel's channels to a mean square of 1 and by the weights; computed in fp32.
fn rms_norm(weights: &Weights, norm: usize, x: &Tensor) -> Result<Tensor> {
    const LEAST: f64 = 1e-12;
    let (scale, channels) = (weights.get(0, norm), x.size()[1]);
    let wide = x.f_to_kind(Kind::Float)?;
    let lengths = wide.f_norm_scalaropt_dim(2.0, [1i64].as_slice(), true)?.f_clamp_min(LEAST)?;
    let normed = wide.f_div(&lengths)?.f_to_kind(x.kind())?;
    Ok(normed.f_mul(&scale.f_mul_scalar((channels as f64).sqrt())?)?)
}

/// Applies `function` to the frames `[B * frames, channels, height, width]`. Returns a video.
fn of_each_frame(x: &Tensor, function: impl FnOnce(&Tensor) -> Result<Tensor>) -> Result<Tensor> {
    let size = x.size();
    let frames = x.f_transpose(1, 2)?.f_flatten(0, 1)?;
    Ok(function(&frames)?.f_unflatten(0, [size[0], size[2]])?.f_transpose(1, 2)?)
}

/// Runs attention among the pixels of each frame.
fn attend(weights: &Weights, x: &Tensor, norm: usize, qkv: Linear, out: Linear) -> Result<Tensor> {
    of_each_frame(x, |frames| {
        let normed = rms_norm(weights, norm, frames)?;
        // With one head: `[B * frames, 1, pixels, channels]` each.
        let pixels =
            qkv.convolve(weights, &normed, 0)?.f_flatten(2, -1)?.f_transpose(1, 2)?.f_unsqueeze(1)?;
        let parts = pixels.f_chunk(3, -1)?;
        let attended = ops::attend(&parts[0], &parts[1], &parts[2], false)?;
        let attended = attended.f_squeeze_dim(1)?.f_transpose(1, 2)?.f_reshape(frames.size())?;
        Ok(frames.f_add(&out.convolve(weights, &attended, 0)?)?)
    })
}

/// Doubles the frames, except a video's first one. It stays single, and later frames do not see it here.
fn double_frames(weights: &Weights, x: &Tensor, in_time: Linear, cache: &mut FrameCache) -> Result<Tensor> {
    let alone = i64::from(cache.is_beginning());
    let (first, rest) = (x.f_narrow(2, 0, alone)?, x.f_narrow(2, alone, x.size()[2] - alone)?);
    let seen = cache.before(&rest)?;
    let &[batch, channels, frames, height, width] = &rest.size()[..] else {
        unreachable!("a video has five dimensions")
    };
    if frames == 0 {
        return Ok(first);
    }
    let doubled = in_time.convolve_frames(weights, &seen, [0, 0, 0])?;
    let doubled = doubled.f_view([batch, 2, channels, frames, height, width])?;
    let doubled = doubled.f_permute([0, 2, 3, 1, 4, 5])?.f_flatten(2, 3)?;
    Ok(Tensor::f_cat(&[first, doubled], 2)?)
}

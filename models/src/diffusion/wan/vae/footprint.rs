//! Memory of decoding a video and of its backward: traces of `decode` and `latents_grad`.

use super::WanVaeDecoder;
use super::layers::Layer;
use crate::diffusion::layers::Linear;
use crate::footprint::Runs;
use crate::memory_trace::{F32, MemoryTrace, TracedTensor, TracedWeights};

/// Size of latents of videos.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct VideoLatentSize {
    /// Videos B.
    pub videos: usize,
    /// Frames, height and width of the latents.
    pub sides: [usize; 3],
    /// Frames of latents that are decoded at a time.
    pub part: usize,
}

/// The last two input frames of each convolution.
struct FrameCache<'a> {
    seen: &'a [TracedTensor],
    kept: Vec<TracedTensor>,
}

impl FrameCache<'_> {
    fn before(&mut self, x: &TracedTensor) -> TracedTensor {
        let mut size = x.size.clone();
        size[2] = 2;
        let seen = match self.seen.get(self.kept.len()) {
            Some(seen) => seen.clone(),
            None => x.on.of(&size, x.element),
        };
        let all = TracedTensor::cat(&[&seen, x], 2);
        self.kept.push(all.narrow(2, 2).copied());
        all
    }
}

impl WanVaeDecoder {
    /// Returns the peak memory of decoding in bytes, including the videos.
    pub fn decoding_bytes(&self, size: &VideoLatentSize, runs: Runs) -> usize {
        let on = MemoryTrace::new(runs);
        let _videos = self.trace_decoding(&on, size, None);
        on.peak()
    }

    /// Returns the peak memory of decoding with a tape and of its backward, in bytes. Includes the videos and
    /// their gradient, which the caller holds.
    pub fn following_bytes(&self, size: &VideoLatentSize, runs: Runs) -> usize {
        let (on, mut kept) = (MemoryTrace::new(runs), Vec::new());
        let videos = self.trace_decoding(&on, size, Some(&mut kept));
        let grad = on.of(&videos.size, F32);
        self.trace_following(&on, size, kept);
        drop((videos, grad));
        on.peak()
    }

    /// Returns the frames of latents of each part, and the number of parts after which the convolutions'
    /// state is kept.
    fn parts(&self, size: &VideoLatentSize) -> (Vec<usize>, usize) {
        let frames = size.sides[0];
        let starts = (0..frames).step_by(size.part);
        let parts: Vec<usize> = starts.map(|start| size.part.min(frames - start)).collect();
        let run_length = (parts.len() as f64).sqrt().ceil() as usize;
        (parts, run_length)
    }

    fn trace_decoding(
        &self,
        on: &MemoryTrace,
        size: &VideoLatentSize,
        mut kept: Option<&mut Vec<Vec<TracedTensor>>>,
    ) -> TracedTensor {
        let (parts, run_length) = self.parts(size);
        let (mut videos, mut seen) = (Vec::new(), Vec::new());
        for (number, &frames) in parts.iter().enumerate() {
            if let Some(kept) = kept.as_mut().filter(|_| number % run_length == 0) {
                kept.push(seen.clone());
            }
            let (decoded, after) = self.trace_part(&self.first(on, size, frames), &seen, None);
            videos.push(decoded);
            seen = after;
        }
        TracedTensor::cat(&videos.iter().collect::<Vec<_>>(), 2)
    }

    /// Returns the latents of a part as the first layer reads them.
    fn first(&self, on: &MemoryTrace, size: &VideoLatentSize, frames: usize) -> TracedTensor {
        let [_, height, width] = size.sides;
        on.tensor(&[size.videos, self.config.z_dim as usize, frames, height, width])
    }

    /// Returns the frames of a part and the convolutions' input frames after it. With `inputs`, records each
    /// layer's input and the number of convolutions before it.
    fn trace_part(
        &self,
        first: &TracedTensor,
        seen: &[TracedTensor],
        mut inputs: Option<&mut Vec<(TracedTensor, usize)>>,
    ) -> (TracedTensor, Vec<TracedTensor>) {
        let (mut x, mut cache) = (first.clone(), FrameCache { seen, kept: Vec::new() });
        for (layer, unit) in self.layers.iter().zip(&self.units) {
            if let Some(inputs) = &mut inputs {
                inputs.push((x.clone(), cache.kept.len()));
            }
            x = layer.trace(&x.on.weights(&[unit], |_| false), &x, &mut cache);
        }
        (x, cache.kept)
    }

    fn trace_following(&self, on: &MemoryTrace, size: &VideoLatentSize, kept: Vec<Vec<TracedTensor>>) {
        let (parts, run_length) = self.parts(size);
        let mut of_seen: Vec<TracedTensor> = Vec::new();
        for (run, first) in parts.chunks(run_length).zip(kept).rev() {
            let mut seen = vec![first];
            for &frames in &run[..run.len() - 1] {
                let before = seen.last().expect("the first part has an entry");
                let (_, after) = self.trace_part(&self.first(on, size, frames), before, None);
                seen.push(after);
            }
            for (&frames, seen) in run.iter().zip(seen).rev() {
                of_seen = self.trace_part_grad(&self.first(on, size, frames), &seen, &of_seen);
            }
        }
    }

    /// Returns the gradients of the convolutions' `seen` frames before a part, from those of their frames
    /// after it.
    fn trace_part_grad(
        &self,
        first: &TracedTensor,
        seen: &[TracedTensor],
        of_after: &[TracedTensor],
    ) -> Vec<TracedTensor> {
        let mut inputs = Vec::new();
        let (output, after) = self.trace_part(first, seen, Some(&mut inputs));
        let mut end = after.len();
        drop((output, after));
        let mut of_seen = Vec::new();
        let mut grad = None;
        while let Some((x, begin)) = inputs.pop() {
            let number = inputs.len();
            let of = |all: &[TracedTensor]| all.get(begin..end).map(<[_]>::to_vec).unwrap_or_default();
            let layer = (&self.layers[number], &self.units[number]);
            let (of_input, of_own) = layer_grad(layer, &x, &of(seen), (grad.as_ref(), &of(of_after)));
            grad = Some(of_input);
            of_seen.push(of_own);
            end = begin;
        }
        of_seen.into_iter().rev().flatten().collect()
    }
}

/// Returns the gradients of a layer's input and of its convolutions' `seen` frames.
fn layer_grad(
    (layer, unit): (&Layer, &crate::model::Unit),
    x: &TracedTensor,
    seen: &[TracedTensor],
    (_grad, of_after): (Option<&TracedTensor>, &[TracedTensor]),
) -> (TracedTensor, Vec<TracedTensor>) {
    let on = x.on.apart();
    let leaf = |tensor: &TracedTensor| tensor.leaf_on(&on);
    let (input, own): (TracedTensor, Vec<TracedTensor>) = (leaf(x), seen.iter().map(leaf).collect());
    let mut cache = FrameCache { seen: &own, kept: Vec::new() };
    let output = layer.trace(&on.weights(&[unit], |_| false), &input, &mut cache);
    let after = cache.kept.iter().take(of_after.len());
    let grads = on.gradients(&std::iter::once(&output).chain(after).collect::<Vec<_>>());
    drop(grads);
    (x.on.of(&x.size, x.element), seen.iter().map(|it| x.on.of(&it.size, it.element)).collect())
}

impl Layer {
    /// Traces the memory of [`Layer::run`].
    fn trace(&self, weights: &TracedWeights, x: &TracedTensor, cache: &mut FrameCache) -> TracedTensor {
        let of_channels = |x: &TracedTensor, channels: usize, frames: usize| {
            [&[x.size[0], channels, frames], &x.size[3..]].concat()
        };
        let plain = |conv: Linear, x: &TracedTensor| {
            conv.trace_convolution(weights, x, &of_channels(x, conv.trace_rows(weights), x.size[2]))
        };
        let mut causal = |conv: Linear, x: &TracedTensor| {
            let seen = cache.before(x);
            let size = of_channels(x, conv.trace_rows(weights), x.size[2]);
            conv.trace_convolution(weights, &seen, &size)
        };
        let lit = |norm: usize, x: &TracedTensor| rms_norm(weights, norm, x).activated();
        match *self {
            Layer::Input { post_quant, conv } => causal(conv, &plain(post_quant, x)),
            Layer::Residual { norm1, conv1, norm2, conv2, shortcut } => {
                let inner = causal(conv1, &lit(norm1, x));
                let inner = causal(conv2, &lit(norm2, &inner));
                let x = shortcut.map_or(x.clone(), |shortcut| plain(shortcut, x));
                x.add(&inner)
            }
            Layer::Attention { norm, qkv, out } => {
                let [videos, channels, frames, height, width] = x.size[..] else { unreachable!("videos") };
                let images = x.permuted(&[videos * frames, channels, height, width]);
                let images = if frames > 1 && videos > 1 { images.contiguous() } else { images };
                let normed = rms_norm(weights, norm, &images);
                let size = [videos * frames, 3 * channels, height, width];
                let all = qkv.trace_convolution(weights, &normed, &size);
                let parts = all.permuted(&[videos * frames, 1, height * width, 3 * channels]).chunk(3, 3);
                let attended = parts[0].attended(&parts[1], &parts[2]);
                let attended = attended.permuted(&images.size).contiguous();
                images.add(&out.trace_convolution(weights, &attended, &images.size)).permuted(&x.size)
            }
            Layer::Double { in_time, conv } => {
                let x = in_time.map_or(x.clone(), |in_time| double_frames(weights, x, in_time, cache));
                let [videos, channels, frames, height, width] = x.size[..] else { unreachable!("videos") };
                let images = x.permuted(&[videos * frames, channels, height, width]).contiguous();
                let doubled = images.resized(&[videos * frames, channels, 2 * height, 2 * width]);
                let channels = conv.trace_rows(weights);
                let size = [videos * frames, channels, 2 * height, 2 * width];
                let out = conv.trace_convolution(weights, &doubled, &size);
                out.permuted(&[videos, channels, frames, 2 * height, 2 * width])
            }
            Layer::Beside { ref layers, repeat } => {
                let frames = x.size[2] * repeat.frames as usize;
                let size = [x.size[0], repeat.channels as usize, frames, 2 * x.size[3], 2 * x.size[4]];
                let filled = x.resized(&size);
                let left_out = if cache.seen.is_empty() { repeat.frames as usize - 1 } else { 0 };
                let beside = filled.permuted(&size).contiguous().narrow(2, frames - left_out);
                drop(filled);
                let mut inner = x.clone();
                for layer in layers {
                    inner = layer.trace(weights, &inner, cache);
                }
                inner.add(&beside)
            }
            Layer::Output { norm, conv, patch_size } => {
                let squares = causal(conv, &lit(norm, x)).to(F32);
                let side = patch_size as usize;
                let [videos, channels, frames, height, width] = squares.size[..] else {
                    unreachable!("videos")
                };
                let size = [videos, channels / (side * side), frames, side * height, side * width];
                match side {
                    1 => squares.view(&size),
                    _ => squares.permuted(&size).contiguous(),
                }
            }
        }
    }
}

fn rms_norm(weights: &TracedWeights, norm: usize, x: &TracedTensor) -> TracedTensor {
    let wide = x.to(F32);
    let mut size = wide.size.clone();
    size[1] = 1;
    let lengths = wide.length(&size);
    let normed = wide.divided(&lengths).to(x.element);
    normed.mul(weights.get(0, norm))
}

fn double_frames(
    weights: &TracedWeights,
    x: &TracedTensor,
    in_time: Linear,
    cache: &mut FrameCache,
) -> TracedTensor {
    let alone = usize::from(cache.seen.is_empty());
    let (first, rest) = (x.narrow(2, alone), x.narrow(2, x.size[2] - alone));
    let seen = cache.before(&rest);
    let &[videos, channels, frames, height, width] = &rest.size[..] else { unreachable!("videos") };
    if frames == 0 {
        return first;
    }
    let doubled = in_time.trace_convolution(weights, &seen, &[videos, 2 * channels, frames, height, width]);
    let doubled = doubled.permuted(&[videos, channels, 2 * frames, height, width]).contiguous();
    TracedTensor::cat(&[&first, &doubled], 2)
}

//! Memory of passes of velocity models.

use super::Transformer;
use crate::footprint::{BlockBytes, Footprint, Runs};
use crate::memory_trace::{BlockPlace, BlockTrace, F32, TracedTensor, TracedWeights, block_bytes};
use crate::model::{Model, Unit};

/// Size of a [`DenoiseBatch`](super::DenoiseBatch).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct DenoiseSize {
    /// Number of points B, including the unconditional ones of guidance.
    pub points: usize,
    /// Frames, height and width of the latents; an image has one frame.
    pub sides: [usize; 3],
    /// Tokens S of a text.
    pub text: usize,
    /// True if backward computes the gradient of the points.
    pub latents_grad: bool,
}

impl Footprint for Transformer {
    type Size = DenoiseSize;

    fn block_bytes(&self, block: usize, size: &DenoiseSize, runs: Runs, weights_last: bool) -> BlockBytes {
        let units: Vec<&Unit> = self.units_of(block).iter().map(|&unit| &self.units()[unit]).collect();
        let place = BlockPlace::of(block, self.blocks());
        let (input, element) = match place {
            BlockPlace::First => (self.latents(size), F32),
            _ => (self.hidden(block, size).to_vec(), runs.size()),
        };
        let input_grad = place != BlockPlace::First || size.latents_grad;
        let of = BlockTrace { units: &units, input: (&input, element), input_grad, place, weights_last };
        block_bytes(of, runs, |weights, x| self.trace(block, weights, x, size))
    }
}

impl Transformer {
    fn latents(&self, size: &DenoiseSize) -> Vec<usize> {
        let [frames, height, width] = size.sides;
        match self {
            Self::Dit(dit) => vec![size.points, dit.config().channels as usize, height, width],
            Self::Sd3(sd3) => vec![size.points, sd3.config().in_channels as usize, height, width],
            Self::Wan(wan) => vec![size.points, wan.config().in_channels as usize, frames, height, width],
        }
    }

    /// Returns the input shape of an inner block or the last one: `[B, N, C]`.
    fn hidden(&self, block: usize, size: &DenoiseSize) -> [usize; 3] {
        match self {
            Self::Dit(dit) => dit.hidden(size),
            Self::Sd3(sd3) => sd3.hidden(block, size),
            Self::Wan(wan) => wan.hidden(size),
        }
    }

    /// Traces the memory of [`AutogradModel::run`](crate::autograd::AutogradModel::run).
    fn trace(
        &self,
        block: usize,
        weights: &TracedWeights,
        x: &TracedTensor,
        size: &DenoiseSize,
    ) -> TracedTensor {
        match self {
            Self::Dit(dit) => dit.trace(block, weights, x),
            Self::Sd3(sd3) => sd3.trace(block, weights, x, size),
            Self::Wan(wan) => wan.trace(block, weights, x, size),
        }
    }
}

//! Memory of passes of velocity models.

use tch::{Kind, Tensor};

use super::{DenoiseBatch, Texts, Transformer};
use crate::Result;
use crate::autograd::AutogradModel;
use crate::footprint::{BlockBytes, Footprint, Runs};
use crate::measured::Paper;
use crate::model::Weights;

/// Size of a [`DenoiseBatch`].
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
        let layout = self.layout();
        let block = layout.first_alike(block);
        let asked = (block, size, runs, weights_last);
        layout.measured.once(asked, || self.measure(block, size, runs, weights_last))
    }
}

impl Transformer {
    fn measure(
        &self,
        block: usize,
        size: &DenoiseSize,
        runs: Runs,
        weights_last: bool,
    ) -> Result<BlockBytes> {
        let paper = Paper::new(runs)?;
        let batch = DenoiseBatch {
            latents: paper.of_kind(&self.latents(size), Kind::Float)?,
            sigmas: paper.of_kind(&[size.points], Kind::Float)?,
            labels: paper.of_kind(&[size.points], Kind::Int64)?,
            adapters: true,
            latents_grad: size.latents_grad,
        };
        let texts = self.texts_on(&paper, size.text)?;
        let input = (&batch.latents, size.latents_grad);
        paper.block_bytes(self, block, input, weights_last, |block, weights, x| {
            self.run_first(block, weights, x, &batch, texts.as_ref())
        })
    }

    /// Returns a text of this many tokens without values, for a model that reads texts.
    fn texts_on(&self, paper: &Paper, tokens: usize) -> Result<Option<Texts>> {
        let widths = match self {
            Self::Dit(_) => return Ok(None),
            Self::Sd3(sd3) => sd3.config().text_widths(),
            Self::Wan(wan) => wan.config().text_widths(),
        };
        let context = paper.tensor(&[1, tokens, widths.token as usize])?;
        let pooled = widths.pooled.map(|width| paper.tensor(&[1, width as usize])).transpose()?;
        Texts::new(context, pooled).map(Some)
    }

    /// Runs a block on these texts. Of a pair of transformers, all points go through the first: both have one shape.
    fn run_first(
        &self,
        block: usize,
        weights: &Weights,
        x: &Tensor,
        batch: &DenoiseBatch,
        texts: Option<&Texts>,
    ) -> Result<Tensor> {
        match (self, texts) {
            (Self::Sd3(sd3), Some(texts)) => sd3.run_on(block, weights, x, batch, texts),
            (Self::Wan(wan), Some(texts)) => wan.run_first(block, weights, x, batch, texts),
            _ => self.run(block, weights, x, batch),
        }
    }

    fn latents(&self, size: &DenoiseSize) -> Vec<usize> {
        let [frames, height, width] = size.sides;
        match self {
            Self::Dit(dit) => vec![size.points, dit.config().channels as usize, height, width],
            Self::Sd3(sd3) => vec![size.points, sd3.config().in_channels as usize, height, width],
            Self::Wan(wan) => vec![size.points, wan.config().in_channels as usize, frames, height, width],
        }
    }
}

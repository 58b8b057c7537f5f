//! The decoder block of a layer: one that is differentiated by hand, or an expressed one.

use anyroll_backends::ops::Causal;
use tch::Tensor;

use super::block::Block;
use super::block_params;
use super::expressed::ExpressedBlock;
use super::layer::Layer;
use super::lora::{AdapterDropout, Lora, LoraTarget, Place};
use super::{DecoderConfig, math::Math};
use crate::Result;
use crate::model::{Grads, Saved, Unit, Weights};

/// A decoder block.
#[derive(Clone, Debug)]
pub(super) enum LayerBlock {
    /// With a hand-written backward.
    Written(Box<Block>),
    /// Differentiated by libtorch.
    Expressed(Box<ExpressedBlock>),
}

/// Returns the units of all decoder blocks, and the blocks.
pub(super) fn layout(config: &DecoderConfig) -> (Vec<Unit>, Vec<LayerBlock>) {
    let layers = (0..config.num_hidden_layers).map(|layer| match &config.expressed {
        Some(of) => {
            let (unit, block) = ExpressedBlock::layout(config, of, layer);
            (unit, LayerBlock::Expressed(Box::new(block)))
        }
        None => {
            let (unit, block) = block_params::layout(config, layer);
            (unit, LayerBlock::Written(Box::new(block)))
        }
    });
    layers.unzip()
}

impl LayerBlock {
    /// Returns the block with adapters, which lie in a second unit.
    pub fn with_lora(&self, lora: Lora) -> LayerBlock {
        let mut adapted = self.clone();
        match &mut adapted {
            LayerBlock::Written(block) => block.lora = Some(lora),
            LayerBlock::Expressed(block) => block.lora = Some(lora),
        }
        adapted
    }

    /// Makes the adapters of experts, which begin at the index `first`, those of the block's unit `unit`.
    pub fn move_adapters(&mut self, first: usize, unit: usize) {
        let LayerBlock::Written(block) = self else { unreachable!("expressed experts have no adapters") };
        block.lora.iter_mut().for_each(|lora| lora.move_experts(first, unit));
    }

    /// Returns the adapters, if there are any.
    pub fn lora(&self) -> Option<&Lora> {
        match self {
            LayerBlock::Written(block) => block.lora.as_ref(),
            LayerBlock::Expressed(block) => block.lora.as_ref(),
        }
    }

    /// Returns the block for recorded steps and for several ranks, which expressed layers have not.
    pub fn written(&self) -> &Block {
        match self {
            LayerBlock::Written(block) => block,
            LayerBlock::Expressed(_) => {
                unreachable!("steps of expressed layers are not recorded, nor are the layers split")
            }
        }
    }

    /// Returns true if the adapters have dropout in training.
    pub fn drops(&self) -> bool {
        self.lora().is_some_and(Lora::drops)
    }

    /// Returns the ranks of adapters, matrix by matrix.
    pub fn ranks(&self) -> impl Iterator<Item = Vec<usize>> {
        self.lora().into_iter().flat_map(Lora::ranks)
    }

    /// Returns the place of a matrix; `None` if the layer does not have it.
    pub fn place_of(&self, target: LoraTarget, config: &DecoderConfig) -> Option<Place> {
        match self {
            LayerBlock::Written(block) => block.place_of(target, config),
            LayerBlock::Expressed(block) => {
                let (projection, matrix, inputs, outputs) = block.matrix(target.name())?;
                Some(Place { projection, matrix, start: 0, inputs, outputs })
            }
        }
    }

    /// Makes gradients bitwise repeatable, or not.
    pub fn set_deterministic(&mut self, deterministic: bool) {
        match self {
            LayerBlock::Written(block) => block.deterministic = deterministic,
            LayerBlock::Expressed(block) => block.deterministic = deterministic,
        }
    }

    /// Sets the order of sums, of which expressed layers have one.
    pub fn set_math(&mut self, math: Math) {
        if let LayerBlock::Written(block) = self {
            block.math = math;
        }
    }

    /// Returns true if rows are rounded to 8 bits before products with matrices in 8 bits.
    pub fn rounds_rows(&self) -> bool {
        matches!(self, LayerBlock::Written(block) if block.math == Math::EightBits)
    }

    /// Returns the attention mask and scale of a layer with this window.
    pub fn causal(&self, window: Option<i64>) -> Causal {
        match self {
            LayerBlock::Written(block) => block.causal(window),
            LayerBlock::Expressed(block) => block.causal(),
        }
    }

    /// Maps `x` `[N, C]` to `[N, C]`.
    pub fn forward(
        &self,
        weights: &Weights,
        x: &Tensor,
        layer: &Layer,
        save: bool,
    ) -> Result<(Tensor, Saved)> {
        match self {
            LayerBlock::Written(block) => block.forward(weights, x, layer, save),
            LayerBlock::Expressed(block) => block.forward(weights, x, layer, save),
        }
    }

    /// Turns the gradient of the output into the gradient of `x`.
    pub fn backward(
        &self,
        weights: &Weights,
        grads: &mut Grads,
        saved: Saved,
        dout: Tensor,
        layer: &Layer,
    ) -> Result<Tensor> {
        match self {
            LayerBlock::Written(block) => block.backward(weights, grads, saved, dout, layer),
            LayerBlock::Expressed(block) => block.backward(weights, grads, saved, &dout, layer),
        }
    }

    /// Returns queries, keys and values for the rows of `x` `[N, C]` at `positions` `[N]`, without dropout.
    pub fn project(
        &self,
        weights: &Weights,
        x: &Tensor,
        positions: &Tensor,
        table: &Tensor,
    ) -> Result<[Tensor; 3]> {
        match self {
            LayerBlock::Written(block) => {
                let projected = block.project(weights, x, (positions, table), None)?;
                Ok([projected.q, projected.k, projected.v])
            }
            LayerBlock::Expressed(block) => block.project(weights, x, positions, table),
        }
    }

    /// Computes the block's output from the output of attention `[N, H D]`. Also returns the rows' experts, int64
    /// `[N, J]`, if there are any; an expressed layer does not tell its own.
    pub fn finish(
        &self,
        weights: &Weights,
        x: &Tensor,
        attended: &Tensor,
    ) -> Result<(Tensor, Option<Tensor>)> {
        match self {
            LayerBlock::Written(block) => block.finish(weights, x, attended),
            LayerBlock::Expressed(block) => Ok((block.finish(weights, x, attended)?, None)),
        }
    }

    /// Drops saved tensors that [`Self::refill`] recomputes; an expressed layer saves none of these.
    pub fn thin(&self, saved: Saved) -> Saved {
        match self {
            LayerBlock::Written(block) => block.thin(saved),
            LayerBlock::Expressed(_) => saved,
        }
    }

    /// Recomputes them.
    pub fn refill(&self, weights: &Weights, saved: Saved, drops: Option<AdapterDropout>) -> Result<Saved> {
        match self {
            LayerBlock::Written(block) => block.refill(weights, saved, drops),
            LayerBlock::Expressed(_) => Ok(saved),
        }
    }
}

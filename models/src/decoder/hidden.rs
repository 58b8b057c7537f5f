//! A decoder without its head: returns the hidden states of a teacher, from which the student's pass computes
//! the logits.

use std::sync::Arc;

use anyroll_backends::ops;
use tch::{Device, Tensor};

use super::{Decoder, DecoderConfig, multipliers::divide_};
use crate::model::{Grads, Model, Output, OutputGrad, Saved, Unit, Weights};
use crate::{Cut, PackedBatch, Peers, Result};

/// A [`Decoder`] whose last block returns the row that its head would read for each target. It has the
/// decoder's units, holds no weights, and cannot be trained.
#[derive(Debug)]
pub struct HiddenModel {
    decoder: Decoder,
}

impl HiddenModel {
    /// Lays out a model whose weights and batches will be on `device`.
    ///
    /// # Errors
    /// The errors of [`Decoder::new`].
    pub fn new(config: DecoderConfig, device: Device) -> Result<HiddenModel> {
        Ok(HiddenModel { decoder: Decoder::new(config, device)? })
    }

    /// Returns the unit of the head's matrix `[V, C]`, and the matrix's parameter index in it.
    pub fn lm_head(&self) -> (usize, usize) {
        let (unit, param) = self.decoder.head.lm_head_place();
        (self.decoder.units_of[self.decoder.blocks() - 1][unit], param)
    }
}

impl Model for HiddenModel {
    type Batch = PackedBatch;
    /// Normed row of each target, `[M, C]` in the dtype of the weights, divided by `logits_scaling`.
    type Scores = Tensor;
    type ScoresGrad = Tensor;

    fn units(&self) -> &[Unit] {
        self.decoder.units()
    }

    fn blocks(&self) -> usize {
        self.decoder.blocks()
    }

    fn units_of(&self, block: usize) -> &[usize] {
        self.decoder.units_of(block)
    }

    fn layer_matrices(&self, unit: usize) -> Vec<usize> {
        self.decoder.layer_matrices(unit)
    }

    fn forward(
        &self,
        block: usize,
        weights: &Weights,
        x: Option<&Tensor>,
        batch: &PackedBatch,
        save: bool,
    ) -> Result<(Output<Tensor>, Saved)> {
        if block + 1 == self.blocks() {
            let x = x.expect("only the first block has no input");
            let rows = x.f_index_select(0, &batch.own_target_rows()?)?;
            let head = &self.decoder.head;
            let (mut normed, _) = ops::rms_norm(&rows, head.norm(weights), head.eps)?;
            divide_(&mut normed, head.logits_scaling)?;
            return Ok((Output::Scores(normed), Saved::default()));
        }
        self.decoder.forward_below_head(block, weights, x, batch, save)
    }

    fn spread_experts(&self, peers: &Arc<dyn Peers>) -> Result<Option<HiddenModel>> {
        Ok(self.decoder.spread_experts(peers)?.map(|decoder| HiddenModel { decoder }))
    }

    fn has_experts(&self, unit: usize) -> bool {
        self.decoder.has_experts(unit)
    }

    fn whole_place(&self, unit: usize, param: usize) -> (usize, usize) {
        self.decoder.whole_place(unit, param)
    }

    fn cut_on(&self, rank: usize, unit: usize, param: usize) -> Cut {
        self.decoder.cut_on(rank, unit, param)
    }

    fn backward(
        &self,
        _: usize,
        _: &Weights,
        _: &mut Grads,
        _: Saved,
        _: OutputGrad<Tensor>,
        _: &PackedBatch,
    ) -> Result<Option<Tensor>> {
        unreachable!("a teacher has no backward")
    }
}

//! A decoder whose last block returns a number per target token instead of a distribution: the critic of an
//! actor-critic algorithm, a reward model, or a process reward model.
//!
//! A token's value is read where the token is predicted, before it is seen. It is the value V(s) of the state
//! in which the token is the action. To score a whole text, append a token to it and read the value there. To
//! score the steps of a text, read the values at the tokens after the steps.

use anyroll_backends::ops::{self, Store};
use std::sync::Arc;

use tch::{Device, Tensor};

use super::footprint::sorting_bytes;
use super::{Decoder, DecoderConfig, PackedSize, matrix_spec, norm_spec, wide};
use crate::footprint::{BlockBytes, Footprint, Runs};
use crate::model::{Grads, Init, Model, Output, OutputGrad, ParamSpec, Saved, Unit, Weights};
use crate::{Cut, PackedBatch, Peers, Result, Sharers};

/// Head of a [`ValueModel`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ValueHead {
    /// One output, the value: `score.weight` `[1, C]`, as in Hugging Face's sequence classifiers with one label.
    Number,
    /// Two classes, wrong and right: `score.weight` `[2, C]` and `score.bias` `[2]`, as in Hugging Face's token
    /// classifiers. The value is the log-odds of right: the second logit minus the first.
    Classes,
}

impl ValueHead {
    fn outputs(self) -> i64 {
        match self {
            ValueHead::Number => 1,
            ValueHead::Classes => 2,
        }
    }
}

/// The blocks of a [`Decoder`] with a value head. It holds no weights.
#[derive(Debug)]
pub struct ValueModel {
    decoder: Decoder,
    head: ValueHead,
    units: Vec<Unit>,
    head_unit: usize,
    units_of_head: [usize; 1],
}

/// Indices of the head's parameters in its unit.
const NORM: usize = 0;
const SCORE: usize = 1;
const BIAS: usize = 2;

impl ValueModel {
    /// Name of the head's matrix.
    pub const HEAD: &str = "score.weight";
    /// Name of the head's bias, if it has one.
    pub const HEAD_BIAS: &str = "score.bias";

    /// Lays out a model with one output, whose weights and batches will be on `device`. The head is initialized
    /// to 0, so all values are 0 at first.
    ///
    /// # Errors
    /// The errors of [`Decoder::new`].
    pub fn new(config: DecoderConfig, device: Device) -> Result<ValueModel> {
        Self::with_head(config, ValueHead::Number, device)
    }

    /// Like [`Self::new`], with this head.
    ///
    /// # Errors
    /// The errors of [`Decoder::new`].
    pub fn with_head(config: DecoderConfig, head: ValueHead, device: Device) -> Result<ValueModel> {
        let decoder = Decoder::new(config, device)?;
        let units = Self::units_of_config(decoder.config(), head);
        let head_unit = units.len() - 1;
        Ok(ValueModel { decoder, head, units, head_unit, units_of_head: [head_unit] })
    }

    /// Returns the units of a model of this shape: those of the decoder except the last.
    pub(crate) fn units_of_config(config: &DecoderConfig, head: ValueHead) -> Vec<Unit> {
        let score = matrix_spec(Self::HEAD.to_owned(), head.outputs(), config.hidden_size, 0.0);
        let norm = norm_spec("model.norm.weight".to_owned(), config.hidden_size, config.norm_offset);
        let mut params = vec![norm, ParamSpec { init: Init::Zeros, ..score }];
        if head == ValueHead::Classes {
            let bias = norm_spec(Self::HEAD_BIAS.to_owned(), head.outputs(), 0.0);
            params.push(ParamSpec { init: Init::Zeros, ..bias });
        }
        let mut units = super::units(config);
        units[config.num_hidden_layers + 1] = Unit { name: "score".to_owned(), params, trainable: true };
        units
    }

    /// Like [`Decoder::deterministic`].
    #[must_use]
    pub fn deterministic(self, deterministic: bool) -> ValueModel {
        ValueModel { decoder: self.decoder.deterministic(deterministic), ..self }
    }

    /// Returns the decoder below the head.
    pub fn decoder(&self) -> &Decoder {
        &self.decoder
    }

    /// Maps `x` `[N, C]` to a value per target, fp32 `[M]`.
    fn values(
        &self,
        weights: &Weights,
        x: &Tensor,
        batch: &PackedBatch,
        save: bool,
    ) -> Result<(Tensor, Saved)> {
        let x_rows = x.f_index_select(0, &batch.own_target_rows()?)?;
        let eps = self.decoder.config().rms_norm_eps;
        let (h, rstd) = ops::rms_norm(&x_rows, weights.get(0, NORM), eps)?;
        let bias = (self.head == ValueHead::Classes).then(|| weights.get(0, BIAS));
        let outputs = h.f_linear(weights.get(0, SCORE), bias)?;
        let saved = if save { Saved(vec![x_rows, rstd]) } else { Saved::default() };
        let outputs = wide(&outputs)?;
        let values = match self.head {
            ValueHead::Number => outputs.f_squeeze_dim(1)?,
            ValueHead::Classes => outputs.f_select(1, 1)?.f_sub(&outputs.f_select(1, 0)?)?,
        };
        Ok((values, saved))
    }

    /// Gradient of the head's outputs `[M, outputs]`, from that of the values.
    fn outputs_grad(&self, dvalues: &Tensor) -> Result<Tensor> {
        Ok(match self.head {
            ValueHead::Number => dvalues.f_unsqueeze(1)?,
            ValueHead::Classes => Tensor::f_stack(&[dvalues.f_neg()?, dvalues.shallow_clone()], 1)?,
        })
    }

    fn values_backward(
        &self,
        weights: &Weights,
        grads: &mut Grads,
        saved: Saved,
        dvalues: &Tensor,
        batch: &PackedBatch,
    ) -> Result<Tensor> {
        let [x_rows, rstd] = saved.unpack();
        let (norm, score) = (weights.get(0, NORM), weights.get(0, SCORE));
        let doutputs = self.outputs_grad(&dvalues.f_to_kind(x_rows.kind())?)?;
        let mut h = doutputs.f_mm(score)?; // the gradient of the norm's output, and then that output
        let mut dx_rows = x_rows.f_zeros_like()?;
        grads.put_beside(0, NORM, norm, |dweight, how| {
            ops::rms_norm_backward_(&mut h, &x_rows, &rstd, norm, &mut dx_rows, dweight, how)
        })?;
        grads.put_linear(0, SCORE, &doutputs, &h)?;
        if self.head == ValueHead::Classes {
            grads.put(0, BIAS, |buffer, how| ops::sum_rows(&doutputs, buffer, how))?;
        }
        let size = [batch.rows(), norm.size()[0]];
        let mut dx = Tensor::f_empty(size, (dx_rows.kind(), dx_rows.device()))?;
        // If sequences share rows, several targets may follow one row.
        ops::embedding_backward(&dx_rows, &batch.own_target_rows()?, &mut dx, Store::Write)?;
        Ok(dx)
    }

    /// Returns the model over a rank's part of the decoder. The head is whole on every rank.
    fn over(&self, decoder: Decoder) -> ValueModel {
        let mut units = decoder.units().to_vec();
        units[self.head_unit] = self.units[self.head_unit].clone();
        ValueModel { decoder, head: self.head, units, ..*self }
    }
}

impl Footprint for ValueModel {
    type Size = PackedSize;

    fn block_bytes(&self, block: usize, size: &PackedSize, runs: Runs, weights_last: bool) -> BlockBytes {
        if block != self.head_unit {
            return self.decoder.block_bytes(block, size, runs, weights_last);
        }
        let hidden = self.decoder.config().hidden_size as usize;
        let all = size.padded(runs).tokens * hidden * runs.size();
        let rows = size.targets * hidden * runs.size();
        let (per_target, values) = (size.targets * size_of::<f32>(), size.targets * runs.size());
        // The outputs with their fp32 copy, and the gradient's.
        let (outputs, outputs_grad) = match self.head {
            ValueHead::Number => (values + per_target, values),
            ValueHead::Classes => (2 * (values + per_target) + per_target, 4 * values),
        };
        // The rows of targets, their norm and deviations.
        let forward = 2 * rows + per_target + outputs;
        let saved = rows + per_target;
        BlockBytes {
            input: all,
            saved,
            thinned: saved,
            forward,
            scoring: forward,
            // In addition to the values.
            output_grad: 2 * per_target,
            backward: outputs_grad + 2 * rows + all + sorting_bytes(size.targets, runs),
        }
    }
}

impl Model for ValueModel {
    type Batch = PackedBatch;
    /// A value per target, fp32 `[M]`.
    type Scores = Tensor;
    type ScoresGrad = Tensor;

    fn units(&self) -> &[Unit] {
        &self.units
    }

    fn blocks(&self) -> usize {
        self.decoder.blocks()
    }

    fn units_of(&self, block: usize) -> &[usize] {
        if block == self.head_unit { &self.units_of_head } else { self.decoder.units_of(block) }
    }

    fn forward(
        &self,
        block: usize,
        weights: &Weights,
        x: Option<&Tensor>,
        batch: &PackedBatch,
        save: bool,
    ) -> Result<(Output<Tensor>, Saved)> {
        if block == self.head_unit {
            let x = x.expect("only the first block has no input");
            let (values, saved) = self.values(weights, x, batch, save)?;
            return Ok((Output::Scores(values), saved));
        }
        self.decoder.forward_below_head(block, weights, x, batch, save)
    }

    fn thin(&self, block: usize, saved: Saved) -> Saved {
        self.decoder.thin(block, saved)
    }

    fn refill(&self, block: usize, weights: &Weights, saved: Saved, batch: &PackedBatch) -> Result<Saved> {
        self.decoder.refill(block, weights, saved, batch)
    }

    fn backward(
        &self,
        block: usize,
        weights: &Weights,
        grads: &mut Grads,
        saved: Saved,
        grad_output: OutputGrad<Tensor>,
        batch: &PackedBatch,
    ) -> Result<Option<Tensor>> {
        match grad_output {
            OutputGrad::Scores(dvalues) => {
                Ok(Some(self.values_backward(weights, grads, saved, &dvalues, batch)?))
            }
            OutputGrad::Hidden(dy) => {
                self.decoder.backward(block, weights, grads, saved, OutputGrad::Hidden(dy), batch)
            }
        }
    }

    fn split_over(&self, peers: &Arc<dyn Peers>) -> Result<ValueModel> {
        Ok(self.over(self.decoder.split_over(peers)?))
    }

    fn spread_experts(&self, peers: &Arc<dyn Peers>) -> Result<Option<ValueModel>> {
        Ok(self.decoder.spread_experts(peers)?.map(|decoder| self.over(decoder)))
    }

    fn has_experts(&self, unit: usize) -> bool {
        self.decoder.has_experts(unit)
    }

    fn whole_place(&self, unit: usize, param: usize) -> (usize, usize) {
        self.decoder.whole_place(unit, param)
    }

    fn layer_matrices(&self, unit: usize) -> Vec<usize> {
        self.decoder.layer_matrices(unit)
    }

    fn cut_on(&self, rank: usize, unit: usize, param: usize) -> Cut {
        if unit == self.head_unit { Cut::Whole } else { self.decoder.cut_on(rank, unit, param) }
    }

    fn cut(&self, batch: &PackedBatch, sharers: &Sharers) -> Result<Vec<PackedBatch>> {
        self.decoder.cut(batch, sharers)
    }

    fn join_scores(&self, values: Tensor, part: &PackedBatch) -> Result<Tensor> {
        let [values] = part.join([&values])?;
        Ok(values)
    }

    fn cut_grad(&self, dvalues: Option<Tensor>, part: &PackedBatch) -> Result<Tensor> {
        let [dvalues] = part.cut_numbers(dvalues.map(|dvalues| [dvalues]))?;
        Ok(dvalues)
    }
}

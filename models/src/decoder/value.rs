//! A decoder whose last block returns a number per target token instead of a distribution: the critic of an
//! actor-critic algorithm, or a reward model.
//!
//! A token's value is read where the token is predicted, before it is seen. It is the value V(s) of the state
//! in which the token is the action. To score a whole text, append a token to it and read the value there.

use anyroll_backends::ops::{self, Store};
use tch::{Device, Kind, Tensor};

use super::footprint::sorting_bytes;
use super::{Decoder, DecoderConfig, PackedSize, matrix_spec, norm_spec};
use crate::footprint::{BlockBytes, Footprint, Runs};
use crate::model::{Grads, Init, Model, Output, OutputGrad, ParamSpec, Saved, Unit, Weights};
use crate::{PackedBatch, Result};

/// The blocks of a [`Decoder`] with a value head, whose tensor is `score.weight` `[1, C]`, like in Hugging
/// Face's sequence classifiers. It holds no weights.
#[derive(Debug)]
pub struct ValueModel {
    decoder: Decoder,
    units: Vec<Unit>,
    head_unit: usize,
    units_of_head: [usize; 1],
}

/// Indices of the head's parameters in its unit.
const NORM: usize = 0;
const SCORE: usize = 1;

impl ValueModel {
    /// Name of the head's tensor.
    pub const HEAD: &str = "score.weight";

    /// Lays out a model whose weights and batches will be on `device`. The head is initialized to 0, so all
    /// values are 0 at first.
    ///
    /// # Errors
    /// The errors of [`Decoder::new`].
    pub fn new(config: DecoderConfig, device: Device) -> Result<ValueModel> {
        let decoder = Decoder::new(config, device)?;
        let units = Self::units_of_config(decoder.config());
        let head_unit = units.len() - 1;
        Ok(ValueModel { decoder, units, head_unit, units_of_head: [head_unit] })
    }

    /// Returns the units of a model of this shape: those of the decoder except the last.
    pub(crate) fn units_of_config(config: &DecoderConfig) -> Vec<Unit> {
        let score = matrix_spec(Self::HEAD.to_owned(), 1, config.hidden_size, 0.0);
        let norm = norm_spec("model.norm.weight".to_owned(), config.hidden_size, config.norm_offset);
        let params = vec![norm, ParamSpec { init: Init::Zeros, ..score }];
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
        let x_rows = x.f_index_select(0, &batch.target_rows)?;
        let eps = self.decoder.config().rms_norm_eps;
        let (h, rstd) = ops::rms_norm(&x_rows, weights.get(0, NORM), eps)?;
        let values = h.f_linear(weights.get(0, SCORE), None::<&Tensor>)?;
        let saved = if save { Saved(vec![x_rows, rstd]) } else { Saved::default() };
        let wide = if values.kind() == Kind::Double { Kind::Double } else { Kind::Float };
        Ok((values.f_squeeze_dim(1)?.f_to_kind(wide)?, saved))
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
        let dvalues = dvalues.f_to_kind(x_rows.kind())?.f_unsqueeze(1)?;
        let mut h = dvalues.f_mm(score)?; // the gradient of the norm's output, and then that output
        let mut dx_rows = x_rows.f_zeros_like()?;
        grads.put_beside(0, NORM, norm, |dweight, how| {
            ops::rms_norm_backward_(&mut h, &x_rows, &rstd, norm, &mut dx_rows, dweight, how)
        })?;
        grads.put_linear(0, SCORE, &dvalues, &h)?;
        let size = [batch.tokens(), norm.size()[0]];
        let mut dx = Tensor::f_empty(size, (dx_rows.kind(), dx_rows.device()))?;
        // If sequences share rows, several targets may follow one row.
        ops::embedding_backward(&dx_rows, &batch.target_rows, &mut dx, Store::Write)?;
        Ok(dx)
    }
}

impl Footprint for ValueModel {
    type Size = PackedSize;

    fn block_bytes(&self, block: usize, size: &PackedSize, runs: Runs, weights_last: bool) -> BlockBytes {
        if block != self.head_unit {
            return self.decoder.block_bytes(block, size, runs, weights_last);
        }
        let hidden = self.decoder.config().hidden_size as usize;
        let (rows, all) = (size.targets * hidden * runs.size(), size.tokens * hidden * runs.size());
        let (per_target, values) = (size.targets * size_of::<f32>(), size.targets * runs.size());
        // The rows of targets, their norm and deviations; the values, and their fp32 copy.
        let forward = 2 * rows + per_target + values + per_target;
        let saved = rows + per_target;
        BlockBytes {
            input: all,
            saved,
            thinned: saved,
            forward,
            scoring: forward,
            // In addition to the values.
            output_grad: 2 * per_target,
            backward: values + 2 * rows + all + sorting_bytes(size.targets, runs),
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
        match self.decoder.forward(block, weights, x, batch, save)? {
            (Output::Hidden(hidden), saved) => Ok((Output::Hidden(hidden), saved)),
            (Output::Scores(_), _) => unreachable!("only the last block has scores"),
        }
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
}

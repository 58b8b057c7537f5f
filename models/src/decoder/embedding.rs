//! The first block: looks up a row of the embedding matrix for each token.

use anyroll_backends::ops;
use tch::{Kind, Tensor};

use super::{
    DecoderConfig, matrix_spec,
    multipliers::{multiply_, rounded},
};
use crate::Result;
use crate::model::{Grads, Unit, Weights};

/// Returns the embedding's unit: one matrix `[V, C]`.
pub(super) fn unit(config: &DecoderConfig) -> Unit {
    let name = "model.embed_tokens.weight".to_owned();
    let (rows, columns) = (config.vocab_size, config.hidden_size);
    let params = vec![matrix_spec(name, rows, columns, config.initializer_range)];
    Unit { name: "model.embed_tokens".to_owned(), params, trainable: true }
}

#[derive(Clone, Copy, Debug)]
pub(super) struct Embedding {
    multiplier: f64,
    /// True if the multiplier is rounded to the rows' dtype.
    is_rounded: bool,
}

impl Embedding {
    /// Returns the embedding of a decoder.
    pub fn new(config: &DecoderConfig) -> Embedding {
        let multipliers = &config.multipliers;
        Embedding { multiplier: multipliers.embedding, is_rounded: multipliers.rounds_embedding }
    }

    /// Returns true if rows are multiplied.
    pub fn multiplies(&self) -> bool {
        self.multiplier != 1.0
    }

    fn multiplier(&self, kind: Kind) -> f64 {
        if self.is_rounded { rounded(self.multiplier, kind) } else { self.multiplier }
    }

    /// Maps `tokens` int64 `[N]` to `[N, C]`.
    pub fn forward(&self, weights: &Weights, tokens: &Tensor) -> Result<Tensor> {
        let mut rows = weights.get(0, 0).f_index_select(0, tokens)?;
        let by = self.multiplier(rows.kind());
        multiply_(&mut rows, by)?;
        Ok(rows)
    }

    /// Like [`Self::forward`], into existing memory.
    pub fn forward_into(&self, weights: &Weights, tokens: &Tensor, rows: &mut Tensor) -> Result<()> {
        drop(weights.get(0, 0).f_index_select_out(rows, 0, tokens)?);
        multiply_(rows, self.multiplier(rows.kind()))
    }

    pub fn backward(&self, grads: &mut Grads, dy: &Tensor, tokens: &Tensor) -> Result<()> {
        let drows = match self.multiplies() {
            true => dy.f_mul_scalar(self.multiplier(dy.kind()))?,
            false => dy.shallow_clone(),
        };
        grads.put(0, 0, |buffer, how| ops::embedding_backward(&drows, tokens, buffer, how))
    }
}

//! The first block: a row of the embedding matrix for each token.

use anyroll_backends::ops;
use tch::Tensor;

use super::{DecoderConfig, matrix_spec};
use crate::Result;
use crate::model::{Grads, Unit, Weights};

/// The embedding's unit: one matrix `[V, C]`.
pub(super) fn unit(config: &DecoderConfig) -> Unit {
    let name = "model.embed_tokens.weight".to_owned();
    let (rows, columns) = (config.vocab_size, config.hidden_size);
    let params = vec![matrix_spec(name, rows, columns, config.initializer_range)];
    Unit { name: "model.embed_tokens".to_owned(), params, trainable: true }
}

#[derive(Debug)]
pub(super) struct Embedding;

impl Embedding {
    /// `tokens` int64 `[N]` to `[N, C]`.
    pub fn forward(&self, weights: &Weights, tokens: &Tensor) -> Result<Tensor> {
        Ok(weights.get(0, 0).f_index_select(0, tokens)?)
    }

    pub fn backward(&self, grads: &mut Grads, dy: &Tensor, tokens: &Tensor) -> Result<()> {
        grads.put(0, 0, |buffer, how| ops::embedding_backward(dy, tokens, buffer, how))
    }
}

//! Forward passes that fill and read a KV cache.

use anyroll_backends::ops::{Causal, Packing};
use tch::Tensor;

use super::{Decoder, block::Projected};
use crate::generation::KvCache;
use crate::model::{Model, Weights};
use crate::{Error, Result};

/// Prompts as a packed batch, and where their keys and values go.
pub(crate) struct Prefill {
    /// int64 `[N]`.
    pub tokens: Tensor,
    pub packing: Packing,
    /// The last row of each prompt: int64 `[U]`.
    pub last_rows: Tensor,
    /// The rows to cache, and the places that they go to (see [`KvCache::store`]); a row may go to several.
    pub rows: Tensor,
    pub places: Tensor,
}

/// Tokens of sequences whose earlier ones are cached, one sequence behind the other; all tensors int64.
pub(crate) struct Pieces {
    /// `[N]`.
    pub tokens: Tensor,
    /// `[N]`.
    pub positions: Tensor,
    /// As in [`Prefill`].
    pub rows: Tensor,
    pub places: Tensor,
    /// Of each sequence how many of the tokens are its own, and the places of all that it has up to the last of these: `[M]`.
    pub contexts: Vec<(i64, Tensor)>,
}

/// One token of each of B sequences; all tensors int64.
pub(crate) struct Step {
    /// `[B]`.
    pub tokens: Tensor,
    /// The token's position, from 0: `[B]`.
    pub positions: Tensor,
    /// The sequence's length, this token included: `[B]`.
    pub lengths: Tensor,
    /// The token's place in the cache: `[B]`.
    pub places: Tensor,
    /// The sequence's blocks: `[B, W]`.
    pub tables: Tensor,
}

impl Decoder {
    /// Runs prompts by the training forward and caches their keys and values. Returns the logits of each
    /// prompt's last token `[U, V]`.
    pub(crate) fn prefill(
        &self,
        weights: &[Weights],
        prompts: &Prefill,
        cache: &mut KvCache,
    ) -> Result<Tensor> {
        let packing = &prompts.packing;
        let x = self.layers(weights, &prompts.tokens, packing.positions(), |layer, it| {
            store(cache, layer, it, &prompts.rows, &prompts.places)?;
            Ok(self.head.math.attention(&it.q, &it.k, &it.v, packing, self.causal(layer))?.0)
        })?;
        self.logits(weights, &x.f_index_select(0, &prompts.last_rows)?)
    }

    /// Runs the next tokens of sequences and caches their keys and values. Returns what the head reads of each
    /// `[N, C]`.
    pub(crate) fn extend(&self, weights: &[Weights], pieces: &Pieces, cache: &mut KvCache) -> Result<Tensor> {
        self.layers(weights, &pieces.tokens, &pieces.positions, |layer, it| {
            store(cache, layer, it, &pieces.rows, &pieces.places)?;
            let (mut attended, mut start) = (Vec::with_capacity(pieces.contexts.len()), 0);
            for (rows, context) in &pieces.contexts {
                let (keys, values) = cache.read(layer, context)?;
                let q = it.q.f_narrow(0, start, *rows)?;
                let math = self.head.math;
                attended.push(math.attention_with_history(&q, &keys, &values, self.causal(layer))?);
                start += rows;
            }
            Ok(Tensor::f_cat(&attended, 0)?)
        })
    }

    /// Runs one token of each sequence. Returns its logits `[B, V]`.
    pub(crate) fn decode(&self, weights: &[Weights], step: &Step, cache: &mut KvCache) -> Result<Tensor> {
        let x = self.layers(weights, &step.tokens, &step.positions, |layer, it| {
            cache.store(layer, &it.k, &it.v, &step.places)?;
            let (keys, values) = cache.layer(layer);
            let (tables, lengths) = (&step.tables, &step.lengths);
            self.head.math.decode_attention(&it.q, (keys, values), (tables, lengths), self.causal(layer))
        })?;
        self.logits(weights, &x)
    }

    /// The logits of rows `[R, C]` of the last block's output: `[R, V]`.
    pub(crate) fn logits(&self, weights: &[Weights], x: &Tensor) -> Result<Tensor> {
        self.head.logits(&weights[self.blocks() - 1], x)
    }

    /// All blocks but the head, with `attend` in the place of attention: it gets the layer's number and what
    /// attention reads.
    fn layers(
        &self,
        weights: &[Weights],
        tokens: &Tensor,
        positions: &Tensor,
        mut attend: impl FnMut(usize, &Projected) -> Result<Tensor>,
    ) -> Result<Tensor> {
        let mut x = self.embedding.forward(&weights[0], tokens)?;
        for (layer, block) in self.inner_blocks.iter().enumerate() {
            let weights = &weights[layer + 1];
            let projected = block.project(weights, &x, (positions, &self.rope_tables.of(layer)), None)?;
            let attended = attend(layer, &projected)?;
            x = block.finish(weights, &x, &attended)?;
        }
        Ok(x)
    }

    /// Refuses a sequence for which there are no positions.
    pub(crate) fn check_length(&self, len: i64) -> Result<()> {
        let limit = self.config.max_position_embeddings;
        if len <= limit {
            return Ok(());
        }
        let why = self.config.why_no_longer();
        let problem = format!("of {len} tokens is longer than max_position_embeddings = {limit}{why}");
        Err(Error::Input { what: "sequence", problem })
    }

    /// Whether there are embeddings for all of `tokens`: where there is none, a device reads or writes beyond its memory.
    ///
    /// # Errors
    /// [`Error::Input`] with the first one that there is not.
    pub fn check_tokens(&self, tokens: impl IntoIterator<Item = i64>) -> Result<()> {
        let all = 0..self.config.vocab_size;
        let Some(unknown) = tokens.into_iter().find(|token| !all.contains(token)) else { return Ok(()) };
        let problem = format!("there is no token {unknown}: the model has those from 0 to {}", all.end - 1);
        Err(Error::Input { what: "tokens", problem })
    }

    /// Attention in a layer.
    pub(super) fn causal(&self, layer: usize) -> Causal {
        self.plain_blocks[layer].causal(self.config.window_of(layer))
    }
}

/// Caches rows of keys and values.
fn store(cache: &mut KvCache, layer: usize, it: &Projected, rows: &Tensor, places: &Tensor) -> Result<()> {
    cache.store(layer, &it.k.f_index_select(0, rows)?, &it.v.f_index_select(0, rows)?, places)
}

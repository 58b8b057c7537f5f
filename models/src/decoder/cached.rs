//! Forward passes that fill and read a KV cache.

use anyroll_backends::ops::{Causal, Packing};
use tch::Tensor;

use super::{Decoder, KvCache};
use crate::model::{Model, Weights};
use crate::{Error, Result};

/// Prompts as a packed batch, and the cache slots for their keys and values.
pub(crate) struct Prefill {
    /// int64 `[N]`.
    pub tokens: Tensor,
    pub packing: Packing,
    /// Last row of each prompt: int64 `[U]`.
    pub last_rows: Tensor,
    /// Rows to cache, and the slots to write them to (see [`KvCache::store`]); a row may go to several slots.
    pub rows: Tensor,
    pub places: Tensor,
}

/// Tokens of sequences whose earlier tokens are cached, one sequence after the other; all tensors are int64.
pub(crate) struct Pieces {
    /// `[N]`.
    pub tokens: Tensor,
    /// `[N]`.
    pub positions: Tensor,
    /// Like in [`Prefill`].
    pub rows: Tensor,
    pub places: Tensor,
    /// For each sequence, its number of new tokens, and the slots of all its tokens up to the last of these:
    /// `[M]`.
    pub contexts: Vec<(i64, Tensor)>,
}

/// One token of each of B sequences; all tensors are int64.
pub(crate) struct Step {
    /// `[B]`.
    pub tokens: Tensor,
    /// Position of the token, from 0: `[B]`.
    pub positions: Tensor,
    /// Length of the sequence, including this token: `[B]`.
    pub lengths: Tensor,
    /// Cache slot of the token: `[B]`.
    pub places: Tensor,
    /// Blocks of the sequence: `[B, W]`.
    pub tables: Tensor,
}

/// Experts that rows chose in the layers of a pass, int64 `[N, J]` each; `None`: nobody wants them.
pub(crate) type Chosen = Option<Vec<Tensor>>;

impl Decoder {
    /// Runs prompts with the training forward and caches their keys and values. Returns the logits of each
    /// prompt's last token `[U, V]`.
    pub(crate) fn prefill(
        &self,
        weights: &[Weights],
        prompts: &Prefill,
        cache: &mut KvCache,
        chosen: &mut Chosen,
    ) -> Result<Tensor> {
        let packing = &prompts.packing;
        let inputs = (&prompts.tokens, packing.positions());
        let x = self.layers(weights, inputs, chosen, |layer, [q, k, v]| {
            store(cache, layer, [k, v], &prompts.rows, &prompts.places)?;
            Ok(self.head.math.attention(q, k, v, packing, self.causal(layer))?.0)
        })?;
        self.logits(weights, &x.f_index_select(0, &prompts.last_rows)?)
    }

    /// Runs the next tokens of sequences and caches their keys and values. Returns the head's input for each
    /// token `[N, C]`.
    pub(crate) fn extend(
        &self,
        weights: &[Weights],
        pieces: &Pieces,
        cache: &mut KvCache,
        chosen: &mut Chosen,
    ) -> Result<Tensor> {
        self.layers(weights, (&pieces.tokens, &pieces.positions), chosen, |layer, [q, k, v]| {
            store(cache, layer, [k, v], &pieces.rows, &pieces.places)?;
            let (mut attended, mut start) = (Vec::with_capacity(pieces.contexts.len()), 0);
            for (rows, context) in &pieces.contexts {
                let (keys, values) = cache.read(layer, context)?;
                let q = q.f_narrow(0, start, *rows)?;
                let math = self.head.math;
                attended.push(math.attention_with_history(&q, &keys, &values, self.causal(layer))?);
                start += rows;
            }
            Ok(Tensor::f_cat(&attended, 0)?)
        })
    }

    /// Runs one token of each sequence. Returns its logits `[B, V]`.
    pub(crate) fn decode(
        &self,
        weights: &[Weights],
        step: &Step,
        cache: &mut KvCache,
        chosen: &mut Chosen,
    ) -> Result<Tensor> {
        let x = self.layers(weights, (&step.tokens, &step.positions), chosen, |layer, [q, k, v]| {
            cache.store(layer, k, v, &step.places)?;
            let (keys, values) = cache.layer(layer);
            let (tables, lengths) = (&step.tables, &step.lengths);
            self.head.math.decode_attention(q, (keys, values), (tables, lengths), self.causal(layer))
        })?;
        self.logits(weights, &x)
    }

    /// Returns the logits `[R, V]` of rows `[R, C]` of the last block's output.
    pub(crate) fn logits(&self, weights: &[Weights], x: &Tensor) -> Result<Tensor> {
        let weights = &weights[self.blocks() - 1];
        let logits = self.head.logits(weights, x)?;
        if let Some(split) = &self.split {
            return split.join_logits(&logits);
        }
        match &self.guide {
            Some(guide) => guide.added_to(&logits, weights, &self.head.normed(weights, x)?),
            None => Ok(logits),
        }
    }

    /// Runs all blocks but the head, with `attend` instead of attention. It receives the layer's index and
    /// the inputs of attention. Adds the rows' experts to `chosen`.
    fn layers(
        &self,
        weights: &[Weights],
        (tokens, positions): (&Tensor, &Tensor),
        chosen: &mut Chosen,
        mut attend: impl FnMut(usize, &[Tensor; 3]) -> Result<Tensor>,
    ) -> Result<Tensor> {
        let mut x = self.embed(&weights[0], tokens)?;
        for (layer, block) in self.inner_blocks.iter().enumerate() {
            let weights = &weights[layer + 1];
            let qkv = block.project(weights, &x, positions, &self.rope_tables.of(layer))?;
            let attended = attend(layer, &qkv)?;
            let (out, experts) = block.finish(weights, &x, &attended)?;
            x = out;
            if let Some(chosen) = chosen {
                chosen.extend(experts);
            }
        }
        Ok(x)
    }

    /// Returns the embeddings `[N, C]` of `tokens` `[N]`.
    pub(super) fn embed(&self, weights: &Weights, tokens: &Tensor) -> Result<Tensor> {
        match &self.split {
            None => self.embedding.forward(weights, tokens),
            Some(split) => split.embed(self.embedding, weights, tokens),
        }
    }

    /// Returns an error if a sequence is longer than the model's positions.
    pub(crate) fn check_length(&self, len: i64) -> Result<()> {
        let limit = self.config.max_position_embeddings;
        if len <= limit {
            return Ok(());
        }
        let why = self.config.why_no_longer();
        let problem = format!("of {len} tokens is longer than max_position_embeddings = {limit}{why}");
        Err(Error::Input { what: "sequence", problem })
    }

    /// Checks that all `tokens` have embeddings. Without one, a device would read or write out of bounds.
    ///
    /// # Errors
    /// [`Error::Input`] with the first unknown token.
    pub fn check_tokens(&self, tokens: impl IntoIterator<Item = i64>) -> Result<()> {
        let all = 0..self.config.vocab_size;
        let Some(unknown) = tokens.into_iter().find(|token| !all.contains(token)) else { return Ok(()) };
        let problem = format!("there is no token {unknown}: the model has tokens 0 to {}", all.end - 1);
        Err(Error::Input { what: "tokens", problem })
    }

    /// Returns the attention mask and scale of a layer.
    pub(super) fn causal(&self, layer: usize) -> Causal {
        self.plain_blocks[layer].causal(self.config.window_of(layer))
    }
}

/// Caches rows of keys and values.
fn store(
    cache: &mut KvCache,
    layer: usize,
    [k, v]: [&Tensor; 2],
    rows: &Tensor,
    places: &Tensor,
) -> Result<()> {
    cache.store(layer, &k.f_index_select(0, rows)?, &v.f_index_select(0, rows)?, places)
}

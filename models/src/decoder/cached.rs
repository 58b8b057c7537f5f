//! Forward passes that fill and read a KV cache.

use anyroll_backends::ops::{self, Packing};
use tch::Tensor;

use super::Decoder;
use crate::kv_cache::KvCache;
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

/// One token of each of B sequences; all tensors int64 `[B]`.
pub(crate) struct Step {
    pub tokens: Tensor,
    /// The token's position, from 0.
    pub positions: Tensor,
    /// The sequence in the cache.
    pub slots: Tensor,
    /// The sequence's length, this token included.
    pub lengths: Tensor,
    /// `slot * max_len + position`.
    pub places: Tensor,
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
        let rope_table = self.rope_table();
        let mut x = self.embedding.forward(&weights[0], &prompts.tokens)?;
        for layer in 0..self.config.num_hidden_layers {
            let weights = &weights[layer + 1];
            let projected = self.block.project(weights, &x, packing.positions(), &rope_table)?;
            let (k, v) = (&projected.k, &projected.v);
            let rows = &prompts.rows;
            cache.store(layer, &k.f_index_select(0, rows)?, &v.f_index_select(0, rows)?, &prompts.places)?;
            let (attended, _) = ops::attention(&projected.q, k, v, packing, self.block.scale())?;
            x = self.block.finish(weights, &x, &attended)?;
        }
        self.head.logits(&weights[self.blocks() - 1], &x.f_index_select(0, &prompts.last_rows)?)
    }

    /// Runs one token of each sequence. Returns its logits `[B, V]`.
    pub(crate) fn decode(&self, weights: &[Weights], step: &Step, cache: &mut KvCache) -> Result<Tensor> {
        let rope_table = self.rope_table();
        let mut x = self.embedding.forward(&weights[0], &step.tokens)?;
        for layer in 0..self.config.num_hidden_layers {
            let weights = &weights[layer + 1];
            let projected = self.block.project(weights, &x, &step.positions, &rope_table)?;
            cache.store(layer, &projected.k, &projected.v, &step.places)?;
            let (keys, values) = cache.layer(layer);
            let (slots, lengths, scale) = (&step.slots, &step.lengths, self.block.scale());
            let attended = ops::decode_attention(&projected.q, keys, values, slots, lengths, scale)?;
            x = self.block.finish(weights, &x, &attended)?;
        }
        self.head.logits(&weights[self.blocks() - 1], &x)
    }

    /// Refuses a sequence for which there are no positions.
    pub(crate) fn check_length(&self, len: i64) -> Result<()> {
        let limits = [
            ("max_position_embeddings", Some(self.config.max_position_embeddings)),
            ("sliding_window", self.config.sliding_window),
        ];
        for (field, limit) in limits {
            if let Some(limit) = limit.filter(|&limit| len > limit) {
                let problem = format!("of {len} tokens is longer than {field} = {limit}");
                return Err(Error::Input { what: "sequence", problem });
            }
        }
        Ok(())
    }
}

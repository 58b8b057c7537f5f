//! The keys and values of past tokens, for generation.

use tch::{Device, Kind, Tensor};

use crate::{DecoderConfig, Result};

/// Keys and values of every layer for a fixed number of sequences of a fixed greatest length.
///
/// Allocated whole when a generation phase begins and dropped when it ends. Each layer has its own two
/// tensors `[sequences, max_len, K, D]`, so a sequence that stops leaves the batch without any copy: rows of
/// the batch name their sequence.
#[derive(Debug)]
pub struct KvCache {
    layers: Vec<(Tensor, Tensor)>,
    sequences: usize,
    max_len: usize,
}

impl KvCache {
    /// Room for `sequences` sequences of up to `max_len` tokens each (a completion's last token needs none).
    ///
    /// # Errors
    /// libtorch's error (out of memory).
    pub fn new(
        config: &DecoderConfig,
        sequences: usize,
        max_len: usize,
        kind: Kind,
        device: Device,
    ) -> Result<KvCache> {
        let size = [sequences as i64, max_len as i64, config.num_key_value_heads, config.head_dim];
        let layers = (0..config.num_hidden_layers)
            .map(|_| Ok((Tensor::f_zeros(size, (kind, device))?, Tensor::f_zeros(size, (kind, device))?)))
            .collect::<Result<_>>()?;
        Ok(KvCache { layers, sequences, max_len })
    }

    /// How many sequences it has room for.
    pub fn sequences(&self) -> usize {
        self.sequences
    }

    /// The greatest length of a sequence.
    pub fn max_len(&self) -> usize {
        self.max_len
    }

    /// The device memory that it holds.
    pub fn bytes(&self) -> usize {
        let bytes = |tensor: &Tensor| tensor.numel() * tensor.kind().elt_size_in_bytes();
        self.layers.iter().map(|(keys, values)| bytes(keys) + bytes(values)).sum()
    }

    /// A layer's keys and values, each `[sequences, max_len, K, D]`.
    pub(crate) fn layer(&self, layer: usize) -> (&Tensor, &Tensor) {
        let (keys, values) = &self.layers[layer];
        (keys, values)
    }

    /// Copies rows of `k` and `v` `[R, K, D]` to `places` int64 `[R]`, where a place is
    /// `sequence * max_len + position`.
    pub(crate) fn store(&mut self, layer: usize, k: &Tensor, v: &Tensor, places: &Tensor) -> Result<()> {
        let (keys, values) = &mut self.layers[layer];
        for (cache, rows) in [(keys, k), (values, v)] {
            drop(cache.f_flatten(0, 1)?.f_index_copy_(0, places, rows)?);
        }
        Ok(())
    }
}

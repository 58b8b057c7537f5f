//! Keys and values of past tokens, in blocks.

use anyroll_backends::{Arena, DType, Stream};
use tch::Tensor;

use crate::{DecoderConfig, Result};

/// Number of tokens per block. Small, since a sequence's last block is half empty on average; not smaller,
/// since a step looks up one block index per block.
pub(crate) const BLOCK_TOKENS: usize = 16;

/// Block 0 belongs to no sequence: unused table entries refer to it, and padding rows of a batch write to it.
pub(crate) const SCRATCH_BLOCK: u32 = 0;

/// Keys and values of every layer, in blocks of 16 tokens that sequences allocate as they grow.
///
/// The memory is an arena, which can give it back between two engines, so that training has the room.
#[derive(Debug)]
pub struct KvCache {
    arena: Arena,
    /// Keys and values of each layer: `[held, BLOCK_TOKENS, K, D]`.
    layers: Vec<(Tensor, Tensor)>,
    /// Number of blocks in the arena, and of those that are used.
    held: usize,
    blocks: usize,
    bytes: usize,
}

impl KvCache {
    /// Allocates a cache of `blocks` blocks, one of which is reserved. `stream` is libtorch's compute stream.
    ///
    /// # Errors
    /// The device's error (out of memory).
    pub fn new(config: &DecoderConfig, blocks: usize, dtype: DType, stream: &Stream) -> Result<KvCache> {
        let bytes = KvCache::bytes_of(config, dtype, blocks);
        let arena = Arena::new("KV cache", stream, bytes)?;
        let size = [blocks as i64, BLOCK_TOKENS as i64, config.num_key_value_heads, config.head_dim];
        let part_bytes = bytes / config.num_hidden_layers / 2;
        let part =
            |index: usize| arena.buffer(index * part_bytes..(index + 1) * part_bytes, dtype).tensor(&size);
        let layers = (0..config.num_hidden_layers)
            .map(|layer| Ok((part(2 * layer)?, part(2 * layer + 1)?)))
            .collect::<Result<_>>()?;
        Ok(KvCache { arena, layers, held: blocks, blocks, bytes })
    }

    /// Gives the memory back once the work on it is done. The addresses stay.
    pub(crate) fn release(&self) -> Result<()> {
        Ok(self.arena.unmap()?)
    }

    /// Returns true if it has memory.
    pub(crate) fn is_mapped(&self) -> bool {
        self.arena.is_mapped()
    }

    /// Takes the memory again if it was given back, and uses the first `blocks` blocks, of which there are as many.
    pub(crate) fn restore(&mut self, blocks: usize) -> Result<()> {
        assert!(blocks <= self.held, "{blocks} blocks of {}", self.held);
        self.blocks = blocks;
        Ok(self.arena.map_zeroed()?)
    }

    /// Returns the number of blocks that it can use.
    pub(crate) fn held_blocks(&self) -> usize {
        self.held
    }

    /// Returns the number of blocks for `sequences` sequences of `tokens` tokens each, including the reserved
    /// one.
    pub fn blocks_for(sequences: usize, tokens: usize) -> usize {
        sequences * blocks_of(tokens) + 1
    }

    /// Returns the bytes of `blocks` blocks.
    pub fn bytes_of(config: &DecoderConfig, dtype: DType, blocks: usize) -> usize {
        blocks * block_bytes(config, dtype)
    }

    /// Returns the number of blocks that fit in `bytes`.
    pub fn blocks_in(config: &DecoderConfig, dtype: DType, bytes: usize) -> usize {
        bytes / block_bytes(config, dtype)
    }

    /// Returns the number of blocks.
    pub fn blocks(&self) -> usize {
        self.blocks
    }

    /// Returns the total number of tokens that sequences can have in the cache.
    pub(crate) fn tokens(&self) -> usize {
        (self.blocks - 1) * BLOCK_TOKENS
    }

    /// Returns the device memory in bytes.
    pub fn bytes(&self) -> usize {
        self.bytes
    }

    /// Returns a layer's keys and values, each `[blocks, BLOCK_TOKENS, K, D]`.
    pub(crate) fn layer(&self, layer: usize) -> (&Tensor, &Tensor) {
        let (keys, values) = &self.layers[layer];
        (keys, values)
    }

    /// Copies rows of `k` and `v` `[R, K, D]` to the slots `places`, int64 `[R]`. A slot is `block *
    /// BLOCK_TOKENS + token in the block`.
    pub(crate) fn store(&mut self, layer: usize, k: &Tensor, v: &Tensor, places: &Tensor) -> Result<()> {
        let (keys, values) = &mut self.layers[layer];
        for (cache, rows) in [(keys, k), (values, v)] {
            drop(cache.f_flatten(0, 1)?.f_index_copy_(0, places, rows)?);
        }
        Ok(())
    }

    /// Returns the keys and values at `places`, int64 `[R]`, each `[R, K, D]`.
    pub(crate) fn read(&self, layer: usize, places: &Tensor) -> Result<(Tensor, Tensor)> {
        let (keys, values) = &self.layers[layer];
        let read = |cache: &Tensor| cache.f_flatten(0, 1)?.f_index_select(0, places);
        Ok((read(keys)?, read(values)?))
    }
}

/// Returns the number of blocks that a sequence of `tokens` tokens needs.
pub(crate) fn blocks_of(tokens: usize) -> usize {
    tokens.div_ceil(BLOCK_TOKENS)
}

/// Returns the bytes of a block over all layers.
fn block_bytes(config: &DecoderConfig, dtype: DType) -> usize {
    let elements = config.num_key_value_heads as usize * config.head_dim as usize * BLOCK_TOKENS;
    2 * config.num_hidden_layers * elements * dtype.size_bytes()
}

#[cfg(test)]
mod tests {
    use anyroll_backends::{BackendKind, DeviceId, open};
    use tch::Kind;

    use super::*;

    #[test]
    fn a_cache_keeps_its_addresses_without_its_memory() {
        let device = open(DeviceId { backend: BackendKind::CPU, ordinal: 0 }).unwrap();
        let config = DecoderConfig::plain(2, 8, 2);
        let mut cache = KvCache::new(&config, 9, DType::F32, &Stream::torch(&device).unwrap()).unwrap();
        let address = |cache: &KvCache| cache.layer(1).1.data_ptr();
        let (before, rows) = (address(&cache), Tensor::ones([3, 2, 4], (Kind::Float, tch::Device::Cpu)));
        cache.release().unwrap();
        cache.restore(5).unwrap();
        assert_eq!((address(&cache), cache.blocks(), cache.held_blocks()), (before, 5, 9));
        assert_eq!(cache.tokens(), 4 * BLOCK_TOKENS);
        cache.store(1, &rows, &rows, &Tensor::from_slice(&[16i64, 17, 70])).unwrap();
        assert_eq!(cache.read(1, &Tensor::from_slice(&[16i64, 70, 17])).unwrap(), (rows.copy(), rows));
        cache.restore(9).unwrap();
        assert_eq!((address(&cache), cache.blocks()), (before, 9));
    }
}

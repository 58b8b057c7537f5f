//! How much an engine takes on, and the memory for it.

use std::sync::Arc;

use anyroll_backends::{DType, Stream};
use anyroll_models::{Decoder, Engine, KvCache, generation::Limits};
use anyroll_strategy::{Weights, shared};

use crate::Result;

/// What an engine takes on.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Room {
    /// Sequences that are live together; at least 1.
    pub sequences: usize,
    /// Tokens of the longest, its completion included.
    pub longest: usize,
    /// The most that the cache takes, as a part of the device's free memory.
    pub memory: f64,
}

impl Room {
    /// How many bytes of `free_bytes` have to be free for a cache for so much, beside what it leaves to others.
    pub fn wanted_bytes(self, model: &Decoder, weights: &Weights, free_bytes: usize) -> usize {
        let dtype = dtype(weights);
        let left = free_bytes as f64 * (1.0 - self.memory);
        KvCache::bytes_of(model.config(), dtype, self.blocks()) + left as usize
    }

    fn blocks(self) -> usize {
        KvCache::blocks_for(self.sequences, self.longest)
    }

    /// An engine with a cache for so much, or for as much of it as there is room. The cache lives as long as the
    /// engine. `version` is that of the weights.
    pub fn engine(
        self,
        model: &Arc<Decoder>,
        weights: &Weights,
        version: u64,
        compute: &Stream,
    ) -> Result<Engine> {
        let dtype = dtype(weights);
        let free_bytes = compute.device().memory_info()?.free_bytes as f64;
        let room = KvCache::blocks_in(model.config(), dtype, (free_bytes * self.memory) as usize);
        // Room for one is tried for in any case, and is a device's error where there is none.
        let least = KvCache::blocks_for(1, self.longest);
        let blocks = self.blocks().min(room).max(least);
        let cache = KvCache::new(model.config(), blocks, dtype, compute)?;
        Ok(Engine::new(model.clone(), shared(weights), version, cache, Limits::new(self.sequences))?)
    }
}

fn dtype(weights: &Weights) -> DType {
    DType::of(weights[0][0].kind()).expect("weights are in one of our element types")
}

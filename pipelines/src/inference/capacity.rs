//! Capacity of an engine, and its memory.

use std::sync::Arc;

use anyroll_backends::{DType, Stream};
use anyroll_models::{
    Decoder, Engine, KeptSteps, KvCache,
    generation::{Limits, Speculation},
};
use anyroll_strategy::{Weights, shared};

use crate::Result;

/// Capacity of an engine.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Capacity {
    /// Sequences in flight; at least 1.
    pub sequences: usize,
    /// Tokens of the longest sequence, completion included.
    pub longest: usize,
    /// Fraction of the device's free memory that the cache may take.
    pub memory: f64,
    /// Speculation, if there is any.
    pub speculation: Option<Speculation>,
}

impl Capacity {
    /// Bytes that must be free for a cache of this capacity, of `free_bytes`, including the fraction left to
    /// others.
    pub fn wanted_bytes(self, model: &Decoder, weights: &Weights, free_bytes: usize) -> usize {
        let dtype = dtype(weights);
        let left = free_bytes as f64 * (1.0 - self.memory);
        KvCache::bytes_of(model.config(), dtype, self.blocks()) + left as usize
    }

    /// Returns true if the cache of an engine has all of the capacity. Other engines leave nothing to the next one, whose cache
    /// would otherwise depend on earlier ones.
    pub fn is_met_by(self, engine: &Engine) -> bool {
        // One block is reserved.
        engine.load().blocks + 1 >= self.blocks()
    }

    fn limits(self) -> Limits {
        Limits { speculation: self.speculation, ..Limits::new(self.sequences) }
    }

    fn blocks(self) -> usize {
        KvCache::blocks_for(self.sequences, self.longest)
    }

    /// Creates an engine with a cache for this capacity, or for as much as fits, out of the `kept` steps of an engine before if
    /// they fit. `version` is that of the weights.
    pub fn engine(
        self,
        model: &Arc<Decoder>,
        weights: &Weights,
        version: u64,
        compute: &Stream,
        kept: Option<KeptSteps>,
    ) -> Result<Engine> {
        let (dtype, limits) = (dtype(weights), self.limits());
        let room_bytes = (compute.device().memory_info()?.free_bytes as f64 * self.memory) as usize;
        let fits =
            |kept: &KeptSteps| kept.fits(model, limits, self.blocks()) && kept.missing_bytes() <= room_bytes;
        if let Some(kept) = kept.filter(fits) {
            return Ok(Engine::with_kept(kept, shared(weights), version, self.blocks(), limits)?);
        }
        let room = KvCache::blocks_in(model.config(), dtype, room_bytes);
        // Space for one sequence is always requested; the device fails if there is none.
        let least = KvCache::blocks_for(1, self.longest);
        // Ranks that sample together have the same sequences in their caches.
        let room = model.least_of_ranks(room, weights[0][0].device())?;
        let blocks = self.blocks().min(room).max(least);
        let cache = KvCache::new(model.config(), blocks, dtype, compute)?;
        Ok(Engine::new(model.clone(), shared(weights), version, cache, limits)?)
    }
}

fn dtype(weights: &Weights) -> DType {
    DType::of(weights[0][0].kind()).expect("weights are in one of our element types")
}

//! Samples that have ended and may be followed: their tokens, and the cache blocks of their keys and values.

use std::collections::HashMap;

use super::{SampleId, block_pool::BlockPool, sequence::Sequence};
use crate::decoder::kv_cache::blocks_of;

/// A sample that has ended.
#[derive(Debug)]
struct CachedSample {
    id: SampleId,
    /// Tokens of the prompt and the completion. The last one was never an input, so it is not cached.
    tokens: Vec<i64>,
    /// Cache blocks of the other tokens.
    blocks: Vec<u32>,
}

/// CachedSample samples, in the order in which they ended. If room is needed, the last one is freed first:
/// earlier ones have waited longer, and will be followed sooner.
#[derive(Debug, Default)]
pub(super) struct PrefixCache(Vec<CachedSample>);

impl PrefixCache {
    /// Keeps the cached tokens of an ended sequence, and takes its blocks.
    pub fn keep(&mut self, sequence: &mut Sequence, pool: &mut BlockPool) {
        pool.give_back(sequence.blocks.drain(blocks_of(sequence.len() - 1)..));
        let (id, tokens) = (sequence.id, sequence.tokens().collect());
        self.0.push(CachedSample { id, tokens, blocks: std::mem::take(&mut sequence.blocks) });
    }

    /// Returns the number of kept samples.
    pub fn len(&self) -> usize {
        self.0.len()
    }

    /// Returns the tokens of a sample, if it is kept.
    pub fn tokens(&self, id: SampleId) -> Option<&[i64]> {
        self.0.iter().find(|sample| sample.id == id).map(|sample| &*sample.tokens)
    }

    /// Returns the number of cached tokens of the sample that a sequence follows.
    pub fn cached(&self, follows: Option<SampleId>) -> usize {
        follows.and_then(|id| self.tokens(id)).map_or(0, |tokens| tokens.len() - 1)
    }

    /// Removes the sample that a sequence follows, and returns its blocks; empty if it is not kept.
    pub fn take(&mut self, follows: Option<SampleId>) -> Vec<u32> {
        let index = self.0.iter().position(|sample| Some(sample.id) == follows);
        index.map_or(Vec::new(), |index| self.0.remove(index).blocks)
    }

    /// Frees the last kept sample other than `spared`. Returns false if there was none.
    pub fn give_back_last(&mut self, spared: Option<SampleId>, pool: &mut BlockPool) -> bool {
        let Some(index) = self.0.iter().rposition(|sample| Some(sample.id) != spared) else { return false };
        pool.give_back(self.0.remove(index).blocks);
        true
    }

    /// Returns the number of blocks that become free if all samples but `spared` are freed.
    pub fn freeable(&self, spared: Option<SampleId>, pool: &BlockPool) -> usize {
        let mut readers: HashMap<u32, u32> = HashMap::new();
        let others = self.0.iter().filter(|sample| Some(sample.id) != spared);
        others.flat_map(|sample| &sample.blocks).for_each(|&block| *readers.entry(block).or_default() += 1);
        readers.into_iter().filter(|&(block, kept)| pool.readers(block) == kept).count()
    }
}

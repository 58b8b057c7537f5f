//! Samples that have ended and may be followed: their tokens, and the blocks in which keys and values of these lie.

use std::collections::HashMap;

use super::{SampleId, block_pool::BlockPool, kv_cache::blocks_of, sequence::Sequence};

/// A sample that has ended.
#[derive(Debug)]
struct Kept {
    id: SampleId,
    /// Of its prompt and of all that came of it, of which the last one was never an input: it is not cached.
    tokens: Vec<i64>,
    /// What the others lie in.
    blocks: Vec<u32>,
}

/// What is kept, in the order in which the samples ended. Whoever needs room takes it from the last one first: those before
/// have waited longer, and will be followed sooner.
#[derive(Debug, Default)]
pub(super) struct KeptSamples(Vec<Kept>);

impl KeptSamples {
    /// Keeps what is cached of a sequence that has ended; it is left without a block.
    pub fn keep(&mut self, sequence: &mut Sequence, pool: &mut BlockPool) {
        pool.give_back(sequence.blocks.drain(blocks_of(sequence.len() - 1)..));
        let (id, tokens) = (sequence.id, sequence.tokens().collect());
        self.0.push(Kept { id, tokens, blocks: std::mem::take(&mut sequence.blocks) });
    }

    /// How many samples are kept.
    pub fn len(&self) -> usize {
        self.0.len()
    }

    /// The tokens of a sample, if it is kept.
    pub fn tokens(&self, id: SampleId) -> Option<&[i64]> {
        self.0.iter().find(|kept| kept.id == id).map(|kept| &*kept.tokens)
    }

    /// How many tokens are cached of the sample that a sequence follows.
    pub fn cached(&self, follows: Option<SampleId>) -> usize {
        follows.and_then(|id| self.tokens(id)).map_or(0, |tokens| tokens.len() - 1)
    }

    /// The blocks of the sample that a sequence follows; empty if it is not kept.
    pub fn take(&mut self, follows: Option<SampleId>) -> Vec<u32> {
        let index = self.0.iter().position(|kept| Some(kept.id) == follows);
        index.map_or(Vec::new(), |index| self.0.remove(index).blocks)
    }

    /// Gives back the blocks of the last one but `spared`; whether there was one.
    pub fn give_back_last(&mut self, spared: Option<SampleId>, pool: &mut BlockPool) -> bool {
        let Some(index) = self.0.iter().rposition(|kept| Some(kept.id) != spared) else { return false };
        pool.give_back(self.0.remove(index).blocks);
        true
    }

    /// How many more blocks are free when all but `spared` are given back.
    pub fn freeable(&self, spared: Option<SampleId>, pool: &BlockPool) -> usize {
        let mut readers: HashMap<u32, u32> = HashMap::new();
        let others = self.0.iter().filter(|kept| Some(kept.id) != spared);
        others.flat_map(|kept| &kept.blocks).for_each(|&block| *readers.entry(block).or_default() += 1);
        readers.into_iter().filter(|&(block, kept)| pool.readers(block) == kept).count()
    }
}

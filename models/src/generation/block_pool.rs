//! Allocation of cache blocks, with a reference count per block.

use crate::decoder::kv_cache::SCRATCH_BLOCK;

/// Tracks a cache's blocks. A block is free, or read by one or more sequences: those of a group share the
/// blocks that their prompt fills.
#[derive(Debug)]
pub(super) struct BlockPool {
    readers: Vec<u32>,
    /// A stack: the block freed last is taken first.
    free: Vec<u32>,
}

impl BlockPool {
    /// Tracks a cache of `blocks` blocks, all free but the scratch block.
    pub fn new(blocks: usize) -> BlockPool {
        let free = (0..blocks as u32).rev().filter(|&block| block != SCRATCH_BLOCK).collect();
        BlockPool { readers: vec![0; blocks], free }
    }

    /// Returns the number of blocks available to sequences.
    pub fn capacity(&self) -> usize {
        self.readers.len() - 1
    }

    pub fn free(&self) -> usize {
        self.free.len()
    }

    /// Takes a free block for one reader.
    pub fn take(&mut self) -> Option<u32> {
        let block = self.free.pop()?;
        self.readers[block as usize] = 1;
        Some(block)
    }

    /// Adds a reader to a block that has at least one.
    pub fn share(&mut self, block: u32) {
        assert!(self.readers[block as usize] > 0, "block {block} is free");
        self.readers[block as usize] += 1;
    }

    /// Returns the number of sequences that read the block.
    pub fn readers(&self, block: u32) -> u32 {
        self.readers[block as usize]
    }

    /// Removes a reader from each of `blocks`; those without readers become free.
    pub fn give_back(&mut self, blocks: impl IntoIterator<Item = u32>) {
        for block in blocks {
            let readers = &mut self.readers[block as usize];
            *readers = readers.checked_sub(1).expect("a block has a reader until it is freed");
            if *readers == 0 {
                self.free.push(block);
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_block_is_free_when_its_last_reader_is_gone() {
        let mut pool = BlockPool::new(3);
        assert_eq!((pool.capacity(), pool.free()), (2, 2));
        let (first, second) = (pool.take().unwrap(), pool.take().unwrap());
        assert_ne!(first, second);
        assert!(first != SCRATCH_BLOCK && second != SCRATCH_BLOCK && pool.take().is_none());
        pool.share(first);
        assert_eq!((pool.readers(first), pool.readers(second)), (2, 1));
        pool.give_back([first, second]);
        assert_eq!((pool.free(), pool.take()), (1, Some(second)));
        pool.give_back([first]);
        assert_eq!(pool.take(), Some(first));
    }
}

//! Order of a pass through a model's blocks: [`crate::Zero`] runs in it, [`crate::plan`] counts bytes in it, and
//! [`crate::timeline`] seconds.
//!
//! At each [`Visit`], weights of the block's units are made whole and those of `next` start to be gathered. Then the
//! block runs. Units that are `done` leave behind it: backward reduces their gradients, and their weights are freed.

use std::ops::Range;

use anyroll_models::Model;

/// Visit of a block in a pass.
pub(crate) struct Visit<'a> {
    pub(crate) block: usize,
    /// Units that the block reads.
    pub(crate) units: &'a [usize],
    /// Units of the block visited next.
    pub(crate) next: &'a [usize],
    /// Units of the block that no later visit of the pass reads. The gradient of a trained one is complete then.
    pub(crate) done: Vec<usize>,
}

impl<'a> Visit<'a> {
    fn new<M: Model>(model: &'a M, block: usize, next: Option<usize>, later: Range<usize>) -> Self {
        let units = model.units_of(block);
        let is_done = |unit: &usize| !later.clone().any(|other| model.units_of(other).contains(unit));
        let next = next.map_or(&[][..], |next| model.units_of(next));
        Self { block, units, next, done: units.iter().copied().filter(is_done).collect() }
    }
}

/// Visits of a forward pass, from the first block to the last. If it `trains`, backward enters the last block again,
/// whose units are then not done.
pub(crate) fn forward<M: Model>(model: &M, trains: bool) -> impl Iterator<Item = Visit<'_>> {
    let blocks = model.blocks();
    (0..blocks).map(move |block| match block + 1 < blocks {
        true => Visit::new(model, block, Some(block + 1), block + 1..blocks),
        false => Visit::new(model, block, None, if trains { block..blocks } else { 0..0 }),
    })
}

/// Visits of a backward pass, from the last block to `first`. No block before it reads a trained unit, unless `first` is 0.
pub(crate) fn backward<M: Model>(model: &M, first: usize) -> impl Iterator<Item = Visit<'_>> {
    let below = move |block: usize| (block > first).then(|| block - 1);
    (first..model.blocks()).rev().map(move |block| Visit::new(model, block, below(block), first..block))
}

/// Returns the first block that reads a trained unit: no block before it needs a gradient.
pub(crate) fn first_trained_block<M: Model>(model: &M) -> usize {
    let reads_trained =
        |&block: &usize| model.units_of(block).iter().any(|&unit| model.units()[unit].trainable);
    (0..model.blocks()).find(reads_trained).unwrap_or(model.blocks())
}

//! Blocks that read a unit.

use anyroll_models::Model;

/// Returns the first block that reads a unit, which is the last one to write its gradient.
pub(crate) fn first_reader<M: Model>(model: &M, unit: usize) -> usize {
    (0..model.blocks()).find(|&block| model.units_of(block).contains(&unit)).expect("every unit has a reader")
}

/// Returns the first block that reads a trained unit: no block before it needs a gradient.
pub(crate) fn first_trained_block<M: Model>(model: &M) -> usize {
    let reads_trained =
        |&block: &usize| model.units_of(block).iter().any(|&unit| model.units()[unit].trainable);
    (0..model.blocks()).find(reads_trained).unwrap_or(model.blocks())
}

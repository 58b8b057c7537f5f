//! Inputs of a decoder block that depend on the batch and the layer.

use anyroll_backends::ops::Packing;
use tch::Tensor;

use super::lora::AdapterDropout;
use super::routing::LayerRouting;
use crate::slice::Slice;

/// A block's inputs that depend on the batch and the layer.
pub(super) struct Layer<'a> {
    pub packing: &'a Packing,
    /// This rank's rows, if several ranks run the batch together.
    pub slice: Option<&'a Slice>,
    /// See [`rope_table`](anyroll_backends::ops::rope_table).
    pub rope_table: Tensor,
    /// Number of tokens that a token sees, including itself; `None`: all before it.
    pub window: Option<i64>,
    /// Dropout of adapters, in training.
    pub drops: Option<AdapterDropout<'a>>,
    /// Routing of the layer's experts, if it has some.
    pub routing: LayerRouting<'a>,
}

impl Layer<'_> {
    /// Returns the place of each of this rank's rows in its sequences.
    pub fn positions(&self) -> &Tensor {
        self.slice.map_or_else(|| self.packing.positions(), |slice| &slice.positions)
    }
}

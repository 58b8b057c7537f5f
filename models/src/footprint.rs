//! [`Footprint`]: the memory of a pass, computed without a batch, weights or a device.

use std::collections::HashMap;
use std::fmt::Debug;
use std::sync::{Mutex, PoisonError};

use anyroll_backends::DType;

use crate::Result;
use crate::model::Model;

/// Memory of the libtorch tensors that one block creates and keeps, in bytes. Weights and their gradients do
/// not count.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct BlockBytes {
    /// Output of the block before, which it reads.
    pub input: usize,
    /// Bytes that forward saves for backward; the input counts here if it is saved.
    pub saved: usize,
    /// Bytes that [`Model::thin`] leaves of `saved`.
    pub thinned: usize,
    /// Peak of a forward that saves, with its output and without its input.
    pub forward: usize,
    /// Peak of a forward that saves nothing.
    pub scoring: usize,
    /// Gradient of its output.
    pub output_grad: usize,
    /// Peak of backward, in addition to saved bytes and the gradient of its output.
    pub backward: usize,
}

/// The properties of a pass that its memory depends on.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Runs {
    /// Element type of weights and activations.
    pub dtype: DType,
    /// True on the host, whose kernels need only a few rows of memory. (That holds in fp32; in 16 bits they
    /// are compositions, whose temporaries are not counted.)
    pub on_host: bool,
}

impl Runs {
    /// Returns the bytes of an element.
    pub(crate) fn size(self) -> usize {
        self.dtype.size_bytes()
    }
}

/// A model that computes the memory of its passes, block by block. The caller knows how many blocks are in
/// memory at a time.
pub trait Footprint: Model {
    /// The properties of a batch that memory depends on.
    type Size;

    /// Returns the bytes of a pass of `block` over a batch of this size. `weights_last` is true if the
    /// weights stay in place from forward to backward ([`Weights::lasting`](crate::model::Weights::lasting)).
    fn block_bytes(&self, block: usize, size: &Self::Size, runs: Runs, weights_last: bool) -> BlockBytes;
}

/// Measured bytes, kept under what was asked: the plans of a run's choices ask for the same many times.
#[derive(Debug)]
pub(crate) struct Memo<V>(Mutex<HashMap<String, V>>);

impl<V> Default for Memo<V> {
    fn default() -> Self {
        Memo(Mutex::default())
    }
}

impl<V: Copy> Memo<V> {
    /// Returns the bytes for `asked`, which `measure` finds at the first time. What is measured runs with values, too, so that
    /// a failure is an error in the program.
    pub fn once(&self, asked: impl Debug, measure: impl FnOnce() -> Result<V>) -> V {
        let known = || self.0.lock().unwrap_or_else(PoisonError::into_inner);
        let asked = format!("{asked:?}");
        if let Some(&found) = known().get(&asked) {
            return found;
        }
        let found = measure().expect("a function that is measured runs");
        known().insert(asked, found);
        found
    }
}

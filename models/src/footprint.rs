//! [`Footprint`]: the memory of a pass, told before there is a batch, a weight or a device.

use anyroll_backends::DType;

use crate::model::Model;

/// What tensors of libtorch one block makes and keeps, in bytes. Weights and their gradients are none of them.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct BlockBytes {
    /// The output of the block before, which it reads.
    pub input: usize,
    /// What forward saves for backward; the input is counted here if it is saved.
    pub saved: usize,
    /// What [`Model::thin`] leaves of it.
    pub thinned: usize,
    /// The most that exists at a time in a forward that saves, its output included, the input not.
    pub forward: usize,
    /// The same of one that saves nothing.
    pub scoring: usize,
    /// The gradient of its output.
    pub output_grad: usize,
    /// The most that backward makes at a time, beside what was saved and the gradient of its output.
    pub backward: usize,
}

/// How a pass computes, as far as its memory depends on it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Runs {
    /// Of weights and activations.
    pub dtype: DType,
    /// On the host, whose kernels need no memory but a few rows' (in fp32; in 16 bits they are compositions, whose
    /// temporaries are not counted).
    pub on_host: bool,
}

impl Runs {
    /// Bytes of an element.
    pub(crate) fn size(self) -> usize {
        self.dtype.size_bytes()
    }
}

/// A model that knows the memory of its passes. It says what its own code does, block by block; how many blocks'
/// there are at a time is for whoever runs them to say.
pub trait Footprint: Model {
    /// A batch, as far as memory depends on it.
    type Size;

    /// The bytes of a pass of `block` over a batch of this size, whose weights last from forward to backward or may go in
    /// between ([`Weights::lasting`](crate::model::Weights::lasting)).
    fn block_bytes(&self, block: usize, size: &Self::Size, runs: Runs, weights_last: bool) -> BlockBytes;
}

//! Arguments that the kernels of devices and of the CPU have in common.

use std::ffi::c_void;

/// The values of a `[rows, heads, dim]` view: each head is dense, rows lie `stride` elements apart. Mirrors `Heads` in
/// `shim/vectors.h`, `kernels/model.cu` and `kernels/attention.cuh`, and `Queries` in `kernels/decode.cuh`.
#[derive(Clone, Copy, Debug)]
#[repr(C)]
pub(crate) struct Heads {
    pub data: *mut c_void,
    pub stride: i64,
}

/// Activation of a gated MLP: the gate times the logistic function, either of itself or of an approximation of the normal
/// distribution (Hendrycks and Gimpel, 2016).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Activation {
    /// g sigmoid(g).
    Silu,
    /// g sigmoid(2 z) = g (1 + tanh(z)) / 2, z = sqrt(2 / pi) (g + 0.044715 g^3).
    GeluTanh,
}

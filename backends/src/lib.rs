//! Memory, order and collectives of one accelerator, and the tensor library on top of it.

mod ffi;
pub mod ops;

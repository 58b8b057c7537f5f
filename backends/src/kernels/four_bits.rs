//! The kernels of `kernels/four_bits.cu`, for devices that compile them at run time.

use std::ffi::c_void;

use tch::Kind;

use super::{
    Architecture, Source, grid, launch,
    rows::{THREADS, blocks_for, typed, typed_kernels},
    source_text,
};
use crate::{Device, Result};

pub(crate) const SOURCE: Source = Source {
    file: c"four_bits.cu",
    text: source_text!(["elements.cuh"], "four_bits.cu"),
    kernels: &NAMES,
    architecture: Architecture::Any,
};

typed_kernels! { 1:
    FROM_FOUR_BITS = "from_four_bits";
}

/// Threads that widen a block of values.
const THREADS_OF_BLOCK: i64 = 8;

/// Widens `blocks` blocks of 64 values each to `kind`, a float, on libtorch's stream.
///
/// # Safety
/// `packed` has 36 bytes of each block on `device`, at a multiple of 4, and `values` 64 elements of each, at a multiple of 32
/// bytes.
pub(crate) unsafe fn widen(
    device: &dyn Device,
    kind: Kind,
    values: *mut c_void,
    packed: *const c_void,
    blocks: i64,
) -> Result<()> {
    let most = blocks_for(blocks * THREADS_OF_BLOCK);
    // SAFETY: the kernel's signature and the caller's promise.
    unsafe {
        launch!(device, typed(FROM_FOUR_BITS, kind), grid(most, THREADS), [values, packed, blocks as u64])
    }
}

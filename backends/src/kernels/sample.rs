//! The kernels of `kernels/sample.cu`, for devices that compile them at run time. They run on libtorch's stream.

use std::ffi::c_void;

use tch::Kind;

use super::{
    Source, grid, launch,
    rows::{Typed, ceil_div, has_kernels, lanes, typed, typed_names, typed_sources},
};
use crate::{Device, Result};

const MEASURE_STRIPES: Typed = typed_names!("measure_stripes");
const SAMPLE: Typed = typed_names!("sample");

/// CUDA C++ that HIP compiles too.
pub(crate) const SOURCES: [Source; 3] =
    typed_sources!("sample.cu", ["elements.cuh", "block.cuh"], [MEASURE_STRIPES, SAMPLE]);

const THREADS: u32 = 1024;
/// Stripes of 32 packs that a row of logits may have.
const MAX_STRIPES: i64 = 2048;
/// Stripes that a block measures, and its threads.
const STRIPES_OF_A_BLOCK: i64 = 32;
const STRIPE_THREADS: u32 = 256;

/// Returns true if there are kernels for a vocabulary of this size.
pub(crate) fn fit(kind: Kind, vocab: i64) -> bool {
    has_kernels(kind) && stripes(kind, vocab) <= MAX_STRIPES
}

/// Number of stripes of a row of logits. The kernels keep two fp32 values for each.
pub(crate) fn stripes(kind: Kind, vocab: i64) -> i64 {
    ceil_div(vocab, 32 * lanes(kind))
}

/// Chooses a token for each row of logits `[rows, vocab]`. `measured`, fp32 `[rows, stripes, 2]`, is scratch memory.
///
/// # Safety
/// Addresses of as many values of `kind` (or of the type that the kernel says) on `device` as the sizes say, which live
/// until the work is done; what is written overlaps with nothing else.
pub(crate) unsafe fn sample(
    device: &dyn Device,
    kind: Kind,
    (logits, rows, vocab): (*mut c_void, i64, i64),
    (choices, uniforms): (*mut c_void, *mut c_void),
    (measured, seen): (*mut c_void, *mut c_void),
    (tokens, positions): (*mut c_void, *mut c_void),
    (chosen, logprobs): (*mut c_void, *mut c_void),
) -> Result<()> {
    let blocks = rows * ceil_div(stripes(kind, vocab), STRIPES_OF_A_BLOCK);
    let vocab = vocab as i32;
    // SAFETY: the kernels' signatures, and the caller's promise.
    unsafe {
        launch!(
            device,
            typed(MEASURE_STRIPES, kind),
            grid(blocks, STRIPE_THREADS).early(),
            [logits, vocab, choices, measured]
        )?;
        launch!(
            device,
            typed(SAMPLE, kind),
            grid(rows, THREADS).early(),
            [logits, vocab, choices, measured, uniforms, seen, tokens, positions, chosen, logprobs]
        )
    }
}

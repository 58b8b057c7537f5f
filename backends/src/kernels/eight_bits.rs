//! The kernels of `kernels/eight_bits.cu`: rows of bf16 in 8 bits, and what follows their products. They run on libtorch's
//! stream.

use std::ffi::{CStr, c_void};

use tch::Kind;

use super::{
    Source, grid, launch,
    product::ARCHITECTURE,
    rows::{THREADS, blocks_for, ceil_div, packs, threads_up_to},
    source_text,
};
use crate::{Device, Result};

const ROUND_ROWS: &CStr = c"round_rows";
const SCALE_PRODUCT: &CStr = c"scale_product";
const SWIGLU_PRODUCT: &CStr = c"swiglu_product";
const ADD_PRODUCT_AND_NORM: &CStr = c"add_product_and_norm";

pub(crate) const SOURCE: Source = Source {
    file: c"eight_bits.cu",
    text: source_text!(["elements.cuh", "block.cuh", "rows.cuh"], "eight_bits.cu"),
    kernels: &[ROUND_ROWS, SCALE_PRODUCT, SWIGLU_PRODUCT, ADD_PRODUCT_AND_NORM],
    architecture: ARCHITECTURE,
};

/// Columns of rows in 8 bits are a multiple of this.
pub(crate) const ROUNDED_COLUMNS: i64 = 64;
/// Columns of a product are a multiple of this: the library's rule, and more than a pack.
pub(crate) const PRODUCT_COLUMNS: i64 = 16;
/// Values that a thread rounds at a time.
const OF_THREAD: i64 = 16;

/// A product in bf16 without its scales, fp32 of its rows and of its columns.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub(crate) struct Scaled {
    pub(crate) product: *mut c_void,
    pub(crate) of_rows: *mut f32,
    pub(crate) of_columns: *mut f32,
}

/// Rounds the rows of `x` to e4m3 values in `to`, with a scale for each in `scales`.
///
/// # Safety
/// For this and all functions below: addresses are those of dense tensors on `device` with these sizes, bf16 unless the name
/// is of scales or of 8 bits, aligned to 16 bytes, and live until the work is done. Outputs overlap with nothing else.
pub(crate) unsafe fn round_rows(
    device: &dyn Device,
    x: *mut c_void,
    (to, scales): (*mut c_void, *mut f32),
    [rows, columns]: [i64; 2],
) -> Result<()> {
    let threads = threads_up_to(1024, ceil_div(columns, OF_THREAD));
    // SAFETY: the kernel's signature, and the caller's promise.
    unsafe { launch!(device, ROUND_ROWS, grid(rows, threads).early(), [x, to, scales, columns]) }
}

/// Writes the scaled product, plus `bias` unless that is null, to `y`, which may be the product.
///
/// # Safety
/// The same as [`round_rows`].
pub(crate) unsafe fn scale_product(
    device: &dyn Device,
    scaled: Scaled,
    (bias, y): (*mut c_void, *mut c_void),
    [rows, columns]: [i64; 2],
) -> Result<()> {
    let grid = grid(blocks_for(packs(Kind::BFloat16, rows * columns)), THREADS).early();
    // SAFETY: the kernel's signature, and the caller's promise.
    unsafe { launch!(device, SCALE_PRODUCT, grid, [scaled, bias, y, rows, columns]) }
}

/// Writes SwiGLU of a product of `[rows, 2 size]` to `y`.
///
/// # Safety
/// The same as [`round_rows`].
pub(crate) unsafe fn swiglu_product(
    device: &dyn Device,
    scaled: Scaled,
    y: *mut c_void,
    [rows, size]: [i64; 2],
) -> Result<()> {
    let grid = grid(blocks_for(packs(Kind::BFloat16, rows * size)), THREADS).early();
    // SAFETY: the kernel's signature, and the caller's promise.
    unsafe { launch!(device, SWIGLU_PRODUCT, grid, [scaled, y, rows, size]) }
}

/// Adds the product to `y`, and writes the norm of `y` with these weights to `normed`, which may be the product. Unless it is
/// null, `to` gets the norm in 8 bits, with `scales`, which may be those of the product's rows.
///
/// # Safety
/// The same as [`round_rows`].
pub(crate) unsafe fn add_product_and_norm(
    device: &dyn Device,
    scaled: Scaled,
    y: *mut c_void,
    (weight, eps): (*mut c_void, f32),
    (normed, to, scales): (*mut c_void, *mut c_void, *mut f32),
    [rows, dim]: [i64; 2],
) -> Result<()> {
    let grid = grid(rows, threads_up_to(1024, packs(Kind::BFloat16, dim))).early();
    // SAFETY: the kernel's signature, and the caller's promise.
    unsafe { launch!(device, ADD_PRODUCT_AND_NORM, grid, [scaled, y, weight, eps, normed, to, scales, dim]) }
}

//! The kernels of `kernels/exchange.cu`, for devices that compile them at run time. They run on libtorch's stream.

use std::ffi::c_void;

use tch::Kind;

use super::{
    Source, grid, launch,
    rows::{Typed, ceil_div, lanes, typed, typed_names},
    source_text,
};
use crate::{Device, Result};

const SUM: Typed = typed_names!("sum_of_host");
const JOIN: Typed = typed_names!("join_of_host");

/// Ranks that the kernels know at most.
pub(crate) const MOST_RANKS: usize = 8;
/// Blocks of a kernel at most, which all run at the same time.
pub(crate) const MOST_BLOCKS: usize = 96;
const THREADS: u32 = 512;

/// CUDA C++ with the order of memory in NVIDIA's assembly.
pub(crate) const SOURCES: [Source; 3] = [
    source(
        c"exchange.cu f32",
        source_text!(["elements.cuh"], "exchange.cu", "KERNELS(float, f32)\n"),
        &OF_F32,
    ),
    source(
        c"exchange.cu bf16",
        source_text!(["elements.cuh"], "exchange.cu", "KERNELS(Bf16, bf16)\n"),
        &OF_BF16,
    ),
    source(c"exchange.cu f16", source_text!(["elements.cuh"], "exchange.cu", "KERNELS(F16, f16)\n"), &OF_F16),
];
const OF_F32: [&std::ffi::CStr; 2] = [SUM[0], JOIN[0]];
const OF_BF16: [&std::ffi::CStr; 2] = [SUM[1], JOIN[1]];
const OF_F16: [&std::ffi::CStr; 2] = [SUM[2], JOIN[2]];

const fn source(
    file: &'static std::ffi::CStr,
    text: &'static str,
    kernels: &'static [&'static std::ffi::CStr],
) -> Source {
    Source { file, text, kernels, architecture: super::Architecture::NvidiaFrom(70) }
}

/// The memory of all ranks, as the kernels take it.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub(crate) struct Ranks {
    pub(crate) parts: [u64; MOST_RANKS],
    pub(crate) turns: [u64; MOST_RANKS],
    pub(crate) rank: i32,
    pub(crate) count: i32,
    pub(crate) limit_ns: u64,
}

/// Memory of a rank for the kernels: the turns that its blocks have taken, and a number that says if a wait has failed.
#[derive(Clone, Copy, Debug)]
pub(crate) struct State {
    pub(crate) taken: *mut c_void,
    pub(crate) failed: *mut c_void,
}

/// Returns true if a device has the kernels for values of `kind`.
pub(crate) fn exist(device: &dyn Device, kind: Kind) -> bool {
    super::rows::has_kernels(kind) && device.has_kernel(typed(SUM, kind))
}

/// Writes the sum of all ranks' parts of `len` elements to `out`, or adds it, rounded, to `out`.
///
/// # Safety
/// `out` and the parts have `len` elements of `kind`; `state` and the turns belong to this exchange; all live until the work is
/// done, and every rank makes the same call.
pub(crate) unsafe fn sum(
    device: &dyn Device,
    kind: Kind,
    ranks: Ranks,
    State { taken, failed }: State,
    (out, len): (*mut c_void, i64),
    is_added: bool,
) -> Result<()> {
    let grid = grid(blocks(len, kind), THREADS);
    // SAFETY: the kernel's signature, and the caller's promise.
    unsafe {
        launch!(device, typed(SUM, kind), grid, [ranks, taken, failed, out, len as u32, i32::from(is_added)])
    }
}

/// Writes rows of `all` columns to `out`: of each rank's part, of `width` columns, the first `count`.
///
/// # Safety
/// The conditions of [`sum`]; `out` has `rows * all` elements, and the parts `rows * width`.
pub(crate) unsafe fn join(
    device: &dyn Device,
    kind: Kind,
    ranks: Ranks,
    State { taken, failed }: State,
    (out, rows, all): (*mut c_void, i64, i64),
    [width, count]: [i64; 2],
) -> Result<()> {
    let grid = grid(blocks(rows * all, kind), THREADS);
    // SAFETY: the kernel's signature, and the caller's promise.
    unsafe {
        launch!(
            device,
            typed(JOIN, kind),
            grid,
            [ranks, taken, failed, out, rows as u32, width as u32, count as u32, all as u32]
        )
    }
}

fn blocks(len: i64, kind: Kind) -> i64 {
    ceil_div(len, lanes(kind) * i64::from(THREADS)).clamp(1, MOST_BLOCKS as i64)
}

//! The kernels of `kernels/decode.cu` and `kernels/decode_matrix.cu`, for devices that compile them at run time. All run on
//! libtorch's stream.

use std::{
    ffi::{CStr, c_void},
    ptr,
};

use tch::Kind;

use super::{Architecture, Heads, Source, grid, launch, source_text};
use crate::{Device, Grid, Result};

/// CUDA C++ that HIP compiles too, for fp32.
pub(crate) const F32_SOURCE: Source = Source {
    file: c"decode.cu",
    text: source_text!(["elements.cuh", "block.cuh", "decode.cuh"], "decode.cu", "KERNELS(float, f32)\n"),
    kernels: &[
        c"attend_f32_16_4",
        c"attend_f32_32_4",
        c"attend_f32_64_4",
        c"attend_f32_64_8",
        c"attend_f32_128_4",
        c"attend_f32_128_8",
        c"join_splits_f32",
    ],
    architecture: Architecture::Any,
};

/// The same for bf16.
pub(crate) const BF16_SOURCE: Source = Source {
    file: c"decode.cu",
    text: source_text!(["elements.cuh", "block.cuh", "decode.cuh"], "decode.cu", "KERNELS(Bf16, bf16)\n"),
    kernels: &[
        c"attend_bf16_16_4",
        c"attend_bf16_32_4",
        c"attend_bf16_64_4",
        c"attend_bf16_64_8",
        c"attend_bf16_128_4",
        c"attend_bf16_128_8",
        c"join_splits_bf16",
    ],
    architecture: Architecture::Any,
};

/// The same on matrix units, in bf16 with heads of 64 and 128.
pub(crate) const MATRIX_SOURCE: Source = Source {
    file: c"decode_matrix.cu",
    text: source_text!(["elements.cuh", "block.cuh", "decode.cuh"], "decode_matrix.cu"),
    kernels: &[c"attend_matrix_64", c"attend_matrix_128", c"join_matrix"],
    architecture: Architecture::NvidiaFrom(80),
};

/// Tokens of a sequence that one block goes through.
pub(crate) const SPLIT_TOKENS: i64 = 512;
/// Threads of a block, by the width of a head.
fn attention_threads(dim: i32) -> u32 {
    if dim < 64 { 128 } else { 256 }
}
/// Shared memory of a block on matrix units: 3 runs of 16 tokens of 128 elements for each of its 8 warps, or 6 runs of 64.
const MATRIX_SHARED_BYTES: u32 = 8 * 3 * 16 * 128 * 2;

/// The blocks that sequences lie in, as the kernels take them.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub(crate) struct Tables {
    pub(crate) entries: *mut c_void,
    pub(crate) table_len: i32,
    pub(crate) block_shift: i32,
    pub(crate) blocks: i32,
}

/// Heads of a decoder.
#[derive(Clone, Copy, Debug)]
pub(crate) struct HeadSizes {
    pub(crate) heads: i32,
    pub(crate) kv_heads: i32,
    pub(crate) dim: i32,
}

/// Returns true if there are kernels for heads of this width.
pub(crate) fn fit(kind: Kind, dim: i64) -> bool {
    matches!(kind, Kind::Float | Kind::BFloat16) && matches!(dim, 16 | 32 | 64 | 128)
}

/// Norms and rotation of a step's queries and keys, as the kernels take them.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub(crate) struct Rotation {
    /// `[dim]`; null if queries (or keys) are not normed.
    pub(crate) q_norm: *mut c_void,
    pub(crate) k_norm: *mut c_void,
    /// fp32 `[table_rows, turned]`; null if the queries are ready and the cache has all keys.
    pub(crate) table: *mut c_void,
    pub(crate) table_rows: i64,
    pub(crate) eps: f32,
    /// Number of elements of a head that are rotated, from the first on; even.
    pub(crate) turned: i32,
}

impl Rotation {
    /// No norms and no rotation.
    pub(crate) const NONE: Self = Self {
        q_norm: ptr::null_mut(),
        k_norm: ptr::null_mut(),
        table: ptr::null_mut(),
        table_rows: 0,
        eps: 0.0,
        turned: 0,
    };
}

/// Outputs of attention, as the kernels take them.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub(crate) struct Attended {
    /// fp32 `[splits, rows, heads, dim]`; like the next, not used with one split.
    pub(crate) partial: *mut c_void,
    /// fp32 `[splits, rows, heads, 2]`.
    pub(crate) softmax: *mut c_void,
    /// fp32 `[rows, heads]`, or null.
    pub(crate) lse: *mut c_void,
    /// `[rows, heads, dim]`.
    pub(crate) out: *mut c_void,
    pub(crate) splits: i32,
    pub(crate) rows: i32,
    pub(crate) heads: i32,
}

/// Attention of a query a row over the last `window` tokens of a cache, cut in parts that are joined. With a `rotation` the
/// queries have the row's key and value behind them, which go to the cache, and the kernel in front does not write to that.
///
/// # Safety
/// Addresses of as many values of `kind` (or of the type that the kernel says) on `device` as the sizes say, which live until
/// the work is done; what is written overlaps with nothing else.
#[expect(clippy::too_many_arguments, reason = "they are the kernels'")]
pub(crate) unsafe fn attend(
    device: &dyn Device,
    kind: Kind,
    queries: Heads,
    rotation: Rotation,
    (keys, values, tables): (*mut c_void, *mut c_void, Tables),
    positions: *mut c_void,
    (scale, window): (f32, Option<i64>),
    attended: Attended,
    HeadSizes { heads, kv_heads, dim }: HeadSizes,
) -> Result<()> {
    let group = heads / kv_heads;
    let kernel = Kernel::of(device, kind, (dim, group));
    let tiles = i64::from((group as u32).div_ceil(kernel.heads));
    let blocks = i64::from(attended.splits) * tiles * i64::from(kv_heads) * i64::from(attended.rows);
    let window = window.and_then(|window| i32::try_from(window).ok()).unwrap_or(i32::MAX);
    let in_turn = Grid {
        shared_bytes: kernel.shared_bytes,
        starts_early: !rotation.table.is_null(),
        ..grid(blocks, attention_threads(dim))
    };
    // SAFETY: the kernels' signatures, and the caller's promise.
    unsafe {
        launch!(
            device,
            kernel.name,
            in_turn,
            [queries, rotation, keys, values, tables, positions, scale, window, attended, kv_heads]
        )?;
        if attended.splits == 1 {
            return Ok(());
        }
        let blocks = i64::from(attended.rows) * i64::from(heads);
        let grid = grid(blocks, dim as u32).early();
        launch!(device, kernel.join, grid, [attended, positions, window, dim])
    }
}

/// One of the kernels of attention.
struct Kernel {
    name: &'static CStr,
    join: &'static CStr,
    /// Query heads of a block, at most.
    heads: u32,
    shared_bytes: u32,
}

impl Kernel {
    /// The kernel for heads of `dim` elements, `group` of which share a key head.
    fn of(device: &dyn Device, kind: Kind, (dim, group): (i32, i32)) -> Kernel {
        if kind == Kind::BFloat16 && dim >= 64 && MATRIX_SOURCE.exists_on(device) {
            let name = if dim == 64 { c"attend_matrix_64" } else { c"attend_matrix_128" };
            return Kernel { name, join: c"join_matrix", heads: 8, shared_bytes: MATRIX_SHARED_BYTES };
        }
        let (of_f32, of_bf16, heads) = match (dim, group <= 4) {
            (16, _) => (c"attend_f32_16_4", c"attend_bf16_16_4", 4),
            (32, _) => (c"attend_f32_32_4", c"attend_bf16_32_4", 4),
            (64, true) => (c"attend_f32_64_4", c"attend_bf16_64_4", 4),
            (64, false) => (c"attend_f32_64_8", c"attend_bf16_64_8", 8),
            (_, true) => (c"attend_f32_128_4", c"attend_bf16_128_4", 4),
            (_, false) => (c"attend_f32_128_8", c"attend_bf16_128_8", 8),
        };
        let join = pick(kind, c"join_splits_f32", c"join_splits_bf16");
        Kernel { name: pick(kind, of_f32, of_bf16), join, heads, shared_bytes: 0 }
    }
}

/// A kernel by the type of its values.
pub(crate) fn pick(kind: Kind, of_f32: &'static CStr, of_bf16: &'static CStr) -> &'static CStr {
    if kind == Kind::Float { of_f32 } else { of_bf16 }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The source asserts the same.
    #[test]
    fn shared_memory_is_what_the_source_lays_out() {
        assert!(MATRIX_SOURCE.text.contains(&format!("sizeof(Run<DIM>) == {MATRIX_SHARED_BYTES}")));
    }
}

//! The kernels of `kernels/decode.cu` and `kernels/decode_matrix.cu`, for devices that compile them at run time. All run on
//! libtorch's stream.

use std::{
    ffi::{CStr, c_void},
    ptr,
};

use tch::Kind;

use super::{
    Architecture, Heads, Narrow, Source, grid, launch,
    narrow::{NarrowNames, narrow_names, narrow_sources},
    rows::{Typed, ceil_div, has_kernels, typed, typed_names, typed_sources},
};
use crate::{Device, Grid, Result};

/// Attention by the width of heads and the most query heads of a block.
const ATTEND_16_4: Typed = typed_names!("attend_16_4");
const ATTEND_32_4: Typed = typed_names!("attend_32_4");
const ATTEND_64_4: Typed = typed_names!("attend_64_4");
const ATTEND_64_8: Typed = typed_names!("attend_64_8");
const ATTEND_128_4: Typed = typed_names!("attend_128_4");
const ATTEND_128_8: Typed = typed_names!("attend_128_8");
const JOIN_SPLITS: Typed = typed_names!("join_splits");
const TURN_ROWS_16: Typed = typed_names!("turn_rows_16");
const TURN_ROWS_32: Typed = typed_names!("turn_rows_32");
const TURN_ROWS_64: Typed = typed_names!("turn_rows_64");
const TURN_ROWS_128: Typed = typed_names!("turn_rows_128");
const KERNELS: [Typed; 11] = [
    ATTEND_16_4,
    ATTEND_32_4,
    ATTEND_64_4,
    ATTEND_64_8,
    ATTEND_128_4,
    ATTEND_128_8,
    JOIN_SPLITS,
    TURN_ROWS_16,
    TURN_ROWS_32,
    TURN_ROWS_64,
    TURN_ROWS_128,
];

/// CUDA C++ that HIP compiles too.
pub(crate) const SOURCES: [Source; 3] =
    typed_sources!("decode.cu", ["elements.cuh", "block.cuh", "decode.cuh"], KERNELS);

const MATRIX_64: NarrowNames = narrow_names!("attend_matrix_64");
const MATRIX_128: NarrowNames = narrow_names!("attend_matrix_128");
const JOIN_MATRIX: NarrowNames = narrow_names!("join_matrix");
const TURN_MATRIX_64: NarrowNames = narrow_names!("turn_matrix_64");
const TURN_MATRIX_128: NarrowNames = narrow_names!("turn_matrix_128");

/// The same on matrix units, in 16 bits with heads of 64 and 128.
pub(crate) const MATRIX_SOURCES: [Source; 2] = narrow_sources!(
    "decode_matrix.cu",
    ["block.cuh", "decode.cuh"],
    [MATRIX_64, MATRIX_128, JOIN_MATRIX, TURN_MATRIX_64, TURN_MATRIX_128],
    Architecture::NvidiaFrom(80)
);

/// Tokens of a sequence that one block goes through.
pub(crate) const SPLIT_TOKENS: i64 = 512;
/// Threads of a block that norms and rotates heads, 32 a head.
const TURN_THREADS: u32 = 128;
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
    has_kernels(kind) && matches!(dim, 16 | 32 | 64 | 128)
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

/// Norms and rotates the queries and keys of `rows` rows in place, and puts their keys and values into the cache.
///
/// # Safety
/// The same as [`attend`], which follows without a rotation; the queries' memory is written.
pub(crate) unsafe fn turn_rows(
    device: &dyn Device,
    kind: Kind,
    (queries, rows): (Heads, i32),
    rotation: Rotation,
    (keys, values, tables): (*mut c_void, *mut c_void, Tables),
    positions: *mut c_void,
    HeadSizes { heads, kv_heads, dim }: HeadSizes,
) -> Result<()> {
    let kernel = Kernel::of(device, kind, (dim, heads / kv_heads));
    let all = i64::from(rows) * i64::from(heads + 2 * kv_heads);
    let grid = grid(ceil_div(all, i64::from(TURN_THREADS / 32)), TURN_THREADS).early();
    // SAFETY: the kernel's signature, and the caller's promise.
    unsafe {
        launch!(
            device,
            kernel.turn,
            grid,
            [queries, rotation, keys, values, tables, positions, rows, heads, kv_heads]
        )
    }
}

/// One of the kernels of attention.
struct Kernel {
    name: &'static CStr,
    join: &'static CStr,
    turn: &'static CStr,
    /// Query heads of a block, at most.
    heads: u32,
    shared_bytes: u32,
}

impl Kernel {
    /// The kernel for heads of `dim` elements, `group` of which share a key head.
    fn of(device: &dyn Device, kind: Kind, (dim, group): (i32, i32)) -> Kernel {
        if let Some(narrow) = Narrow::of(kind)
            && dim >= 64
            && narrow.pick(MATRIX_SOURCES).exists_on(device)
        {
            let name = narrow.pick(if dim == 64 { MATRIX_64 } else { MATRIX_128 });
            let join = narrow.pick(JOIN_MATRIX);
            let turn = narrow.pick(if dim == 64 { TURN_MATRIX_64 } else { TURN_MATRIX_128 });
            return Kernel { name, join, turn, heads: 8, shared_bytes: MATRIX_SHARED_BYTES };
        }
        let (kernel, turn, heads) = match (dim, group <= 4) {
            (16, _) => (ATTEND_16_4, TURN_ROWS_16, 4),
            (32, _) => (ATTEND_32_4, TURN_ROWS_32, 4),
            (64, true) => (ATTEND_64_4, TURN_ROWS_64, 4),
            (64, false) => (ATTEND_64_8, TURN_ROWS_64, 8),
            (_, true) => (ATTEND_128_4, TURN_ROWS_128, 4),
            (_, false) => (ATTEND_128_8, TURN_ROWS_128, 8),
        };
        let [name, join, turn] = [kernel, JOIN_SPLITS, turn].map(|names| typed(names, kind));
        Kernel { name, join, turn, heads, shared_bytes: 0 }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The source asserts the same.
    #[test]
    fn shared_memory_is_what_the_source_lays_out() {
        for source in MATRIX_SOURCES {
            assert!(source.text.contains(&format!("sizeof(Run<DIM>) == {MATRIX_SHARED_BYTES}")));
        }
    }
}

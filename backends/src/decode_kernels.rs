//! The kernels of `kernels/decode.cu`, for devices that compile them at run time. All run on libtorch's stream.

use std::ffi::{CStr, c_void};

use tch::Kind;

use crate::{
    Device, Grid, Result,
    device_kernels::{Source, grid, launch},
    ops::Heads,
};

/// CUDA C++ that HIP compiles too.
pub(crate) const SOURCE: Source = Source {
    file: c"decode.cu",
    text: concat!(
        include_str!("../kernels/elements.cuh"),
        include_str!("../kernels/block.cuh"),
        "\n#line 1 \"decode.cu\"\n",
        include_str!("../kernels/decode.cu")
    ),
    kernels: &[
        c"rope_into_cache_f32",
        c"rope_into_cache_bf16",
        c"join_splits_f32",
        c"join_splits_bf16",
        c"attend_f32_16_4",
        c"attend_f32_32_4",
        c"attend_f32_64_4",
        c"attend_f32_64_8",
        c"attend_f32_128_4",
        c"attend_f32_128_8",
        c"attend_bf16_16_4",
        c"attend_bf16_32_4",
        c"attend_bf16_64_4",
        c"attend_bf16_64_8",
        c"attend_bf16_128_4",
        c"attend_bf16_128_8",
    ],
    architecture: None,
};

/// Tokens of a sequence that one block of `attend` goes through.
pub(crate) const SPLIT_TOKENS: i64 = 512;
/// Threads of a block of `attend`, by the width of a head.
fn attention_threads(dim: i32) -> u32 {
    if dim < 64 { 128 } else { 256 }
}

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

/// Whether there are kernels for heads of this width.
pub(crate) fn fit(kind: Kind, dim: i64) -> bool {
    matches!(kind, Kind::Float | Kind::BFloat16) && matches!(dim, 16 | 32 | 64 | 128)
}

/// Rotates (and norms, where there are weights) a step's queries in place and its keys on their way into the cache,
/// where values go as well.
///
/// # Safety
/// This and all below: addresses of as many values of `kind` (or of the type that the kernel says) on `device` as the
/// sizes say, which live until the work is done; what is written overlaps with nothing else.
#[expect(clippy::too_many_arguments, reason = "they are the kernel's")]
pub(crate) unsafe fn rope_into_cache(
    device: &dyn Device,
    kind: Kind,
    qkv: *mut c_void,
    (q_norm, k_norm, eps): (*mut c_void, *mut c_void, f32),
    positions: *mut c_void,
    (table, table_rows): (*mut c_void, i64),
    (keys, values, tables): (*mut c_void, *mut c_void, Tables),
    rows: i64,
    HeadSizes { heads, kv_heads, dim }: HeadSizes,
) -> Result<()> {
    let kernel = pick(kind, c"rope_into_cache_f32", c"rope_into_cache_bf16");
    let threads = (dim as u32 / 2).next_power_of_two().max(32);
    let blocks = rows * i64::from(heads + 2 * kv_heads);
    // SAFETY: the kernel's signature, and the caller's promise.
    unsafe {
        launch!(
            device,
            kernel,
            grid(blocks, threads).early(),
            [
                qkv, q_norm, k_norm, eps, positions, table, table_rows, keys, values, tables, heads,
                kv_heads, dim
            ]
        )
    }
}

/// Where attention goes, as the kernels take it.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub(crate) struct Attended {
    /// fp32 `[splits, rows, heads, dim]`; not used where there is one split, and neither is the next.
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

/// Attention of a query a row over the last `window` tokens of a cache, cut in parts that are joined. Where it `is_early`, the
/// kernel in front writes no keys and values but each row's last ones.
///
/// # Safety
/// As [`rope_into_cache`].
#[expect(clippy::too_many_arguments, reason = "they are the kernels'")]
pub(crate) unsafe fn attend(
    device: &dyn Device,
    kind: Kind,
    queries: Heads,
    (keys, values, tables): (*mut c_void, *mut c_void, Tables),
    positions: *mut c_void,
    (scale, window): (f32, Option<i64>),
    attended: Attended,
    HeadSizes { heads, kv_heads, dim }: HeadSizes,
    is_early: bool,
) -> Result<()> {
    let group = heads / kv_heads;
    let (kernel, width) = match (kind, dim, group <= 4) {
        (Kind::Float, 16, _) => (c"attend_f32_16_4", 4),
        (Kind::Float, 32, _) => (c"attend_f32_32_4", 4),
        (Kind::Float, 64, true) => (c"attend_f32_64_4", 4),
        (Kind::Float, 64, false) => (c"attend_f32_64_8", 8),
        (Kind::Float, _, true) => (c"attend_f32_128_4", 4),
        (Kind::Float, _, false) => (c"attend_f32_128_8", 8),
        (_, 16, _) => (c"attend_bf16_16_4", 4),
        (_, 32, _) => (c"attend_bf16_32_4", 4),
        (_, 64, true) => (c"attend_bf16_64_4", 4),
        (_, 64, false) => (c"attend_bf16_64_8", 8),
        (_, _, true) => (c"attend_bf16_128_4", 4),
        (_, _, false) => (c"attend_bf16_128_8", 8),
    };
    let tiles = i64::from((group as u32).div_ceil(width));
    let blocks = i64::from(attended.splits) * tiles * i64::from(kv_heads) * i64::from(attended.rows);
    let window = window.and_then(|window| i32::try_from(window).ok()).unwrap_or(i32::MAX);
    let turn = |grid: Grid| if is_early { grid.early() } else { grid };
    // SAFETY: the kernels' signatures, and the caller's promise.
    unsafe {
        launch!(
            device,
            kernel,
            turn(grid(blocks, attention_threads(dim))),
            [queries, keys, values, tables, positions, scale, window, attended, kv_heads]
        )?;
        if attended.splits == 1 {
            return Ok(());
        }
        let kernel = pick(kind, c"join_splits_f32", c"join_splits_bf16");
        let blocks = i64::from(attended.rows) * i64::from(heads);
        launch!(device, kernel, grid(blocks, dim as u32).early(), [attended, positions, window, dim])
    }
}

/// A kernel by the type of its values.
pub(crate) fn pick(kind: Kind, of_f32: &'static CStr, of_bf16: &'static CStr) -> &'static CStr {
    if kind == Kind::Float { of_f32 } else { of_bf16 }
}

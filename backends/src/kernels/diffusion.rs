//! The kernels of `kernels/diffusion.cu`. They run on libtorch's stream; an address is that of a tensor whose memory libtorch
//! takes back in that stream's order.

use std::ffi::c_void;

use tch::Kind;

use super::{
    Architecture, Source, grid, launch,
    rows::{
        JOIN_THREADS, JOINED_COLUMNS, MAX_BLOCKS, PACK_BYTES, THREADS, ceil_div, lanes, packs, part_rows,
        row_parts, sharers, threads_up_to, typed, typed_kernels,
    },
    source_text,
};
use crate::{Device, Grid, Result};

/// CUDA C++ that HIP compiles too.
pub(crate) const SOURCE: Source = Source {
    file: c"diffusion.cu",
    text: source_text!(["elements.cuh", "block.cuh", "rows.cuh"], "diffusion.cu"),
    kernels: &NAMES,
    architecture: Architecture::Any,
};

typed_kernels! { 8:
    MODULATED_NORM = "modulated_norm";
    MODULATED_NORM_NARROW = "modulated_norm_narrow";
    MODULATED_NORM_BACKWARD = "modulated_norm_backward";
    GATED_ADD = "gated_add";
    GATED_ADD_BACKWARD = "gated_add_backward";
    JOIN_IMAGES = "join_images";
    SPLIT_HEADS = "split_heads";
    SPLIT_HEADS_BACKWARD = "split_heads_backward";
}

/// Packs of a row that a thread has, and the most threads that share one.
const EACH: i64 = 2;
const ROW_THREADS: u32 = 512;
/// The same for rows that neighbouring threads share, 32 of them.
const EACH_NARROW: i64 = 8;
const NARROW_SHARERS: u32 = 5;
/// Tokens of an image that one partial sum covers.
const CHUNK: i64 = 16;

/// Values `[images, tokens, channels]`: an image's tokens are dense rows, images lie `stride` elements apart. Mirrors `Images`
/// in `kernels/diffusion.cu`.
#[derive(Clone, Copy, Debug)]
#[repr(C)]
pub(crate) struct Images {
    pub(crate) data: *mut c_void,
    pub(crate) stride: i64,
}

impl Images {
    /// None.
    pub(crate) const NULL: Images = Images { data: std::ptr::null_mut(), stride: 0 };

    /// Returns true if rows that consist of packs are aligned to them.
    fn is_aligned(self, kind: Kind) -> bool {
        (self.data as usize).is_multiple_of(PACK_BYTES) && self.stride % lanes(kind) == 0
    }
}

/// Values `[images, tokens, heads, dim]` with a dense last dimension, and strides of the others in elements. Mirrors `Spread` in
/// `kernels/diffusion.cu`.
#[derive(Clone, Copy, Debug)]
#[repr(C)]
pub(crate) struct Spread {
    pub(crate) data: *mut c_void,
    pub(crate) strides: [i64; 3],
}

/// The `[images, tokens, channels]` of rows.
#[derive(Clone, Copy, Debug)]
pub(crate) struct RowSizes {
    pub(crate) images: i64,
    pub(crate) tokens: i64,
    pub(crate) channels: i64,
}

impl RowSizes {
    /// Returns true if a block holds a row.
    pub(crate) fn fit(self, kind: Kind) -> bool {
        packs(kind, self.channels) <= i64::from(ROW_THREADS) * EACH
    }

    /// Partial sums over the tokens of an image.
    pub(crate) fn parts(self) -> i64 {
        ceil_div(self.tokens, CHUNK)
    }

    /// A grid of `count` blocks with a row at a time, and the exponent of two of the threads that share it.
    fn blocks(self, kind: Kind, count: i64) -> (Grid, u32) {
        let threads = threads_up_to(ROW_THREADS, ceil_div(packs(kind, self.channels), EACH));
        (grid(count, threads), threads.ilog2())
    }

    /// Returns true if neighbouring threads share a row of whole packs.
    fn is_narrow(self, kind: Kind) -> bool {
        packs(kind, self.channels) <= EACH_NARROW << NARROW_SHARERS && self.channels % lanes(kind) == 0
    }
}

/// The `[images, tokens, heads, dim]` of heads.
#[derive(Clone, Copy, Debug)]
pub(crate) struct HeadSizes {
    pub(crate) images: i64,
    pub(crate) tokens: i64,
    pub(crate) heads: i64,
    pub(crate) dim: i64,
}

impl HeadSizes {
    /// Returns true if neighbouring threads share a head.
    pub(crate) fn fit(self, kind: Kind) -> bool {
        sharers(kind, self.dim).is_some()
    }

    /// Partial sums over the heads of queries, and over those of keys.
    pub(crate) fn parts(self) -> i64 {
        row_parts(self.count())
    }

    fn count(self) -> i64 {
        self.images * self.tokens * self.heads
    }
}

/// Writes `y`, and the fp32 `stats` `[images, tokens, 2]` that backward needs.
///
/// # Safety
/// For this and all functions below: addresses are those of tensors on `device` with these sizes, of `kind` unless fp32 is
/// stated, and live until the work is done. Outputs overlap with nothing else. Sizes fit.
pub(crate) unsafe fn modulated_norm(
    device: &dyn Device,
    kind: Kind,
    (x, shift, scale): (Images, Images, Images),
    eps: f32,
    (y, stats): (*mut c_void, *mut f32),
    sizes: RowSizes,
) -> Result<()> {
    let RowSizes { images, tokens, channels } = sizes;
    let are_aligned = [x, shift, scale].into_iter().all(|rows| rows.is_aligned(kind));
    let (kernel, (grid, sharers)) = if sizes.is_narrow(kind) && are_aligned {
        let blocks = ceil_div(images * tokens, i64::from(THREADS >> NARROW_SHARERS)).min(MAX_BLOCKS);
        (MODULATED_NORM_NARROW, (grid(blocks, THREADS), NARROW_SHARERS))
    } else {
        (MODULATED_NORM, sizes.blocks(kind, (images * tokens).min(MAX_BLOCKS)))
    };
    // SAFETY: the kernel's signature, and the caller's promise.
    unsafe {
        launch!(
            device,
            typed(kernel, kind),
            grid,
            [x, shift, scale, eps, y, stats, images, tokens, channels, sharers]
        )
    }
}

/// Writes `dx`, plus `below` unless it is null, and the gradients `[images, 2, channels]` of shift and scale.
///
/// # Safety
/// The same as [`modulated_norm`]; `partial` has room for `[images, parts, 2, channels]` of fp32.
pub(crate) unsafe fn modulated_norm_backward(
    device: &dyn Device,
    kind: Kind,
    (dy, x, below, scale): (Images, Images, Images, Images),
    stats: *mut f32,
    partial: *mut f32,
    (dx, of_modulation): (*mut c_void, *mut c_void),
    sizes: RowSizes,
) -> Result<()> {
    let RowSizes { images, tokens, channels } = sizes;
    let (grid, sharers) = sizes.blocks(kind, images * sizes.parts());
    // SAFETY: the kernel's signature, and the caller's promise.
    unsafe {
        launch!(
            device,
            typed(MODULATED_NORM_BACKWARD, kind),
            grid,
            [dy, x, below, stats, scale, dx, partial, tokens, channels, CHUNK, sharers]
        )?;
        join_images(device, kind, partial, [images, sizes.parts(), 2 * channels], of_modulation)
    }
}

/// # Safety
/// The same as [`modulated_norm`].
pub(crate) unsafe fn gated_add(
    device: &dyn Device,
    kind: Kind,
    (x, y, gate): (Images, *mut c_void, Images),
    out: Images,
    sizes: RowSizes,
) -> Result<()> {
    let RowSizes { images, tokens, channels } = sizes;
    let (grid, sharers) = sizes.blocks(kind, (images * tokens).min(MAX_BLOCKS));
    // SAFETY: the kernel's signature, and the caller's promise.
    unsafe {
        launch!(device, typed(GATED_ADD, kind), grid, [x, y, gate, out, images, tokens, channels, sharers])
    }
}

/// Writes `dy`, and the gradients `[images, channels]` of the gate.
///
/// # Safety
/// The same as [`modulated_norm`]; `partial` has room for `[images, parts, channels]` of fp32.
pub(crate) unsafe fn gated_add_backward(
    device: &dyn Device,
    kind: Kind,
    (dout, y, gate): (Images, *mut c_void, Images),
    partial: *mut f32,
    (dy, of_gate): (*mut c_void, *mut c_void),
    sizes: RowSizes,
) -> Result<()> {
    let RowSizes { images, tokens, channels } = sizes;
    let (grid, sharers) = sizes.blocks(kind, images * sizes.parts());
    // SAFETY: the kernel's signature, and the caller's promise.
    unsafe {
        launch!(
            device,
            typed(GATED_ADD_BACKWARD, kind),
            grid,
            [dout, y, gate, dy, partial, tokens, channels, CHUNK, sharers]
        )?;
        join_images(device, kind, partial, [images, sizes.parts(), channels], of_gate)
    }
}

/// Writes the sums over parts of fp32 `[images, parts, columns]`.
///
/// # Safety
/// The same as [`modulated_norm`].
unsafe fn join_images(
    device: &dyn Device,
    kind: Kind,
    partial: *mut f32,
    [images, parts, columns]: [i64; 3],
    out: *mut c_void,
) -> Result<()> {
    let grid = grid(images * ceil_div(columns, JOINED_COLUMNS), JOIN_THREADS);
    // SAFETY: the kernel's signature, and the caller's promise.
    unsafe { launch!(device, typed(JOIN_IMAGES, kind), grid, [partial, parts, columns, out]) }
}

/// Writes queries, keys and values from a dense `[images, tokens, 3, heads, dim]`; the norms' weights are null without norms.
///
/// # Safety
/// The same as [`modulated_norm`].
pub(crate) unsafe fn split_heads(
    device: &dyn Device,
    kind: Kind,
    qkv: *mut c_void,
    norms: [*mut c_void; 2],
    eps: f32,
    to: [Spread; 3],
    HeadSizes { images, tokens, heads, dim }: HeadSizes,
) -> Result<()> {
    let shift = sharers(kind, dim).expect("sizes that fit");
    let blocks = ceil_div(images * tokens * heads, i64::from(THREADS >> shift)).min(MAX_BLOCKS);
    // SAFETY: the kernel's signature, and the caller's promise.
    unsafe {
        launch!(
            device,
            typed(SPLIT_HEADS, kind),
            grid(blocks, THREADS),
            [qkv, norms, eps, to, images, tokens, heads, dim, shift]
        )
    }
}

/// Writes `dqkv` from the gradients of queries, keys and values. With `of_norms` it also writes the gradients of the norms'
/// weights, `[2, dim]`, as sums of partial sums.
///
/// # Safety
/// The same as [`split_heads`]; the first of `of_norms` has room for `[parts, 2, dim]` of fp32, the second for the gradients.
pub(crate) unsafe fn split_heads_backward(
    device: &dyn Device,
    kind: Kind,
    from: [Spread; 3],
    (qkv, norms, eps): (*mut c_void, [*mut c_void; 2], f32),
    dqkv: *mut c_void,
    of_norms: Option<(*mut f32, *mut c_void)>,
    sizes: HeadSizes,
) -> Result<()> {
    let HeadSizes { images, tokens, heads, dim } = sizes;
    let shift = sharers(kind, dim).expect("sizes that fit");
    let chunk = part_rows(sizes.count());
    let partial = of_norms.map_or(std::ptr::null_mut(), |(partial, _)| partial);
    // SAFETY: the kernel's signature, and the caller's promise.
    unsafe {
        launch!(
            device,
            typed(SPLIT_HEADS_BACKWARD, kind),
            grid(sizes.parts(), THREADS),
            [from, qkv, norms, eps, dqkv, partial, images, tokens, heads, dim, chunk, shift]
        )?;
        match of_norms {
            Some((partial, out)) => join_images(device, kind, partial, [1, sizes.parts(), 2 * dim], out),
            None => Ok(()),
        }
    }
}

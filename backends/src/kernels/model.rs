//! The kernels of `kernels/model.cu`, for devices that compile them at run time. All run on libtorch's stream; an
//! address is that of a tensor whose memory libtorch takes back in that stream's order.

use std::ffi::c_void;

use tch::Kind;

use super::{
    Architecture, Heads, Source,
    arguments::Activation,
    grid, launch,
    rows::{
        JOIN_THREADS, JOINED_COLUMNS, MAX_BLOCKS, THREADS, blocks_for, ceil_div, packs, part_rows, row_parts,
        sharers, threads_up_to, typed, typed_kernels,
    },
    source_text,
};
use crate::{Device, Result};

/// CUDA C++ that HIP compiles too.
pub(crate) const SOURCE: Source = Source {
    file: c"model.cu",
    text: source_text!(["elements.cuh", "block.cuh", "rows.cuh"], "model.cu"),
    kernels: &NAMES,
    architecture: Architecture::Any,
};

typed_kernels! { 16:
    RMS_NORM = "rms_norm";
    RMS_NORM_NARROW = "rms_norm_narrow";
    RMS_NORM_BACKWARD = "rms_norm_backward";
    SUM_ROWS = "sum_rows";
    JOIN_PARTS = "join_parts";
    ROPE = "rope";
    SWIGLU = "swiglu";
    SWIGLU_BACKWARD = "swiglu_backward";
    GEGLU = "geglu";
    GEGLU_BACKWARD = "geglu_backward";
    LINEAR_BY_ROWS = "linear_by_rows";
    DROPOUT = "dropout";
    LOGPROBS = "logprobs";
    LOGPROBS_BACKWARD = "logprobs_backward";
    EMBEDDING_BACKWARD = "embedding_backward";
    TAKE_ROWS = "take_rows";
}

/// The most threads of a block that goes through one row of logits.
const VOCABULARY_THREADS: u32 = 512;
/// Rows and columns of a product that a block of `linear_by_rows` makes.
const LINEAR_TILE: i64 = 64;

/// The `[rows, heads, dim]` of a norm.
#[derive(Clone, Copy, Debug)]
pub(crate) struct NormSizes {
    pub(crate) rows: i64,
    pub(crate) heads: i64,
    pub(crate) dim: i64,
}

impl NormSizes {
    /// Returns true if one block holds a head, as the backward requires.
    pub(crate) fn fit(self, kind: Kind) -> bool {
        packs(kind, self.dim) <= 1024
    }

    /// Partial sums of the weight's gradient.
    pub(crate) fn parts(self) -> i64 {
        row_parts(self.rows * self.heads)
    }

    /// Threads of a block if each has `packs_each` packs of a head.
    fn threads(self, kind: Kind, packs_each: i64) -> u32 {
        threads_up_to(1024, ceil_div(packs(kind, self.dim), packs_each))
    }
}

/// Threads of a block, one for each pack of a row of logits. More would add zeros, so results do not depend on the number.
fn vocabulary_threads(kind: Kind, vocab: i64) -> u32 {
    threads_up_to(VOCABULARY_THREADS, packs(kind, vocab))
}

/// Writes `y` and `rstd` of `x`, after adding `residual` to it unless that is null. `y` may be `x`, and `rstd` null.
///
/// # Safety
/// For this and all functions below: addresses are those of tensors on `device` with these sizes, of `kind` unless the type
/// is fp32 or int64, and live until the work is done. Outputs overlap with nothing else.
#[expect(clippy::too_many_arguments, reason = "they are the kernel's")]
pub(crate) unsafe fn rms_norm(
    device: &dyn Device,
    kind: Kind,
    x: Heads,
    residual: *mut c_void,
    weight: *mut c_void,
    eps: f32,
    (y, rstd): (Heads, *mut c_void),
    sizes: NormSizes,
) -> Result<()> {
    let NormSizes { rows, heads, dim } = sizes;
    if let (Some(shift), true) = (sharers(kind, dim), residual.is_null()) {
        let blocks = ceil_div(rows * heads, i64::from(THREADS >> shift)).min(MAX_BLOCKS);
        let (kernel, grid) = (typed(RMS_NORM_NARROW, kind), grid(blocks, THREADS).early());
        // SAFETY: the kernel's signature, and the caller's promise.
        return unsafe { launch!(device, kernel, grid, [x, weight, eps, y, rstd, rows, heads, dim, shift]) };
    }
    let blocks = (rows * heads).min(MAX_BLOCKS);
    let (kernel, threads) = (typed(RMS_NORM, kind), sizes.threads(kind, 2));
    // SAFETY: the kernel's signature, and the caller's promise.
    unsafe {
        launch!(
            device,
            kernel,
            grid(blocks, threads).early(),
            [x, residual, weight, eps, y, rstd, rows, heads, dim]
        )
    }
}

/// # Safety
/// The same as [`rms_norm`]; `partial` has room for [`NormSizes::parts`] rows of fp32, and the sizes [`NormSizes::fit`].
pub(crate) unsafe fn rms_norm_backward(
    device: &dyn Device,
    kind: Kind,
    (dy, x, dx): (Heads, Heads, Heads),
    (rstd, weight): (*mut f32, *mut c_void),
    partial: *mut c_void,
    dweight: (*mut c_void, bool),
    sizes: NormSizes,
) -> Result<()> {
    let NormSizes { rows, heads, dim } = sizes;
    let (parts, chunk) = (sizes.parts(), part_rows(rows * heads));
    let kernel = typed(RMS_NORM_BACKWARD, kind);
    let of_one = sizes.threads(kind, 1);
    let (threads, shift) = sharers(kind, dim).map_or((of_one, of_one.ilog2()), |shift| (THREADS, shift));
    // SAFETY: the kernel's signature, and the caller's promise.
    unsafe {
        launch!(
            device,
            kernel,
            grid(parts, threads),
            [dy, x, rstd, weight, dx, partial, rows, heads, dim, chunk, shift]
        )?;
        join_parts(device, kind, partial, parts, dim, dweight)
    }
}

/// # Safety
/// The same as [`rms_norm`]; `partial` has room for [`row_parts`] rows of fp32.
pub(crate) unsafe fn sum_rows(
    device: &dyn Device,
    kind: Kind,
    x: *mut c_void,
    partial: *mut c_void,
    out: (*mut c_void, bool),
    [rows, columns]: [i64; 2],
) -> Result<()> {
    let (parts, chunk) = (row_parts(rows), part_rows(rows));
    let (kernel, blocks) = (typed(SUM_ROWS, kind), parts * blocks_of_row(kind, columns));
    // SAFETY: the kernel's signature, and the caller's promise.
    unsafe {
        launch!(device, kernel, grid(blocks, THREADS), [x, partial, rows, columns, chunk])?;
        join_parts(device, kind, partial, parts, columns, out)
    }
}

/// Writes or adds the column sums of `parts` rows of fp32.
///
/// # Safety
/// The same as [`rms_norm`].
unsafe fn join_parts(
    device: &dyn Device,
    kind: Kind,
    partial: *mut c_void,
    parts: i64,
    columns: i64,
    (out, is_added): (*mut c_void, bool),
) -> Result<()> {
    let (kernel, blocks) = (typed(JOIN_PARTS, kind), ceil_div(columns, JOINED_COLUMNS));
    let is_added = i32::from(is_added);
    // SAFETY: the kernel's signature, and the caller's promise.
    unsafe { launch!(device, kernel, grid(blocks, JOIN_THREADS), [partial, parts, columns, out, is_added]) }
}

/// # Safety
/// The same as [`rms_norm`].
pub(crate) unsafe fn rope(
    device: &dyn Device,
    kind: Kind,
    x: Heads,
    positions: *const i64,
    table: *mut f32,
    sign: f32,
    [rows, heads, dim, table_rows, turned]: [i64; 5],
) -> Result<()> {
    let (kernel, blocks) = (typed(ROPE, kind), blocks_for(rows * heads * packs(kind, turned / 2)));
    // SAFETY: the kernel's signature, and the caller's promise.
    unsafe {
        launch!(
            device,
            kernel,
            grid(blocks, THREADS),
            [x, positions, table, sign, rows, heads, dim, table_rows, turned]
        )
    }
}

/// # Safety
/// The same as [`rms_norm`].
pub(crate) unsafe fn glu(
    device: &dyn Device,
    kind: Kind,
    activation: Activation,
    (gate_up, y): (*mut c_void, *mut c_void),
    rows: i64,
    size: i64,
) -> Result<()> {
    let kernel = match activation {
        Activation::Silu => SWIGLU,
        Activation::GeluTanh => GEGLU,
    };
    let (kernel, blocks) = (typed(kernel, kind), blocks_for(rows * packs(kind, size)));
    // SAFETY: the kernel's signature, and the caller's promise.
    unsafe { launch!(device, kernel, grid(blocks, THREADS).early(), [gate_up, y, rows, size]) }
}

/// # Safety
/// The same as [`rms_norm`].
pub(crate) unsafe fn glu_backward(
    device: &dyn Device,
    kind: Kind,
    activation: Activation,
    (gate_up, dy): (*mut c_void, *mut c_void),
    rows: i64,
    size: i64,
) -> Result<()> {
    let kernel = match activation {
        Activation::Silu => SWIGLU_BACKWARD,
        Activation::GeluTanh => GEGLU_BACKWARD,
    };
    let (kernel, blocks) = (typed(kernel, kind), blocks_for(rows * packs(kind, size)));
    // SAFETY: the kernel's signature, and the caller's promise.
    unsafe { launch!(device, kernel, grid(blocks, THREADS), [gate_up, dy, rows, size]) }
}

/// Writes `y` `[rows, outputs]` from `x` `[rows, inputs]` and `weight` `[outputs, inputs]`; the bias may be null.
///
/// # Safety
/// The same as [`rms_norm`].
pub(crate) unsafe fn linear_by_rows(
    device: &dyn Device,
    kind: Kind,
    [x, weight, bias, y]: [*mut c_void; 4],
    [rows, outputs, inputs]: [i64; 3],
) -> Result<()> {
    let kernel = typed(LINEAR_BY_ROWS, kind);
    let blocks = ceil_div(rows, LINEAR_TILE) * ceil_div(outputs, LINEAR_TILE);
    // SAFETY: the kernel's signature, and the caller's promise.
    unsafe {
        launch!(device, kernel, grid(blocks, THREADS).early(), [x, weight, bias, y, rows, outputs, inputs])
    }
}

/// Writes dropped-out values; `how` is the salt, the threshold and the scale.
///
/// # Safety
/// The same as [`rms_norm`].
pub(crate) unsafe fn dropout(
    device: &dyn Device,
    kind: Kind,
    (x, y): (*mut c_void, *mut c_void),
    keys: *const i64,
    (salt, threshold, scale): (u32, u32, f32),
    [rows, columns]: [i64; 2],
) -> Result<()> {
    let (kernel, blocks) = (typed(DROPOUT, kind), blocks_for(rows * packs(kind, columns)));
    // SAFETY: the kernel's signature, and the caller's promise.
    unsafe {
        launch!(device, kernel, grid(blocks, THREADS), [x, keys, salt, threshold, scale, y, rows, columns])
    }
}

/// Writes log-probabilities, entropies and log-sum-exps, in this order.
///
/// # Safety
/// The same as [`rms_norm`].
pub(crate) unsafe fn logprobs(
    device: &dyn Device,
    kind: Kind,
    logits: *mut c_void,
    targets: *const i64,
    inverse_temperature: f32,
    [logprobs, entropy, lse]: [*mut f32; 3],
    [rows, vocab]: [i64; 2],
) -> Result<()> {
    let kernel = typed(LOGPROBS, kind);
    // SAFETY: the kernel's signature, and the caller's promise.
    unsafe {
        launch!(
            device,
            kernel,
            grid(rows, vocabulary_threads(kind, vocab)),
            [logits, targets, inverse_temperature, logprobs, entropy, lse, vocab]
        )
    }
}

/// Replaces logits by their gradient, from log-sum-exps, entropies, and the gradients of log-probabilities and, unless null,
/// of entropies.
///
/// # Safety
/// The same as [`rms_norm`].
pub(crate) unsafe fn logprobs_backward(
    device: &dyn Device,
    kind: Kind,
    logits: *mut c_void,
    targets: *const i64,
    inverse_temperature: f32,
    [lse, entropy, dlogprobs, dentropy]: [*mut f32; 4],
    [rows, vocab]: [i64; 2],
) -> Result<()> {
    let kernel = typed(LOGPROBS_BACKWARD, kind);
    // SAFETY: the kernel's signature, and the caller's promise.
    unsafe {
        launch!(
            device,
            kernel,
            grid(rows, vocabulary_threads(kind, vocab)),
            [logits, targets, inverse_temperature, lse, entropy, dlogprobs, dentropy, vocab]
        )
    }
}

/// Adds up gradients of an embedding; `tokens` are sorted, with the rows that they came from.
///
/// # Safety
/// The same as [`rms_norm`]; both of `tokens` are int64.
pub(crate) unsafe fn embedding_backward(
    device: &dyn Device,
    kind: Kind,
    dy: *mut c_void,
    (tokens, order): (*mut c_void, *mut c_void),
    (dweight, is_added): (*mut c_void, bool),
    [rows, vocab, columns]: [i64; 3],
) -> Result<()> {
    let (kernel, blocks) = (typed(EMBEDDING_BACKWARD, kind), rows * blocks_of_row(kind, columns));
    let is_added = i32::from(is_added);
    // SAFETY: the kernel's signature, and the caller's promise.
    unsafe {
        launch!(
            device,
            kernel,
            grid(blocks, THREADS),
            [dy, tokens, order, dweight, is_added, rows, vocab, columns]
        )
    }
}

/// Copies the rows of `x` that `index` names to a dense `y`.
///
/// # Safety
/// The same as [`rms_norm`]; the int64 values of `index` are rows of `x`.
pub(crate) unsafe fn take_rows(
    device: &dyn Device,
    kind: Kind,
    x: Heads,
    (index, y): (*mut c_void, *mut c_void),
    [rows, columns]: [i64; 2],
) -> Result<()> {
    let blocks = rows * blocks_of_row(kind, columns);
    // SAFETY: the kernel's signature, and the caller's promise.
    unsafe { launch!(device, typed(TAKE_ROWS, kind), grid(blocks, THREADS), [x, index, y, columns]) }
}

/// Blocks for a row, with one pack a thread.
fn blocks_of_row(kind: Kind, columns: i64) -> i64 {
    ceil_div(packs(kind, columns), THREADS.into())
}

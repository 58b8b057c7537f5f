//! The kernels of `kernels/attention.cu` and `kernels/attention_backward.cu`. They run on libtorch's stream.

use std::ffi::c_void;

use super::{
    Architecture, Heads, Narrow, Source, grid, launch,
    narrow::{NarrowNames, narrow_names, narrow_sources},
    rows::ceil_div,
};
use crate::{Device, Grid, Result};

/// CUDA C++ for NVIDIA's compute capability 9.0 alone.
pub(crate) const SOURCES: [Source; 2] = narrow_sources!(
    "attention.cu",
    ["block.cuh", "warpgroup.cuh", "attention.cuh"],
    [NARROW_HEADS.outputs, WIDE_HEADS.outputs],
    Architecture::Only("sm_90a")
);

/// The same.
pub(crate) const BACKWARD_SOURCES: [Source; 2] = narrow_sources!(
    "attention_backward.cu",
    ["block.cuh", "warpgroup.cuh", "attention.cuh"],
    [
        NARROW_HEADS.stats,
        NARROW_HEADS.keys,
        NARROW_HEADS.queries,
        WIDE_HEADS.stats,
        WIDE_HEADS.keys,
        WIDE_HEADS.queries,
    ],
    Architecture::Only("sm_90a")
);

/// Keys or queries of a block.
pub(crate) const TILE: i64 = 128;
/// Two groups that multiply, and one that copies.
const THREADS: u32 = 384;
const STATS_THREADS: u32 = 256;
/// Values that a thread reads at a time.
const PACK: i64 = 8;

/// The kernels for one width of heads.
#[derive(Clone, Copy, Debug)]
struct Kernels {
    dim: i64,
    outputs: NarrowNames,
    stats: NarrowNames,
    keys: NarrowNames,
    queries: NarrowNames,
}

const NARROW_HEADS: Kernels = Kernels {
    dim: 64,
    outputs: narrow_names!("attention_outputs_64"),
    stats: narrow_names!("attention_stats_64"),
    keys: narrow_names!("attention_keys_64"),
    queries: narrow_names!("attention_queries_64"),
};
const WIDE_HEADS: Kernels = Kernels {
    dim: 128,
    outputs: narrow_names!("attention_outputs_128"),
    stats: narrow_names!("attention_stats_128"),
    keys: narrow_names!("attention_keys_128"),
    queries: narrow_names!("attention_queries_128"),
};

impl Kernels {
    fn of(dim: i64) -> Option<Self> {
        [NARROW_HEADS, WIDE_HEADS].into_iter().find(|kernels| kernels.dim == dim)
    }

    /// Shared memory of a block that makes outputs: its queries, and five stages of 128 keys or values with two barriers each.
    fn outputs_bytes(self) -> i64 {
        let row = self.dim * 2;
        TILE * row + 5 * (128 * row + 2 * 8)
    }

    /// Shared memory of a block that holds keys and values: these, three stages of 64 queries with their output's gradients and
    /// two numbers each, and two barriers a stage.
    fn keys_bytes(self) -> i64 {
        let row = self.dim * 2;
        2 * TILE * row + 3 * (2 * 64 * (row + 4) + 2 * 8)
    }

    /// Shared memory of a block that holds queries and their output's gradients: these, and two stages of 128 keys and values.
    fn queries_bytes(self) -> i64 {
        let row = self.dim * 2;
        2 * TILE * row + 2 * (2 * 128 * row + 2 * 8)
    }
}

/// Tiles of [`TILE`] tokens, each the number of its sequence and the place of its first token there: int32 `[count, 2]`.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Tiles {
    pub(crate) places: *mut c_void,
    pub(crate) count: i64,
}

/// Inputs and outputs of attention, as the kernels take them: `[rows, heads, dim]`.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub(crate) struct Forward {
    pub(crate) q: Heads,
    pub(crate) k: Heads,
    pub(crate) v: Heads,
    pub(crate) out: Heads,
    /// Log-sum-exps in fp32, and their strides in elements from one query and from one head to the next.
    pub(crate) lse: *mut f32,
    pub(crate) lse_strides: [i64; 2],
    /// int32, the first token of each sequence, and the end of the last.
    pub(crate) offsets: *mut c_void,
    /// int32, the same of its queries, which are its last tokens; null if all are.
    pub(crate) queries: *mut c_void,
    /// int32, the row of each token's key and value; null if token n has row n.
    pub(crate) rows: *mut c_void,
    /// Written here.
    pub(crate) tiles: *mut c_void,
    pub(crate) heads: i32,
    pub(crate) kv_heads: i32,
    /// Most tokens that a query sees; `i32::MAX` for all.
    pub(crate) window: i32,
    /// Above 0.
    pub(crate) scale: f32,
}

/// Inputs and outputs of the backward pass, as the kernels take them. `dk` and `dv` have a row for each token.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub(crate) struct Backward {
    pub(crate) forward: Forward,
    pub(crate) dout: Heads,
    pub(crate) dq: Heads,
    pub(crate) dk: Heads,
    pub(crate) dv: Heads,
    /// fp32 `[2, heads, rows]`, written and read.
    pub(crate) stats: *mut f32,
    pub(crate) rows: i64,
}

/// Returns true if a device has kernels for heads of this type and width.
pub(crate) fn exist_on(device: &dyn Device, narrow: Narrow, dim: i64) -> bool {
    Kernels::of(dim).is_some()
        && [SOURCES, BACKWARD_SOURCES].map(|it| narrow.pick(it)).iter().all(|it| it.exists_on(device))
}

impl Forward {
    /// Returns true if rows are aligned as the kernels read and write them.
    pub(crate) fn fits(&self) -> bool {
        [self.q, self.k, self.v, self.out].into_iter().all(is_aligned)
    }
}

impl Backward {
    /// See [`Forward::fits`].
    pub(crate) fn fits(&self) -> bool {
        self.forward.fits() && [self.dout, self.dq, self.dk, self.dv].into_iter().all(is_aligned)
    }
}

fn is_aligned(heads: Heads) -> bool {
    (heads.data as usize).is_multiple_of(16) && heads.stride % PACK == 0
}

/// Writes the outputs and their log-sum-exps.
///
/// # Safety
/// The kernels exist on the device for heads of `dim`, and `of` fits. Addresses are those of tensors on the device with these
/// sizes, which live until the work is done; what is written overlaps with nothing else. `tiles` have every token but those
/// that are no queries, once.
pub(crate) unsafe fn forward(
    device: &dyn Device,
    narrow: Narrow,
    of: Forward,
    dim: i64,
    tiles: Tiles,
) -> Result<()> {
    let kernels = Kernels::of(dim).expect("kernels for heads of this width");
    let grid = tiles.grid(of.heads, kernels.outputs_bytes());
    // SAFETY: the kernel's signature, and the caller's promise.
    unsafe { launch!(device, narrow.pick(kernels.outputs), grid, [Forward { tiles: tiles.places, ..of }]) }
}

/// Writes the gradients.
///
/// # Safety
/// The same as [`forward`]; `of_keys` have every token once.
pub(crate) unsafe fn backward(
    device: &dyn Device,
    narrow: Narrow,
    of: Backward,
    dim: i64,
    [of_queries, of_keys]: [Tiles; 2],
) -> Result<()> {
    let kernels = Kernels::of(dim).expect("kernels for heads of this width");
    let Forward { heads, kv_heads, .. } = of.forward;
    let each = ceil_div(of.rows * i64::from(heads) * (dim / PACK), i64::from(STATS_THREADS));
    let over = |tiles: Tiles| Backward { forward: Forward { tiles: tiles.places, ..of.forward }, ..of };
    // SAFETY: the kernels' signature, and the caller's promise.
    unsafe {
        launch!(device, narrow.pick(kernels.stats), grid(each, STATS_THREADS), [of])?;
        let grid_of_keys = of_keys.grid(kv_heads, kernels.keys_bytes());
        launch!(device, narrow.pick(kernels.keys), grid_of_keys, [over(of_keys)])?;
        let grid_of_queries = of_queries.grid(heads, kernels.queries_bytes());
        launch!(device, narrow.pick(kernels.queries), grid_of_queries, [over(of_queries)])
    }
}

impl Tiles {
    /// One block for each tile and each of `heads` heads.
    fn grid(self, heads: i32, shared_bytes: i64) -> Grid {
        Grid { shared_bytes: shared_bytes as u32, ..grid(self.count * i64::from(heads), THREADS) }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The sources assert the same of their layouts.
    #[test]
    fn shared_memory_is_what_the_sources_lay_out() {
        for kernels in [NARROW_HEADS, WIDE_HEADS] {
            for ([source, _], layout, bytes) in [
                (SOURCES, "Outputs", kernels.outputs_bytes()),
                (BACKWARD_SOURCES, "KeyGradients", kernels.keys_bytes()),
                (BACKWARD_SOURCES, "QueryGradients", kernels.queries_bytes()),
            ] {
                let asserted = format!("{layout}<{}>::BYTES == {bytes}", kernels.dim);
                assert!(source.text.contains(&asserted), "{asserted}");
            }
        }
    }
}

//! The kernels of `kernels/attention.cu`: attention's backward. They run on libtorch's stream.

use std::ffi::{CStr, c_void};

use crate::{
    Device, Grid, Result,
    device_kernels::{Source, grid, launch},
    model_kernels::ceil_div,
    ops::Heads,
};

/// CUDA C++ for NVIDIA's compute capability 9.0 alone.
pub(crate) const SOURCE: Source = Source {
    file: c"attention.cu",
    text: concat!(
        include_str!("../kernels/elements.cuh"),
        include_str!("../kernels/warpgroup.cuh"),
        "\n#line 1 \"attention.cu\"\n",
        include_str!("../kernels/attention.cu")
    ),
    kernels: &[
        c"attention_stats_64",
        c"attention_keys_64",
        c"attention_queries_64",
        c"attention_stats_128",
        c"attention_keys_128",
        c"attention_queries_128",
    ],
    architecture: Some("sm_90a"),
};

/// Keys or queries of a block.
const TILE: i64 = 128;
/// Two groups that multiply, and one that copies.
const THREADS: u32 = 384;
const STATS_THREADS: u32 = 256;
/// What a thread reads at a time, in bf16.
const PACK: i64 = 8;

/// The kernels for one width of heads.
#[derive(Clone, Copy, Debug)]
struct Kernels {
    dim: i64,
    stats: &'static CStr,
    keys: &'static CStr,
    queries: &'static CStr,
}

const NARROW: Kernels = Kernels {
    dim: 64,
    stats: c"attention_stats_64",
    keys: c"attention_keys_64",
    queries: c"attention_queries_64",
};
const WIDE: Kernels = Kernels {
    dim: 128,
    stats: c"attention_stats_128",
    keys: c"attention_keys_128",
    queries: c"attention_queries_128",
};

impl Kernels {
    fn of(dim: i64) -> Option<Self> {
        [NARROW, WIDE].into_iter().find(|kernels| kernels.dim == dim)
    }

    /// Shared memory of a block that holds keys and values: these, three stages of 64 queries with their output's
    /// gradients and two numbers each, and two barriers a stage.
    fn keys_bytes(self) -> i64 {
        let row = self.dim * 2;
        2 * TILE * row + 3 * (2 * 64 * (row + 4) + 2 * 8)
    }

    /// Of one that holds queries and their output's gradients: these, and two stages of 128 keys and values.
    fn queries_bytes(self) -> i64 {
        let row = self.dim * 2;
        2 * TILE * row + 2 * (2 * 128 * row + 2 * 8)
    }
}

/// The tensors of attention's backward, bf16 `[N, heads, dim]`, as the kernels take them.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub(crate) struct Tensors {
    pub(crate) q: Heads,
    pub(crate) k: Heads,
    pub(crate) v: Heads,
    pub(crate) out: Heads,
    pub(crate) dout: Heads,
    pub(crate) dq: Heads,
    pub(crate) dk: Heads,
    pub(crate) dv: Heads,
}

/// What is to be done, as the kernels take it.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub(crate) struct Backward {
    pub(crate) tensors: Tensors,
    /// Log-sum-exps in fp32, and how many elements they lie apart from one query and from one head to the next.
    pub(crate) lse: *mut f32,
    pub(crate) lse_strides: [i64; 2],
    /// fp32 `[2, heads, tokens]`, written and read.
    pub(crate) stats: *mut f32,
    /// int32, where each sequence begins and the last one ends.
    pub(crate) offsets: *mut c_void,
    pub(crate) tokens: i64,
    pub(crate) sequences: i32,
    pub(crate) heads: i32,
    pub(crate) kv_heads: i32,
    /// How many tokens a query sees, at most; `i32::MAX` is all.
    pub(crate) window: i32,
    pub(crate) scale: f32,
}

/// Whether a device has kernels for heads of this width.
pub(crate) fn exist_on(device: &dyn Device, dim: i64) -> bool {
    Kernels::of(dim).is_some() && SOURCE.exists_on(device)
}

impl Tensors {
    /// Whether rows begin where the kernels can read and write them.
    pub(crate) fn fit(&self) -> bool {
        let Self { q, k, v, out, dout, dq, dk, dv } = self;
        [q, k, v, out, dout, dq, dk, dv]
            .into_iter()
            .all(|heads| (heads.data as usize).is_multiple_of(16) && heads.stride % PACK == 0)
    }
}

/// Writes the gradients.
///
/// # Safety
/// The kernels exist on the device for heads of `dim`, and the tensors fit. Addresses are those of tensors on the device
/// with these sizes, which live until the work is done; what is written overlaps with nothing else. The longest sequence
/// has `max_len` tokens.
pub(crate) unsafe fn backward(device: &dyn Device, of: Backward, dim: i64, max_len: i64) -> Result<()> {
    let kernels = Kernels::of(dim).expect("kernels for heads of this width");
    let (heads, kv_heads) = (i64::from(of.heads), i64::from(of.kv_heads));
    let stats = grid(ceil_div(of.tokens * heads * (dim / PACK), i64::from(STATS_THREADS)), STATS_THREADS);
    let tiles = |heads: i64, shared_bytes: i64| Grid {
        shared_bytes: shared_bytes as u32,
        ..grid(ceil_div(max_len, TILE) * i64::from(of.sequences) * heads, THREADS)
    };
    // SAFETY: the kernels' signature, and the caller's promise.
    unsafe {
        launch!(device, kernels.stats, stats, [of])?;
        launch!(device, kernels.keys, tiles(kv_heads, kernels.keys_bytes()), [of])?;
        launch!(device, kernels.queries, tiles(heads, kernels.queries_bytes()), [of])
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The source asserts the same of its layouts.
    #[test]
    fn shared_memory_is_what_the_source_lays_out() {
        for kernels in [NARROW, WIDE] {
            for (layout, bytes) in
                [("KeyGradients", kernels.keys_bytes()), ("QueryGradients", kernels.queries_bytes())]
            {
                let asserted = format!("{layout}<{}>::BYTES == {bytes}", kernels.dim);
                assert!(SOURCE.text.contains(&asserted), "{asserted}");
            }
        }
    }
}

//! Attention of 16-bit floats on a device by the libraries that its libtorch brings, cuDNN's and FlashAttention-2, where it is
//! not by kernels of ours ([`super::tiled`]).
//!
//! cuDNN's is the fastest, but its backward never repeats itself to the bit, it has to build a plan for every shape that
//! it has not seen, and plans know no windows. So it runs forward where all sequences have one length, as in training on
//! packed text, and backward only if that need not be deterministic ([`has_plan`]). Everything else is FlashAttention-2's.
//!
//! Its backward is deterministic by giving each head as many blocks, with a sum of queries' gradients each, as fill
//! the device if every sequence and head counts alike: with 48 of them on 132 multiprocessors three blocks each, which
//! are 144, and so take two rounds, the second nearly empty. [`Cut`] asks for fewer heads at a time, or adds sequences
//! without tokens, which only change that count.

use std::ffi::{c_int, c_void};

use tch::Tensor;

use super::{AttentionOptions, AttentionOutput, Causal, Error, Packing, Qkv, QkvGrads, Result};
use crate::{
    Device, ffi,
    kernels::{Narrow, rows::ceil_div},
};

/// Multiple of tokens that sequences must have for a plan: lengths that come from data seldom repeat.
const PLANNED_LEN: i64 = 128;

unsafe extern "C" {
    // shim/flash.cpp: 0, or -1 with the reason in anyroll_last_error
    fn anyroll_flash_attention(
        qkv: *const *mut c_void,
        offsets: *const *mut c_void,
        most: *const i64,
        planned_len: i64,
        scale: f64,
        window: i64,
        results: *mut *mut c_void,
    ) -> c_int;
    fn anyroll_flash_attention_backward(
        dout: *mut c_void,
        qkv: *const *mut c_void,
        forward: *const *mut c_void,
        offsets: *const *mut c_void,
        most: *const i64,
        planned_len: i64,
        scale: f64,
        window: i64,
        deterministic: bool,
        kv_heads_at_once: i64,
        empty_sequences: i64,
        gradients: *const *mut c_void,
    ) -> c_int;
}

/// Returns true if these kernels can take queries like `q` on a device.
pub(super) fn takes(q: &Tensor, packing: &Packing) -> bool {
    let head_dim = q.size()[2];
    let fits = head_dim % 8 == 0 && head_dim <= 256;
    fits && Narrow::of(q.kind()).is_some() && packing.queries() > 0
}

/// See [`super::attention()`].
pub(super) fn attention(Qkv { q, k, v }: Qkv, packing: &Packing, causal: Causal) -> Result<(Tensor, Tensor)> {
    let mut results = [std::ptr::null_mut(); 2];
    // SAFETY: live tensors, and room for two.
    let code = unsafe {
        anyroll_flash_attention(
            [q, k, v].map(ffi::tensor_ptr).as_ptr(),
            packing.offsets_int32().map(ffi::tensor_ptr).as_ptr(),
            most(packing).as_ptr(),
            planned_len(packing, causal),
            causal.scale,
            window(causal),
            results.as_mut_ptr(),
        )
    };
    // SAFETY: the shim made them and gave them away.
    let [out, lse] = unsafe { own("attention", code, results)? };
    Ok((out, lse))
}

/// See [`super::attention_backward`].
pub(super) fn attention_backward(
    device: &dyn Device,
    dout: &Tensor,
    Qkv { q, k, v }: Qkv,
    AttentionOutput { out, lse }: AttentionOutput,
    AttentionOptions { packing, causal, deterministic }: AttentionOptions,
    QkvGrads { dq, dk, dv }: QkvGrads,
) -> Result<()> {
    let (heads, kv_heads) = (q.size()[1], k.size()[1]);
    let cut = match device.multiprocessors() {
        Some(multiprocessors) if deterministic => {
            Cut::best(multiprocessors, packing.sequences(), heads, kv_heads)
        }
        _ => Cut { kv_heads, empty_sequences: 0 },
    };
    // SAFETY: live tensors; those that are written are borrowed mutably.
    let code = unsafe {
        anyroll_flash_attention_backward(
            ffi::tensor_ptr(dout),
            [q, k, v].map(ffi::tensor_ptr).as_ptr(),
            [out, lse].map(ffi::tensor_ptr).as_ptr(),
            packing.offsets_int32().map(ffi::tensor_ptr).as_ptr(),
            most(packing).as_ptr(),
            planned_len(packing, causal),
            causal.scale,
            window(causal),
            deterministic,
            cut.kv_heads,
            cut.empty_sequences,
            [&*dq, dk, dv].map(ffi::tensor_ptr).as_ptr(),
        )
    };
    if code == 0 { Ok(()) } else { Err(failed("attention_backward")) }
}

/// Division of a deterministic backward of FlashAttention-2: key heads of one call, and empty sequences that are added.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Cut {
    kv_heads: i64,
    empty_sequences: i64,
}

impl Cut {
    /// The division whose rounds are the fullest; among equals the one with the fewest sums, then the simplest.
    fn best(multiprocessors: i64, sequences: i64, heads: i64, kv_heads: i64) -> Cut {
        let divisors = (1..=kv_heads).rev().filter(|&part| kv_heads % part == 0);
        let cuts = divisors.flat_map(|part| {
            let most = multiprocessors.min(sequences);
            (0..=most).map(move |empty_sequences| Cut { kv_heads: part, empty_sequences })
        });
        let cost = |cut: &Cut| {
            let heads_at_once = heads / kv_heads * cut.kv_heads;
            let splits = ceil_div(multiprocessors, (sequences + cut.empty_sequences) * heads_at_once);
            let rounds = ceil_div(splits * sequences * heads_at_once, multiprocessors);
            // Of one head's time, for all heads; and the sums that exist at once.
            ((kv_heads / cut.kv_heads * rounds) as f64 / splits as f64, splits * heads_at_once)
        };
        let order = |a: &Cut, b: &Cut| {
            let ((time, sums), (other_time, other_sums)) = (cost(a), cost(b));
            time.total_cmp(&other_time).then(sums.cmp(&other_sums))
        };
        cuts.min_by(order).expect("there is at least one key head")
    }
}

/// Returns true if cuDNN makes a plan for such sequences.
pub(super) fn has_plan(packing: &Packing, causal: Causal) -> bool {
    planned_len(packing, causal) > 0
}

/// The length that all sequences have, or 0 if there is no plan for them: plans know no windows.
fn planned_len(packing: &Packing, causal: Causal) -> i64 {
    let uniform = packing.uniform_len().filter(|len| causal.window.is_none() && len % PLANNED_LEN == 0);
    uniform.unwrap_or(0)
}

/// Most queries and most keys of a sequence.
fn most(packing: &Packing) -> [i64; 2] {
    [packing.most_queries(), packing.max_len()]
}

/// The window as the shim takes it: 0 is none.
fn window(causal: Causal) -> i64 {
    causal.window.unwrap_or(0)
}

/// # Safety
/// With `code` 0 the shim made the tensors, and nobody else owns them.
unsafe fn own<const N: usize>(
    op: &'static str,
    code: c_int,
    results: [*mut c_void; N],
) -> Result<[Tensor; N]> {
    if code != 0 {
        return Err(failed(op));
    }
    // SAFETY: the caller's promise; tch's tensors are the same `at::Tensor*`.
    Ok(results.map(|tensor| unsafe { Tensor::from_ptr(tensor.cast()) }))
}

fn failed(op: &'static str) -> Error {
    Error::Kernel { op, message: ffi::last_error() }
}

#[cfg(test)]
mod tests {
    use super::Cut;

    #[test]
    fn rounds_are_filled_where_they_can_be() {
        let check = |sequences, heads, kv_heads, expected: (i64, i64)| {
            let Cut { kv_heads, empty_sequences } = Cut::best(132, sequences, heads, kv_heads);
            assert_eq!((kv_heads, empty_sequences), expected, "{sequences} sequences, {heads} heads");
        };
        check(4, 12, 2, (1, 1)); // two calls of 5 x 24 blocks: 2/5 of a head's time, and not 2/3
        check(4, 14, 2, (2, 1)); // 2 x 56 blocks: 1/2, and not 2/3
        check(4, 28, 4, (4, 1)); // 112 blocks: as long as 2 x 112 in two rounds, with half the sums
        check(11, 12, 2, (2, 0)); // 132 blocks
    }
}

//! The C ABI of `shim/kernels.cpp`, `shim/attention.cpp` and `shim/linear.cpp`, in their order.

use std::ffi::c_int;

use crate::kernels::Heads;

unsafe extern "C" {
    pub fn anyroll_rms_norm(
        x: Heads,
        residual: *const f32,
        weight: *const f32,
        eps: f32,
        y: *mut f32,
        rstd: *mut f32,
        rows: i64,
        heads: i64,
        dim: i64,
    ) -> c_int;
    pub fn anyroll_rms_norm_backward(
        dy: Heads,
        x: Heads,
        rstd: *const f32,
        weight: *const f32,
        dx: Heads,
        dweight: *mut f32,
        add: bool,
        rows: i64,
        heads: i64,
        dim: i64,
    ) -> c_int;
    pub fn anyroll_sum_rows(x: *const f32, out: *mut f32, add: bool, rows: i64, columns: i64) -> c_int;
    pub fn anyroll_rope(
        x: Heads,
        positions: *const i64,
        table: *const f32,
        sign: f32,
        rows: i64,
        heads: i64,
        dim: i64,
        turned: i64,
    ) -> c_int;
    pub fn anyroll_swiglu(gate_up: *const f32, y: *mut f32, rows: i64, size: i64) -> c_int;
    pub fn anyroll_swiglu_backward(gate_up: *mut f32, dy: *mut f32, rows: i64, size: i64) -> c_int;
    pub fn anyroll_geglu(gate_up: *const f32, y: *mut f32, rows: i64, size: i64) -> c_int;
    pub fn anyroll_geglu_backward(gate_up: *mut f32, dy: *mut f32, rows: i64, size: i64) -> c_int;
    pub fn anyroll_dropout(
        x: *const f32,
        keys: *const i64,
        salt: u32,
        threshold: u32,
        scale: f32,
        y: *mut f32,
        rows: i64,
        columns: i64,
    ) -> c_int;
    pub fn anyroll_embedding_backward(
        dy: *const f32,
        tokens: *const i64,
        dweight: *mut f32,
        add: bool,
        rows: i64,
        vocab: i64,
        columns: i64,
    ) -> c_int;
    pub fn anyroll_logprobs(
        logits: *const f32,
        targets: *const i64,
        inverse_temperature: f32,
        logprobs: *mut f32,
        entropy: *mut f32,
        lse: *mut f32,
        rows: i64,
        vocab: i64,
    ) -> c_int;
    pub fn anyroll_logprobs_backward(
        logits: *mut f32,
        targets: *const i64,
        inverse_temperature: f32,
        lse: *const f32,
        entropy: *const f32,
        dlogprobs: *const f32,
        dentropy: *const f32,
        rows: i64,
        vocab: i64,
    ) -> c_int;
    pub fn anyroll_attention(
        q: Heads,
        k: Heads,
        v: Heads,
        query_offsets: *const i64,
        key_offsets: *const i64,
        scale: f32,
        window: i64,
        out: *mut f32,
        lse: *mut f32,
        sequences: i64,
        max_len: i64,
        heads: i64,
        kv_heads: i64,
        dim: i64,
    ) -> c_int;
    pub fn anyroll_attention_backward(
        q: Heads,
        k: Heads,
        v: Heads,
        dout: *const f32,
        out: *const f32,
        lse: *const f32,
        dq: Heads,
        dk: Heads,
        dv: Heads,
        query_offsets: *const i64,
        key_offsets: *const i64,
        scale: f32,
        window: i64,
        sequences: i64,
        max_len: i64,
        heads: i64,
        kv_heads: i64,
        dim: i64,
    ) -> c_int;
    pub fn anyroll_decode_attention(
        q: Heads,
        keys: *const f32,
        values: *const f32,
        tables: *const i64,
        lengths: *const i64,
        scale: f32,
        window: i64,
        out: *mut f32,
        rows: i64,
        table_len: i64,
        block_tokens: i64,
        heads: i64,
        kv_heads: i64,
        dim: i64,
    ) -> c_int;
    pub fn anyroll_linear(
        x: *const f32,
        w: *const f32,
        out: *mut f32,
        rows: i64,
        inner: i64,
        columns: i64,
    ) -> c_int;
}

//! Causal attention with grouped queries: over packed sequences in training, over a cache in generation.

use tch::{Kind, Tensor};

use super::check::{Args, Engine, is_narrow_on_host};
use super::{Packing, Result, composite, cpu_kernels, flash, tiled};

/// The keys that a query sees, and the scale of their scores.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Causal {
    /// Factor of the scores.
    pub scale: f64,
    /// Most tokens that a query sees, its own included; `None`: all before it.
    pub window: Option<i64>,
}

impl Causal {
    /// All tokens before it, under this scale.
    pub fn whole(scale: f64) -> Causal {
        Causal { scale, window: None }
    }

    /// The same for sequences of up to `len` tokens: drops a window that covers them whole.
    pub(super) fn within(self, len: i64) -> Causal {
        Causal { window: self.window.filter(|&window| window < len), ..self }
    }

    /// The window as kernels take it.
    fn tokens(self) -> i64 {
        self.window.unwrap_or(i64::MAX)
    }
}

/// Queries `[Q, H, D]`, keys and values `[N, K, D]`.
#[derive(Clone, Copy, Debug)]
pub struct Qkv<'a> {
    /// Queries.
    pub q: &'a Tensor,
    /// Keys.
    pub k: &'a Tensor,
    /// Values.
    pub v: &'a Tensor,
}

/// Gradients of a [`Qkv`], in the same shapes.
#[derive(Debug)]
pub struct QkvGrads<'a> {
    /// Gradient of the queries.
    pub dq: &'a mut Tensor,
    /// Gradient of the keys.
    pub dk: &'a mut Tensor,
    /// Gradient of the values.
    pub dv: &'a mut Tensor,
}

/// Results of [`attention`].
#[derive(Clone, Copy, Debug)]
pub struct AttentionOutput<'a> {
    /// `[Q, H D]`.
    pub out: &'a Tensor,
    /// fp32 `[Q, H]`.
    pub lse: &'a Tensor,
}

/// Options of [`attention_backward`].
#[derive(Clone, Copy, Debug)]
pub struct AttentionOptions<'a> {
    /// The sequences.
    pub packing: &'a Packing,
    /// The forward's.
    pub causal: Causal,
    /// True if the result must repeat to the bit. Otherwise a device may sum in an order that differs from run to run, if
    /// that is faster.
    pub deterministic: bool,
}

/// Causal attention within each sequence of a packed batch. Sequences may share rows.
///
/// `q` `[Q, H, D]` of the packing's queries, `k` and `v` `[N, K, D]` of its rows may be views whose rows lie apart; K divides H,
/// and query head `h` reads key head `h / (H / K)`. A query sees the tokens of its sequence up to its own. Returns the output,
/// dense `[Q, H D]`, and log(sum(exp(scale * scores))) of each query in fp32 `[Q, H]`, which the backward needs.
///
/// # Errors
/// [`super::Error::Argument`] for shapes that do not fit, or libtorch's error.
pub fn attention(
    q: &Tensor,
    k: &Tensor,
    v: &Tensor,
    packing: &Packing,
    causal: Causal,
) -> Result<(Tensor, Tensor)> {
    let args = Args::new("attention", q);
    let sizes = Sizes::of(args, q, k, packing)?;
    let causal = causal.within(packing.max_len());
    if is_narrow_on_host(q) {
        let [q_wide, k, v] = wide([q, k, v])?;
        let (out, lse) = attention(&q_wide, &k, &v, packing, causal)?;
        return Ok((out.f_to_kind(q.kind())?, lse));
    }
    if let Some(Engine::Device(device)) = Engine::of(q)
        && !flash::has_plan(packing, causal)
        && let Some(done) = tiled::attention(&*device, Qkv { q, k, v }, packing, causal)?
    {
        return Ok(done);
    }
    let [k, v] = &packing.spread([k, v])?;
    match Engine::of(q) {
        Some(Engine::Cpu) => on_host(args, Qkv { q, k, v }, sizes, Spans::of(packing), causal),
        Some(Engine::Device(_)) if flash::takes(q, packing) => {
            flash::attention(Qkv { q, k, v }, packing, causal)
        }
        _ => composite::attention(q, k, v, packing, causal),
    }
}

/// Backward of [`attention`]: writes the gradients, which may be views whose rows lie apart.
///
/// `dout` is `[Q, H D]`, `output` the forward's. Probabilities are computed again from its `lse`, as in FlashAttention-2
/// (Dao, 2023).
///
/// # Errors
/// The same as [`attention`].
pub fn attention_backward(
    dout: &Tensor,
    qkv: Qkv,
    output: AttentionOutput,
    options: AttentionOptions,
    grads: QkvGrads,
) -> Result<()> {
    let (Qkv { q, k, v }, AttentionOutput { out, lse }) = (qkv, output);
    let AttentionOptions { packing, causal, .. } = options;
    let QkvGrads { dq, dk, dv } = grads;
    let args = Args::new("attention_backward", q);
    let sizes = Sizes::of(args, q, k, packing)?;
    let causal = causal.within(packing.max_len());
    let options = AttentionOptions { causal, ..options };
    if is_narrow_on_host(q) {
        let [dout, q, k, v, out] = wide([dout, q, k, v, out])?;
        let [mut of_q, mut of_k, mut of_v] = wide([&*dq, &*dk, &*dv])?;
        let (qkv, output) = (Qkv { q: &q, k: &k, v: &v }, AttentionOutput { out: &out, lse });
        let wide_grads = QkvGrads { dq: &mut of_q, dk: &mut of_k, dv: &mut of_v };
        attention_backward(&dout, qkv, output, options, wide_grads)?;
        dq.f_copy_(&of_q)?;
        dk.f_copy_(&of_k)?;
        return Ok(dv.f_copy_(&of_v)?);
    }
    let Some(copies) = packing.copies() else {
        return backward_of_tokens(args, sizes, dout, qkv, output, options, QkvGrads { dq, dk, dv });
    };
    // A token's gradients have a row of their own, also where its key and value have not.
    let Sizes { kv_heads, dim, .. } = sizes;
    let halves = |both: &Tensor| {
        Ok::<_, super::Error>([both.f_narrow(1, 0, kv_heads)?, both.f_narrow(1, kv_heads, kv_heads)?])
    };
    let of_tokens = args.empty(&[packing.tokens(), 2 * kv_heads, dim])?;
    let [mut of_k, mut of_v] = halves(&of_tokens)?;
    let grads = QkvGrads { dq, dk: &mut of_k, dv: &mut of_v };
    backward_of_tokens(args, sizes, dout, qkv, output, options, grads)?;
    let sums = copies.sum(&of_tokens.f_flatten(1, 2)?)?.f_view([-1, 2 * kv_heads, dim])?;
    let [of_k, of_v] = halves(&sums)?;
    dk.f_copy_(&of_k)?;
    Ok(dv.f_copy_(&of_v)?)
}

/// [`attention_backward`], with gradients of keys and values for each token.
fn backward_of_tokens(
    args: Args,
    Sizes { rows, tokens, heads, kv_heads, dim }: Sizes,
    dout: &Tensor,
    qkv: Qkv,
    output: AttentionOutput,
    options: AttentionOptions,
    QkvGrads { dq, dk, dv }: QkvGrads,
) -> Result<()> {
    let (Qkv { q, k, v }, AttentionOutput { out, lse }) = (qkv, output);
    let AttentionOptions { packing, causal, deterministic } = options;
    if let Some(Engine::Device(device)) = Engine::of(q)
        && (deterministic || !flash::has_plan(packing, causal))
        && tiled::attention_backward(&*device, dout, qkv, output, options, QkvGrads { dq, dk, dv })?
    {
        return Ok(());
    }
    let [k, v] = &packing.spread([k, v])?;
    let (qkv, grads) = (Qkv { q, k, v }, QkvGrads { dq, dk, dv });
    match Engine::of(q) {
        Some(Engine::Cpu) => {}
        Some(Engine::Device(device)) if flash::takes(q, packing) => {
            return flash::attention_backward(&*device, dout, qkv, output, options, grads);
        }
        _ => return composite::attention_backward(dout, qkv, output, options, grads),
    }
    let QkvGrads { dq, dk, dv } = grads;
    let spans = Spans::of(packing);
    // SAFETY: the sizes of all tensors were checked, a `Packing`'s offsets rise from 0 to `rows` and to `tokens`, the
    // gradients are borrowed mutably, and all outlive the call.
    let code = unsafe {
        cpu_kernels::anyroll_attention_backward(
            args.heads("q", q, [rows, heads, dim])?,
            args.heads("k", k, [tokens, kv_heads, dim])?,
            args.heads("v", v, [tokens, kv_heads, dim])?,
            args.floats("dout", dout, &[rows, heads * dim])?,
            args.floats("out", out, &[rows, heads * dim])?,
            args.floats("lse", lse, &[rows, heads])?,
            args.heads("dq", dq, [rows, heads, dim])?,
            args.heads("dk", dk, [tokens, kv_heads, dim])?,
            args.heads("dv", dv, [tokens, kv_heads, dim])?,
            spans.queries.as_ptr(),
            spans.keys.as_ptr(),
            causal.scale as f32,
            causal.tokens(),
            packing.sequences(),
            spans.longest,
            heads,
            kv_heads,
            dim,
        )
    };
    args.ran(code)
}

/// Attention of one new token per row over its sequence's cache, which includes the token's own key and value.
///
/// `q` `[B, H, D]` may be a view whose rows lie apart; the caches are dense `[blocks, T, K, D]`, T tokens a block.
/// Row `b` reads the first `lengths[b]` tokens (at least 1) of its sequence, of which token `t` lies in block
/// `tables[b, t / T]`; `tables` is int64 `[B, W]`, `lengths` int64 `[B]`. Entries after a sequence's end, in its
/// last block or in its table, are not used. Returns `[B, H D]`.
///
/// # Errors
/// [`super::Error::Argument`] for shapes that do not fit, a block or a length out of range, or libtorch's error.
pub fn decode_attention(
    q: &Tensor,
    k_cache: &Tensor,
    v_cache: &Tensor,
    tables: &Tensor,
    lengths: &Tensor,
    causal: Causal,
) -> Result<Tensor> {
    if is_narrow_on_host(q) {
        // Of the caches what is named, each sequence's blocks behind the other's.
        let entries = tables.f_flatten(0, 1)?;
        let [keys, values] =
            wide([&k_cache.f_index_select(0, &entries)?, &v_cache.f_index_select(0, &entries)?])?;
        let tables =
            Tensor::f_arange(entries.numel() as i64, (Kind::Int64, q.device()))?.f_view_as(tables)?;
        let [q_wide] = wide([q])?;
        let out = decode_attention(&q_wide, &keys, &values, &tables, lengths, causal)?;
        return Ok(out.f_to_kind(q.kind())?);
    }
    let Some(Engine::Cpu) = Engine::of(q) else {
        return composite::decode_attention(q, k_cache, v_cache, tables, lengths, causal);
    };
    let args = Args::new("decode_attention", q);
    let [rows, heads, dim] = args.dims("q", q)?;
    let cache_size @ [blocks, block_tokens, kv_heads, _] = args.dims("k_cache", k_cache)?;
    let [_, table_len] = args.dims("tables", tables)?;
    check_groups(args, heads, kv_heads)?;
    let out = args.empty(&[rows, heads * dim])?;
    // SAFETY: the sizes of all tensors and the ranges of blocks and lengths were checked, and all outlive the
    // call.
    let code = unsafe {
        cpu_kernels::anyroll_decode_attention(
            args.heads("q", q, [rows, heads, dim])?,
            args.floats("k_cache", k_cache, &[blocks, block_tokens, kv_heads, dim])?,
            args.floats("v_cache", v_cache, &cache_size)?,
            args.indices("tables", tables, &[rows, table_len], blocks)?,
            args.indices("lengths", lengths, &[rows], table_len * block_tokens + 1)?,
            causal.scale as f32,
            causal.tokens(),
            out.data_ptr().cast(),
            rows,
            table_len,
            block_tokens,
            heads,
            kv_heads,
            dim,
        )
    };
    args.ran(code)?;
    Ok(out)
}

/// Causal attention of the last `n` tokens of one sequence over all its `m` tokens: `q` `[n, H, D]`, `k` and `v`
/// `[m, K, D]`, m >= n. Returns `[n, H D]`.
///
/// Without a kernel of the CPU's or the GPU's, all H n m scores are in memory, in fp32: pass a long sequence in pieces.
///
/// # Errors
/// [`super::Error::Argument`] for shapes that do not fit, or libtorch's error.
pub fn attention_with_history(q: &Tensor, k: &Tensor, v: &Tensor, causal: Causal) -> Result<Tensor> {
    if is_narrow_on_host(q) {
        let [q_wide, k, v] = wide([q, k, v])?;
        return Ok(attention_with_history(&q_wide, &k, &v, causal)?.f_to_kind(q.kind())?);
    }
    let args = Args::new("attention_with_history", q);
    let [rows, heads, dim] = args.dims("q", q)?;
    let [tokens, kv_heads, _] = args.dims("k", k)?;
    check_groups(args, heads, kv_heads)?;
    if tokens < rows {
        return Err(args.refuse("k", format!("has {tokens} tokens, fewer than the {rows} of `q`")));
    }
    match Engine::of(q) {
        Some(Engine::Cpu) => {}
        Some(Engine::Device(device)) => {
            return match tiled::attention_with_history(&*device, Qkv { q, k, v }, causal)? {
                Some(out) => Ok(out),
                None => composite::attention_with_history(q, k, v, causal),
            };
        }
        None => return composite::attention_with_history(q, k, v, causal),
    }
    let spans = Spans { queries: &[0, rows], keys: &[0, tokens], longest: tokens };
    Ok(on_host(args, Qkv { q, k, v }, Sizes { rows, tokens, heads, kv_heads, dim }, spans, causal)?.0)
}

/// Sequences as the host's kernels take them: the first query and the first token of each, and the numbers of all. The last
/// tokens of a sequence are its queries.
struct Spans<'a> {
    queries: &'a [i64],
    keys: &'a [i64],
    /// Most tokens of one sequence.
    longest: i64,
}

impl Spans<'_> {
    fn of(packing: &Packing) -> Spans<'_> {
        Spans { queries: packing.query_offsets(), keys: packing.offsets(), longest: packing.max_len() }
    }
}

/// [`attention`] by the host's kernel.
fn on_host(
    args: Args,
    Qkv { q, k, v }: Qkv,
    Sizes { rows, tokens, heads, kv_heads, dim }: Sizes,
    spans: Spans,
    causal: Causal,
) -> Result<(Tensor, Tensor)> {
    let (out, lse) = (args.empty(&[rows, heads * dim])?, args.empty(&[rows, heads])?);
    // SAFETY: the sizes of all tensors are checked or made here, offsets rise from 0 to `rows` and to `tokens`, as a
    // `Packing`'s and those of one sequence do, and all outlive the call.
    let code = unsafe {
        cpu_kernels::anyroll_attention(
            args.heads("q", q, [rows, heads, dim])?,
            args.heads("k", k, [tokens, kv_heads, dim])?,
            args.heads("v", v, [tokens, kv_heads, dim])?,
            spans.queries.as_ptr(),
            spans.keys.as_ptr(),
            causal.scale as f32,
            causal.tokens(),
            out.data_ptr().cast(),
            lse.data_ptr().cast(),
            spans.keys.len() as i64 - 1,
            spans.longest,
            heads,
            kv_heads,
            dim,
        )
    };
    args.ran(code)?;
    Ok((out, lse))
}

/// Dense fp32 copies.
fn wide<const N: usize>(tensors: [&Tensor; N]) -> Result<[Tensor; N]> {
    let mut wide = Vec::with_capacity(N);
    for tensor in tensors {
        wide.push(tensor.f_to_kind(Kind::Float)?.f_contiguous()?);
    }
    Ok(wide.try_into().expect("as many as came"))
}

#[derive(Clone, Copy)]
struct Sizes {
    /// Queries, and tokens.
    rows: i64,
    tokens: i64,
    heads: i64,
    kv_heads: i64,
    dim: i64,
}

impl Sizes {
    fn of(args: Args, q: &Tensor, k: &Tensor, packing: &Packing) -> Result<Sizes> {
        let [rows, heads, dim] = args.dims("q", q)?;
        let [_, kv_heads, _] = args.dims("k", k)?;
        check_groups(args, heads, kv_heads)?;
        if rows != packing.queries() {
            let problem = format!("has {} rows, expected {rows} as in `q`", packing.queries());
            return Err(args.refuse("packing", problem));
        }
        Ok(Sizes { rows, tokens: packing.tokens(), heads, kv_heads, dim })
    }
}

fn check_groups(args: Args, heads: i64, kv_heads: i64) -> Result<()> {
    if kv_heads > 0 && heads % kv_heads == 0 {
        return Ok(());
    }
    Err(args.refuse("k", format!("has {kv_heads} heads, which do not divide the {heads} of `q`")))
}

//! Operations of a decoding step that is recorded and run again. Each writes to the tensors that it is given, allocates
//! nothing, and reads values that change from step to step from the device's memory.

use std::{ffi::c_void, ptr, sync::Arc};

use tch::{Kind, Tensor};

use super::check::{Args, Engine};
use super::rope::rotary;
use super::{Activation, Causal, Result};
use crate::{
    Device,
    kernels::{
        self, Heads,
        decode::{Attended, HeadSizes, Rotation, SPLIT_TOKENS, Tables},
        model::NormSizes,
    },
};

/// A layer's keys and values in blocks, and the blocks of each row's sequence.
#[derive(Clone, Copy, Debug)]
pub struct PagedCache<'a> {
    /// `[blocks, T, K, D]`; T is a power of two, at least 16.
    pub keys: &'a Tensor,
    /// See `keys`.
    pub values: &'a Tensor,
    /// int32 `[B, W]`; block 0 for entries after a sequence's end.
    pub tables: &'a Tensor,
}

/// fp32 memory for attention in parts.
#[derive(Debug)]
pub struct AttentionParts {
    partial: Tensor,
    softmax: Tensor,
    splits: i64,
    rows: i64,
}

/// Parameters, state and results of sampling; one entry a row.
#[derive(Debug)]
pub struct Sampling<'a> {
    /// fp32 `[B, 5]`: inverse temperature (negative: the likeliest token, with the log-prob at the absolute), top-p,
    /// min-p, top-k (0: all), repetition penalty (1: none).
    pub choices: &'a Tensor,
    /// fp64 `[B]`, random numbers in [0, 1).
    pub uniforms: &'a Tensor,
    /// int32 `[B, ceil(V / 32)]`: bit `t % 32` of word `t / 32` is that of token `t`, set for those that the penalty is
    /// for. The token is added; rows without a penalty are neither read nor written.
    pub seen: &'a mut Tensor,
    /// int64 `[B]`: the token is written here for the next step.
    pub tokens: &'a mut Tensor,
    /// int64 `[B]`: is increased by one.
    pub positions: &'a mut Tensor,
    /// int64 `[B]`: the token is written here, too.
    pub chosen: &'a mut Tensor,
    /// fp32 `[B]`: the token's log-prob under softmax(logits / temperature).
    pub logprobs: &'a mut Tensor,
}

impl AttentionParts {
    /// Memory for `rows` rows of sequences of up to `tokens` tokens each.
    ///
    /// # Errors
    /// libtorch's error (out of memory).
    pub fn new(rows: i64, heads: i64, dim: i64, tokens: i64, device: tch::Device) -> Result<AttentionParts> {
        let splits = splits(tokens);
        let floats = |count: i64| Tensor::f_empty([splits * rows * heads * count], (Kind::Float, device));
        Ok(AttentionParts { partial: floats(dim)?, softmax: floats(2)?, splits, rows })
    }

    /// Bytes of the memory.
    pub fn bytes(&self) -> usize {
        (self.partial.numel() + self.softmax.numel()) * size_of::<f32>()
    }

    /// Bytes of such memory.
    pub(super) fn bytes_of(rows: i64, heads: i64, dim: i64, tokens: i64) -> i64 {
        splits(tokens) * rows * heads * (dim + 2) * 4
    }

    /// Views for up to `rows` rows.
    pub(super) fn first(&self, rows: i64) -> Result<AttentionParts> {
        let of_rows = |tensor: &Tensor| tensor.f_narrow(0, 0, tensor.size()[0] / self.rows * rows);
        let (partial, softmax) = (of_rows(&self.partial)?, of_rows(&self.softmax)?);
        Ok(AttentionParts { partial, softmax, splits: self.splits, rows })
    }
}

/// Parts that sequences of up to `tokens` tokens are cut in.
fn splits(tokens: i64) -> i64 {
    kernels::rows::ceil_div(tokens, SPLIT_TOKENS)
}

/// The device that a step can be recorded on for weights like `like`, heads of width `dim` and `vocab` tokens; the
/// reason if there is none.
pub fn recording_device(like: &Tensor, dim: i64, vocab: i64) -> Result<Arc<dyn Device>, String> {
    let device = device_of_kernels(like, dim, vocab)?;
    records_steps(&*device)?;
    Ok(device)
}

/// The device whose kernels decode, as [`recording_device`] has it, whether it records or not.
pub(super) fn device_of_kernels(like: &Tensor, dim: i64, vocab: i64) -> Result<Arc<dyn Device>, String> {
    let kind = like.kind();
    if !(kernels::decode::fit(kind, dim) && kernels::sample::fit(kind, vocab)) {
        return Err(format!("there are no decoding kernels for {kind:?}, head_dim {dim} and {vocab} tokens"));
    }
    let device = kernels::device_of(like);
    device.ok_or_else(|| format!("{:?} compiles no kernels at run time", like.device()))
}

/// Returns an error, with the reason, if steps of decoding cannot be recorded on a device. It still needs kernels for the
/// weights and heads.
pub fn records_steps(device: &dyn Device) -> Result<(), String> {
    if !device.has_kernels() {
        return Err(format!("{} compiles no kernels at run time", device.id()));
    }
    device.recording_stream().map(drop).map_err(|error| error.to_string())
}

/// [`super::rms_norm`] of `x` `[B, C]` into `y`; `rstd` is fp32 `[B]`.
///
/// # Errors
/// [`super::Error::Argument`] for tensors that do not fit, or the device's error; so for all below.
pub(super) fn rms_norm_into(
    x: &Tensor,
    weight: &Tensor,
    eps: f64,
    (y, rstd): (&mut Tensor, &mut Tensor),
) -> Result<()> {
    let args = Args::new("rms_norm_into", x);
    let [rows, dim] = args.dims("x", x)?;
    let to = (args.heads("y", y, [rows, 1, dim])?, args.floats("rstd", rstd, &[rows])?.cast());
    // SAFETY: the sizes of all tensors were checked, and what is written is borrowed mutably; libtorch takes memory
    // back in the order of its stream.
    unsafe { norm_rows(args, x, weight, eps, to) }
}

/// `x` `[B, C]`, whose rows may lie apart, becomes its [`super::rms_norm`].
pub fn rms_norm_(x: &mut Tensor, weight: &Tensor, eps: f64) -> Result<()> {
    let args = Args::new("rms_norm_", x);
    let [rows, dim] = args.dims("x", x)?;
    let to = (args.heads("x", x, [rows, 1, dim])?, ptr::null_mut());
    // SAFETY: as in `rms_norm_into`; a thread reads of `x` what it writes.
    unsafe { norm_rows(args, x, weight, eps, to) }
}

/// # Safety
/// `y` has rows as `x`, whose memory it may be, and `rstd` has a value for each of them or is null; the caller is entitled to
/// write to both until the work is done.
unsafe fn norm_rows(
    args: Args,
    x: &Tensor,
    weight: &Tensor,
    eps: f64,
    (y, rstd): (Heads, *mut c_void),
) -> Result<()> {
    let device = device_of(args, x)?;
    let [rows, dim] = args.dims("x", x)?;
    let weight = args.values("weight", weight, &[dim])?;
    let x = args.heads("x", x, [rows, 1, dim])?;
    let (none, sizes) = (ptr::null_mut(), NormSizes { rows, heads: 1, dim });
    // SAFETY: the sizes of `x` and of the weights were checked; the rest is the caller's promise.
    args.launched(unsafe {
        kernels::model::rms_norm(&*device, args.kind(), x, none, weight, eps as f32, (y, rstd), sizes)
    })
}

/// [`super::glu()`] with SiLU of `[B, 2 F]` into `y` `[B, F]`.
pub fn swiglu_into(gate_up: &Tensor, y: &mut Tensor) -> Result<()> {
    let args = Args::new("swiglu_into", gate_up);
    let device = device_of(args, gate_up)?;
    let [rows, size] = args.dims("y", y)?;
    let (from, to) =
        (args.values("gate_up", gate_up, &[rows, 2 * size])?, args.values("y", y, &[rows, size])?);
    // SAFETY: as in `rms_norm_into`.
    args.launched(unsafe {
        kernels::model::glu(&*device, args.kind(), Activation::Silu, (from, to), rows, size)
    })
}

/// Norms and rotation that make queries and keys from a step's rows.
#[derive(Clone, Copy, Debug)]
pub struct StepRotation<'a> {
    /// The weights `[D]` of the norms of queries and of keys, and their epsilon.
    pub norms: Option<(&'a Tensor, &'a Tensor, f64)>,
    /// See [`super::rope_table`].
    pub table: &'a Tensor,
}

/// Attention of a step's rows `qkv` `[B, H + 2 K, D]` over the first `positions + 1` tokens of their sequences (int64 `[B]`), of
/// which a window leaves the last, into `out` `[B, H D]`. With a rotation it norms and rotates the rows and puts their keys and
/// values into the cache; without one [`turn_rows_`] has done so. `parts` were made for as many rows and tokens. The kernel in
/// front does not write to the cache, unless it is that of [`turn_rows_`].
pub fn attend_into(
    qkv: &Tensor,
    rotation: Option<StepRotation>,
    positions: &Tensor,
    cache: PagedCache,
    causal: Causal,
    parts: &mut AttentionParts,
    out: &mut Tensor,
) -> Result<()> {
    let args = Args::new("attend_into", qkv);
    let q = queries_of(args, qkv, &cache)?;
    let rotation = rotation.map_or(Ok(Rotation::NONE), |rotation| checked(args, rotation, &q))?;
    let queries = Queries { q: &q, rotation, positions };
    attend(args, queries, cache, causal, parts, AttendInto { out, lse: None })
}

/// Norms and rotates the queries and keys of a step's rows `qkv` `[B, H + 2 K, D]` where they lie, and puts keys and values
/// into the cache: for rows of which several are of one sequence, since each attends to the keys of those before it.
pub fn turn_rows_(
    qkv: &mut Tensor,
    rotation: StepRotation,
    positions: &Tensor,
    cache: PagedCache,
) -> Result<()> {
    let args = Args::new("turn_rows", qkv);
    let device = device_of(args, qkv)?;
    let queries = queries_of(args, qkv, &cache)?;
    let rotation = checked(args, rotation, &queries)?;
    let size @ [rows, _, _] = args.dims("qkv", &queries)?;
    let (memory, sizes) = paged(args, &cache, size)?;
    let heads = (args.heads("qkv", &queries, size)?, rows as i32);
    let positions = args.dense("positions", positions, &[rows], Kind::Int64)?;
    // SAFETY: as in `rms_norm_into`; the kernel checks positions and block numbers.
    args.launched(unsafe {
        kernels::decode::turn_rows(&*device, args.kind(), heads, rotation, memory, positions, sizes)
    })
}

/// The queries `[B, H, D]` of a step's rows, in front of their keys and values.
fn queries_of(args: Args, qkv: &Tensor, cache: &PagedCache) -> Result<Tensor> {
    let [_, all_heads, _] = args.dims("qkv", qkv)?;
    let [_, _, kv_heads, _] = args.dims("keys", cache.keys)?;
    if all_heads <= 2 * kv_heads {
        return Err(args.refuse("qkv", format!("has {all_heads} heads, {kv_heads} of them keys'")));
    }
    Ok(qkv.f_narrow(1, 0, all_heads - 2 * kv_heads)?)
}

/// The norms and the rotation of `queries` `[B, H, D]`, checked.
fn checked(args: Args, rotation: StepRotation, queries: &Tensor) -> Result<Rotation> {
    let [_, _, dim] = args.dims("qkv", queries)?;
    let [table_rows, turned] = rotary(args, rotation.table, dim)?;
    let norm = |argument, norm: &Tensor| args.values(argument, norm, &[dim]);
    let (q_norm, k_norm, eps) = match rotation.norms {
        Some((q, k, eps)) => (norm("q_norm", q)?, norm("k_norm", k)?, eps as f32),
        None => (ptr::null_mut(), ptr::null_mut(), 0.0),
    };
    let table = args.floats("table", rotation.table, &[table_rows, turned])?.cast();
    Ok(Rotation { q_norm, k_norm, table, table_rows, eps, turned: turned as i32 })
}

/// Queries of a decoding step.
#[derive(Clone, Copy)]
pub(super) struct Queries<'a> {
    /// `[B, H, D]`, whose rows may lie apart; with a rotation, keys and values lie behind each row.
    pub q: &'a Tensor,
    pub rotation: Rotation,
    /// int64 `[B]`.
    pub positions: &'a Tensor,
}

/// Tensors that [`attend`] writes.
pub(super) struct AttendInto<'a> {
    /// `[B, H D]`.
    pub out: &'a mut Tensor,
    /// log(sum(exp(scores))), fp32 `[B, H]`, if it is wanted.
    pub lse: Option<&'a mut Tensor>,
}

/// Like [`attend_into`], for queries that may be ready.
pub(super) fn attend(
    args: Args,
    Queries { q, rotation, positions }: Queries,
    cache: PagedCache,
    causal: Causal,
    parts: &AttentionParts,
    AttendInto { out, lse }: AttendInto,
) -> Result<()> {
    let device = device_of(args, q)?;
    let [rows, heads, dim] = args.dims("q", q)?;
    let (memory, sizes) = paged(args, &cache, [rows, heads, dim])?;
    let count = parts.splits * rows * heads;
    let attended = Attended {
        partial: args.floats("parts", &parts.partial, &[count * dim])?.cast(),
        softmax: args.floats("parts", &parts.softmax, &[count * 2])?.cast(),
        lse: match lse {
            Some(lse) => args.floats("lse", lse, &[rows, heads])?.cast(),
            None => ptr::null_mut(),
        },
        out: args.values("out", out, &[rows, heads * dim])?,
        splits: parts.splits as i32,
        rows: rows as i32,
        heads: heads as i32,
    };
    let positions = args.dense("positions", positions, &[rows], Kind::Int64)?;
    let queries = args.heads("q", q, [rows, heads, dim])?;
    let how = (causal.scale as f32, causal.window);
    // SAFETY: as in `rms_norm_into`; the kernel checks positions and block numbers.
    args.launched(unsafe {
        kernels::decode::attend(
            &*device,
            args.kind(),
            queries,
            rotation,
            memory,
            positions,
            how,
            attended,
            sizes,
        )
    })
}

/// Chooses a token for each row of `logits` `[B, V]`.
pub fn sample_into(logits: &Tensor, sampling: Sampling) -> Result<()> {
    let args = Args::new("sample_into", logits);
    let device = device_of(args, logits)?;
    let [rows, vocab] = args.dims("logits", logits)?;
    let of_rows = |argument, tensor: &Tensor, kind| args.dense(argument, tensor, &[rows], kind);
    let values = args.values("logits", logits, &[rows, vocab])?;
    let choices = args.floats("choices", sampling.choices, &[rows, 5])?.cast();
    let uniforms = of_rows("uniforms", sampling.uniforms, Kind::Double)?;
    let words = kernels::rows::ceil_div(vocab, 32);
    let seen = args.dense("seen", sampling.seen, &[rows, words], Kind::Int)?;
    let next = (
        of_rows("tokens", sampling.tokens, Kind::Int64)?,
        of_rows("positions", sampling.positions, Kind::Int64)?,
    );
    let told = (
        of_rows("chosen", sampling.chosen, Kind::Int64)?,
        of_rows("logprobs", sampling.logprobs, Kind::Float)?,
    );
    let stripes = kernels::sample::stripes(args.kind(), vocab);
    let measured = Tensor::f_empty([rows, stripes, 2], (Kind::Float, logits.device()))?;
    // SAFETY: as in `rms_norm_into`.
    args.launched(unsafe {
        kernels::sample::sample(
            &*device,
            args.kind(),
            (values, rows, vocab),
            (choices, uniforms),
            (measured.data_ptr(), seen),
            next,
            told,
        )
    })
}

pub(super) fn device_of(args: Args, tensor: &Tensor) -> Result<Arc<dyn Device>> {
    match Engine::of(tensor) {
        Some(Engine::Device(device)) => Ok(device),
        _ => {
            Err(args
                .refuse("tensors", format!("are on {:?}, which has no kernels for this", tensor.device())))
        }
    }
}

/// A cache that rows with so many heads read, checked: its addresses and the heads.
fn paged(
    args: Args,
    cache: &PagedCache,
    [rows, heads, dim]: [i64; 3],
) -> Result<((*mut c_void, *mut c_void, Tables), HeadSizes)> {
    let size @ [_, block_tokens, kv_heads, _] = args.dims("keys", cache.keys)?;
    let [_, table_len] = args.dims("tables", cache.tables)?;
    if kv_heads < 1 || heads < 1 || heads % kv_heads != 0 {
        return Err(args.refuse("keys", format!("have {kv_heads} heads, for {heads} of queries")));
    }
    if block_tokens < 16 || block_tokens.count_ones() != 1 {
        return Err(
            args.refuse("keys", format!("have {block_tokens} tokens a block, not a power of two from 16"))
        );
    }
    let expected = [size[0], block_tokens, kv_heads, dim];
    let tables = Tables {
        entries: args.dense("tables", cache.tables, &[rows, table_len], Kind::Int)?,
        table_len: table_len as i32,
        block_shift: block_tokens.trailing_zeros() as i32,
        blocks: size[0] as i32,
    };
    let keys = args.values("keys", cache.keys, &expected)?;
    let values = args.values("values", cache.values, &expected)?;
    let sizes = HeadSizes { heads: heads as i32, kv_heads: kv_heads as i32, dim: dim as i32 };
    Ok(((keys, values, tables), sizes))
}

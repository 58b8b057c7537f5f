//! Operations of a forward pass in which a row's bits do not depend on the other rows or their number, so that sampling
//! computes the same values as training. Norms, rotation, SwiGLU and log-probabilities have that property already; libraries'
//! matrix products and attention do not.

use std::ptr;

use tch::{Kind, Tensor};

use super::check::{Args, Engine, is_narrow_on_host};
use super::decode::{AttendInto, AttentionParts, PagedCache, Queries, attend};
use super::{
    Causal, Packing, Result, attention, attention_with_history, cpu_kernels, decode_attention,
    device_of_kernels,
};
use crate::{
    Device,
    kernels::{self, decode::Rotation, product::Product, rows::ceil_div},
};

/// Tokens of a block of keys and values that are laid out here.
const BLOCK_TOKENS: i64 = 16;
/// Most memory of attention in parts: it bounds the rows of long sequences that are computed at a time.
const PARTS_BYTES: i64 = 64 << 20;

/// Returns an error, with the reason, if a device lacks some of these operations for weights like `like`, heads of width `dim`
/// and `vocab` tokens.
pub fn exist_by_rows(like: &Tensor, dim: i64, vocab: i64) -> Result<(), String> {
    if like.device() == tch::Device::Cpu { Ok(()) } else { device_of_kernels(like, dim, vocab).map(drop) }
}

/// `x W^T + bias`, where `x` is `[N, C]`, `weight` `[F, C]` and `bias` `[F]`, all dense: `[N, F]`. Unlike libtorch's products,
/// the order of summation does not depend on the number of rows. Sums run in fp32; 16-bit values are widened before
/// and the result rounded once.
///
/// # Errors
/// [`super::Error::Argument`] for tensors that do not fit, or whose device has no kernels; the device's or libtorch's error.
pub fn linear_by_rows(x: &Tensor, weight: &Tensor, bias: Option<&Tensor>) -> Result<Tensor> {
    let args = Args::new("linear_by_rows", x);
    if is_narrow_on_host(x) {
        let wide = |tensor: &Tensor| tensor.f_to_kind(Kind::Float);
        let bias = bias.map(wide).transpose()?;
        return Ok(linear_by_rows(&wide(x)?, &wide(weight)?, bias.as_ref())?.f_to_kind(x.kind())?);
    }
    let ([rows, inputs], [outputs, _]) = (args.dims("x", x)?, args.dims("weight", weight)?);
    let mut y = args.empty(&[rows, outputs])?;
    match Engine::of(x) {
        Some(Engine::Cpu) => {
            // SAFETY: the sizes of all tensors were checked or made here, and they outlive the call.
            args.ran(unsafe {
                cpu_kernels::anyroll_linear(
                    args.floats("x", x, &[rows, inputs])?,
                    args.floats("weight", weight, &[outputs, inputs])?,
                    y.data_ptr().cast(),
                    rows,
                    inputs,
                    outputs,
                )
            })?;
            if let Some(bias) = bias {
                args.floats("bias", bias, &[outputs])?;
                drop(y.f_add_(bias)?);
            }
        }
        Some(Engine::Device(device)) => multiply(args, &*device, (x, weight, bias), &mut y, false)?,
        None => return Err(refused(args, x)),
    }
    Ok(y)
}

/// Writes the same to `y` on a device, for a step that is recorded. The previous kernel does not write the weights.
///
/// # Errors
/// The same as [`linear_by_rows`].
pub fn linear_by_rows_into(x: &Tensor, weight: &Tensor, bias: Option<&Tensor>, y: &mut Tensor) -> Result<()> {
    let args = Args::new("linear_by_rows_into", x);
    let Some(Engine::Device(device)) = Engine::of(x) else { return Err(refused(args, x)) };
    multiply(args, &*device, (x, weight, bias), y, true)
}

/// Multiplies with the kernel that suits the sizes of the weights.
fn multiply(
    args: Args,
    device: &dyn Device,
    (x, weight, bias): (&Tensor, &Tensor, Option<&Tensor>),
    y: &mut Tensor,
    is_early: bool,
) -> Result<()> {
    let ([rows, inputs], [outputs, _]) = (args.dims("x", x)?, args.dims("weight", weight)?);
    let sizes = [rows, outputs, inputs];
    let x = args.values("x", x, &[rows, inputs])?;
    let weight = args.values("weight", weight, &[outputs, inputs])?;
    let y = args.values("y", y, &[rows, outputs])?;
    let bias = bias.map(|bias| args.values("bias", bias, &[outputs])).transpose()?.unwrap_or(ptr::null_mut());
    let product = Product { bias, ..Product::new([x, weight, y], sizes) };
    let Some(narrow) = args.narrow().filter(|&narrow| product.fits(device, narrow)) else {
        // SAFETY: the sizes of all tensors were checked, `y` is borrowed mutably, and libtorch takes memory back in the order
        // of its stream.
        return args.launched(unsafe {
            kernels::model::linear_by_rows(device, args.kind(), [x, weight, bias, y], sizes)
        });
    };
    if !product.is_aligned() {
        // Another kernel would give other bits.
        return Err(args.refuse("x", "or another argument begins at no multiple of 16 bytes"));
    }
    // SAFETY: as above; the weights are the caller's promise.
    args.launched(unsafe { kernels::product::multiply_by_rows(device, narrow, product, is_early) })
}

/// [`attention()`], row by row.
///
/// # Errors
/// The same as there, or that the device has no kernels for it.
pub fn attention_by_rows(
    q: &Tensor,
    k: &Tensor,
    v: &Tensor,
    packing: &Packing,
    causal: Causal,
) -> Result<(Tensor, Tensor)> {
    if q.device() == tch::Device::Cpu {
        return attention(q, k, v, packing, causal);
    }
    let args = Args::new("attention_by_rows", q);
    let pages = packing.pages(BLOCK_TOKENS)?;
    let [keys, values] = packing.spread([k, v])?.map(|rows| laid_out(&rows, pages.blocks, &pages.places));
    let cache = PagedCache { keys: &keys?, values: &values?, tables: &pages.tables };
    attend_rows(args, q, packing.positions(), cache, causal)
}

/// [`attention_with_history`], row by row.
///
/// # Errors
/// The same as [`attention_by_rows`].
pub fn attention_with_history_by_rows(q: &Tensor, k: &Tensor, v: &Tensor, causal: Causal) -> Result<Tensor> {
    if q.device() == tch::Device::Cpu {
        return attention_with_history(q, k, v, causal);
    }
    let args = Args::new("attention_with_history_by_rows", q);
    let ([rows, ..], [tokens, ..]) = (args.dims::<3>("q", q)?, args.dims::<3>("k", k)?);
    let range = |from: i64, to: i64, kind| Tensor::f_arange_start(from, to, (kind, q.device()));
    let (places, blocks) = (range(0, tokens, Kind::Int64)?, ceil_div(tokens, BLOCK_TOKENS));
    let [keys, values] = [k, v].map(|rows| laid_out(rows, blocks, &places));
    let tables = range(0, blocks, Kind::Int)?.f_expand([rows, blocks], false)?.f_contiguous()?;
    let cache = PagedCache { keys: &keys?, values: &values?, tables: &tables };
    Ok(attend_rows(args, q, &range(tokens - rows, tokens, Kind::Int64)?, cache, causal)?.0)
}

/// [`decode_attention`], row by row.
///
/// # Errors
/// The same as [`attention_by_rows`].
pub fn decode_attention_by_rows(
    q: &Tensor,
    k_cache: &Tensor,
    v_cache: &Tensor,
    tables: &Tensor,
    lengths: &Tensor,
    causal: Causal,
) -> Result<Tensor> {
    if q.device() == tch::Device::Cpu {
        return decode_attention(q, k_cache, v_cache, tables, lengths, causal);
    }
    let args = Args::new("decode_attention_by_rows", q);
    let cache = PagedCache { keys: k_cache, values: v_cache, tables: &tables.f_to_kind(Kind::Int)? };
    Ok(attend_rows(args, q, &lengths.f_sub_scalar(1)?, cache, causal)?.0)
}

/// Attention by the kernel of decoding, whose order of a row's tokens depends on the row's position alone: `[N, H D]`, and
/// log(sum(exp(scores))), fp32 `[N, H]`.
fn attend_rows(
    args: Args,
    q: &Tensor,
    positions: &Tensor,
    cache: PagedCache,
    causal: Causal,
) -> Result<(Tensor, Tensor)> {
    let [rows, heads, dim] = args.dims("q", q)?;
    let (out, lse) = (args.empty(&[rows, heads * dim])?, args.empty_floats(&[rows, heads])?);
    let tokens = cache.tables.size()[1] * cache.keys.size()[1];
    let at_once = (PARTS_BYTES / AttentionParts::bytes_of(1, heads, dim, tokens)).clamp(1, rows.max(1));
    let parts = AttentionParts::new(at_once, heads, dim, tokens, q.device())?;
    for start in (0..rows).step_by(at_once as usize) {
        let count = at_once.min(rows - start);
        let of_rows = |tensor: &Tensor| tensor.f_narrow(0, start, count);
        let cache = PagedCache { tables: &of_rows(cache.tables)?, ..cache };
        let into = AttendInto { out: &mut of_rows(&out)?, lse: Some(&mut of_rows(&lse)?) };
        let parts = parts.first(count)?;
        let queries = Queries { q: &of_rows(q)?, rotation: Rotation::NONE, positions: &of_rows(positions)? };
        attend(args, queries, cache, causal, &parts, into)?;
    }
    Ok((out, lse))
}

/// Rows `[N, K, D]` at their places in `[blocks, BLOCK_TOKENS, K, D]`; the rest is undefined.
fn laid_out(rows: &Tensor, blocks: i64, places: &Tensor) -> Result<Tensor> {
    let [_, heads, dim] = Args::new("attention_by_rows", rows).dims("k", rows)?;
    let laid = Tensor::f_empty([blocks, BLOCK_TOKENS, heads, dim], (rows.kind(), rows.device()))?;
    drop(laid.f_flatten(0, 1)?.f_index_copy_(0, places, rows)?);
    Ok(laid)
}

fn refused(args: Args, x: &Tensor) -> super::Error {
    let problem = format!("is {:?} on {:?}, where there are no products by rows", x.kind(), x.device());
    args.refuse("x", problem)
}

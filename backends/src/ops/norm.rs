//! Root-mean-square norms (Zhang and Sennrich, 2019), with the addition to the residual stream before them.

use tch::{Kind, Tensor};

use super::check::{Args, has_kernel};
use super::{Result, Store, composite, kernels};

/// `y = x * rstd * weight` over the last dimension, `rstd = 1 / sqrt(mean(x^2) + eps)`.
///
/// `x` is `[N, C]`, or `[N, H, D]` whose rows may lie apart (a view of heads). Returns `y`, dense, in the shape
/// and dtype of `x`, and `rstd` in fp32 `[N]` or `[N, H]`, which the backward needs.
///
/// # Errors
/// [`super::Error::Argument`] for a `weight` that does not fit, or libtorch's error.
pub fn rms_norm(x: &Tensor, weight: &Tensor, eps: f64) -> Result<(Tensor, Tensor)> {
    if !has_kernel(x) {
        return composite::rms_norm(x, weight, eps);
    }
    // SAFETY: without a residual the kernel only reads `x`.
    unsafe { norm_kernel("rms_norm", x, None, weight, eps) }
}

/// `x += residual`, then [`rms_norm`] of `x`, in one pass. Both are dense `[N, C]`.
///
/// # Errors
/// As [`rms_norm`].
pub fn add_rms_norm_(
    x: &mut Tensor,
    residual: &Tensor,
    weight: &Tensor,
    eps: f64,
) -> Result<(Tensor, Tensor)> {
    if !has_kernel(x) {
        return composite::add_rms_norm_(x, residual, weight, eps);
    }
    // SAFETY: `x` is borrowed mutably.
    unsafe { norm_kernel("add_rms_norm_", x, Some(residual), weight, eps) }
}

/// # Safety
/// With a residual, the caller must be entitled to write to `x`.
unsafe fn norm_kernel(
    op: &'static str,
    x: &Tensor,
    residual: Option<&Tensor>,
    weight: &Tensor,
    eps: f64,
) -> Result<(Tensor, Tensor)> {
    let args = Args(op);
    let size = x.size();
    let [rows, heads, dim] = heads_of(args, &size)?;
    let y = Tensor::f_empty(&size, (Kind::Float, x.device()))?;
    let rstd = Tensor::f_empty(&size[..size.len() - 1], (Kind::Float, x.device()))?;
    let x_heads = args.heads("x", x, [rows, heads, dim])?;
    let residual = residual.map(|residual| args.floats("residual", residual, &size)).transpose()?;
    let weight = args.floats("weight", weight, &[dim])?;
    // SAFETY: the sizes of all tensors were checked or made here, and they outlive the call.
    let code = unsafe {
        kernels::anyroll_rms_norm(
            x_heads,
            residual.map_or(std::ptr::null(), |pointer| pointer.cast_const()),
            weight,
            eps as f32,
            args.floats("y", &y, &size)?,
            args.floats("rstd", &rstd, &size[..size.len() - 1])?,
            rows,
            heads,
            dim,
        )
    };
    kernels::check(op, code)?;
    Ok((y, rstd))
}

/// Backward of [`rms_norm`]. Adds the gradient of `x` to `dx`, stores that of the weight in `dweight`, and
/// replaces `dy` by `y`, which the caller needs for the gradient of the matrix behind the norm.
///
/// # Errors
/// As [`rms_norm`].
pub fn rms_norm_backward_(
    dy: &mut Tensor,
    x: &Tensor,
    rstd: &Tensor,
    weight: &Tensor,
    dx: &mut Tensor,
    dweight: &mut Tensor,
    how: Store,
) -> Result<()> {
    if !has_kernel(x) {
        return composite::rms_norm_backward_(dy, x, rstd, weight, dx, dweight, how);
    }
    let args = Args("rms_norm_backward_");
    let size = x.size();
    let [rows, heads, dim] = heads_of(args, &size)?;
    // SAFETY: the sizes of all tensors were checked, the written ones are borrowed mutably, and all outlive
    // the call.
    let code = unsafe {
        kernels::anyroll_rms_norm_backward(
            args.heads("dy", dy, [rows, heads, dim])?,
            args.heads("x", x, [rows, heads, dim])?,
            args.floats("rstd", rstd, &size[..size.len() - 1])?,
            args.floats("weight", weight, &[dim])?,
            args.heads("dx", dx, [rows, heads, dim])?,
            args.floats("dweight", dweight, &[dim])?,
            how == Store::Add,
            rows,
            heads,
            dim,
        )
    };
    kernels::check(args.0, code)
}

/// `[N, C]` is one head of width C.
fn heads_of(args: Args, size: &[i64]) -> Result<[i64; 3]> {
    match *size {
        [rows, dim] => Ok([rows, 1, dim]),
        [rows, heads, dim] => Ok([rows, heads, dim]),
        _ => Err(args.refuse("x", format!("has shape {size:?}, expected [N, C] or [N, H, D]"))),
    }
}

//! Root-mean-square norms (Zhang and Sennrich, 2019), with the addition to the residual stream before them.

use std::ptr;

use tch::Tensor;

use super::check::{Args, Engine};
use super::{Result, Store, composite, cpu_kernels};
use crate::kernels::{self, Heads, model::NormSizes};

/// `y = x * rstd * weight` over the last dimension, `rstd = 1 / sqrt(mean(x^2) + eps)`.
///
/// `x` is `[N, C]`, or `[N, H, D]` whose rows may lie apart (a view of heads). Returns `y`, dense, in the shape
/// and dtype of `x`, and `rstd` in fp32 `[N]` or `[N, H]`, which the backward needs.
///
/// # Errors
/// [`super::Error::Argument`] for a `weight` that does not fit, or libtorch's error.
pub fn rms_norm(x: &Tensor, weight: &Tensor, eps: f64) -> Result<(Tensor, Tensor)> {
    let Some(engine) = Engine::of(x) else { return composite::rms_norm(x, weight, eps) };
    // SAFETY: without a residual the kernel only reads `x`.
    unsafe { norm_kernel(Args::new("rms_norm", x), engine, x, None, weight, eps) }
}

/// `x += residual`, then [`rms_norm`] of `x`, in one pass. Both are dense `[N, C]`.
///
/// # Errors
/// The same as [`rms_norm`].
pub fn add_rms_norm_(
    x: &mut Tensor,
    residual: &Tensor,
    weight: &Tensor,
    eps: f64,
) -> Result<(Tensor, Tensor)> {
    let Some(engine) = Engine::of(x) else { return composite::add_rms_norm_(x, residual, weight, eps) };
    // SAFETY: `x` is borrowed mutably.
    unsafe { norm_kernel(Args::new("add_rms_norm_", x), engine, x, Some(residual), weight, eps) }
}

/// # Safety
/// With a residual, the caller must be entitled to write to `x`.
unsafe fn norm_kernel(
    args: Args,
    engine: Engine,
    x: &Tensor,
    residual: Option<&Tensor>,
    weight: &Tensor,
    eps: f64,
) -> Result<(Tensor, Tensor)> {
    let size = x.size();
    let [rows, heads, dim] = heads_of(args, &size)?;
    let (y, rstd) = (args.empty(&size)?, args.empty_floats(&size[..size.len() - 1])?);
    let x = args.heads("x", x, [rows, heads, dim])?;
    let residual = residual.map(|residual| args.values("residual", residual, &size)).transpose()?;
    let residual = residual.unwrap_or(ptr::null_mut());
    let weight = args.values("weight", weight, &[dim])?;
    let (to, scale) = (y.data_ptr(), rstd.data_ptr());
    let eps = eps as f32;
    // SAFETY: the sizes of all tensors were checked or made here, and they outlive the work.
    unsafe {
        match engine {
            Engine::Cpu => args.ran(cpu_kernels::anyroll_rms_norm(
                x,
                residual.cast(),
                weight.cast(),
                eps,
                to.cast(),
                scale.cast(),
                rows,
                heads,
                dim,
            ))?,
            Engine::Device(device) => args.launched(kernels::model::rms_norm(
                &*device,
                args.kind(),
                x,
                residual,
                weight,
                eps,
                (Heads { data: to, stride: heads * dim }, scale),
                NormSizes { rows, heads, dim },
            ))?,
        }
    }
    Ok((y, rstd))
}

/// Backward of [`rms_norm`]. Adds the gradient of `x` to `dx`, stores that of the weight in `dweight`, and
/// replaces `dy` by `y`, which the caller needs for the gradient of the matrix behind the norm.
///
/// # Errors
/// The same as [`rms_norm`].
pub fn rms_norm_backward_(
    dy: &mut Tensor,
    x: &Tensor,
    rstd: &Tensor,
    weight: &Tensor,
    dx: &mut Tensor,
    dweight: &mut Tensor,
    how: Store,
) -> Result<()> {
    let Some(engine) = Engine::of(x) else {
        return composite::rms_norm_backward_(dy, x, rstd, weight, dx, dweight, how);
    };
    let args = Args::new("rms_norm_backward_", x);
    let size = x.size();
    let [rows, heads, dim] = heads_of(args, &size)?;
    let sizes = NormSizes { rows, heads, dim };
    if matches!(engine, Engine::Device(_)) && !sizes.fit(args.kind()) {
        return composite::rms_norm_backward_(dy, x, rstd, weight, dx, dweight, how);
    }
    let [dy, x, dx] = [("dy", &*dy), ("x", x), ("dx", &*dx)]
        .map(|(argument, tensor)| args.heads(argument, tensor, [rows, heads, dim]));
    let (dy, x, dx) = (dy?, x?, dx?);
    let rstd = args.floats("rstd", rstd, &size[..size.len() - 1])?;
    let weight = args.values("weight", weight, &[dim])?;
    let (dweight, is_added) = (args.values("dweight", dweight, &[dim])?, how == Store::Add);
    // SAFETY: the sizes of all tensors were checked, the written ones are borrowed mutably, and all outlive
    // the work.
    unsafe {
        match engine {
            Engine::Cpu => args.ran(cpu_kernels::anyroll_rms_norm_backward(
                dy,
                x,
                rstd,
                weight.cast(),
                dx,
                dweight.cast(),
                is_added,
                rows,
                heads,
                dim,
            )),
            Engine::Device(device) => {
                let partial = args.empty_floats(&[sizes.parts(), dim])?;
                args.launched(kernels::model::rms_norm_backward(
                    &*device,
                    args.kind(),
                    (dy, x, dx),
                    (rstd, weight),
                    partial.data_ptr(),
                    (dweight, is_added),
                    sizes,
                ))
            }
        }
    }
}

/// `[N, C]` is one head of width C.
fn heads_of(args: Args, size: &[i64]) -> Result<[i64; 3]> {
    match *size {
        [rows, dim] => Ok([rows, 1, dim]),
        [rows, heads, dim] => Ok([rows, heads, dim]),
        _ => Err(args.refuse("x", format!("has shape {size:?}, expected [N, C] or [N, H, D]"))),
    }
}

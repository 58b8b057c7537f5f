//! The gated activation of the MLP (Shazeer, 2020).

use tch::{Kind, Tensor};

use super::check::{Args, has_kernel};
use super::{Result, composite, kernels};

/// `silu(gate) * up` of the dense `[N, 2 F]` = `[gate | up]`: `[N, F]`.
///
/// # Errors
/// [`super::Error::Argument`] for a tensor that is not such a matrix, or libtorch's error.
pub fn swiglu(gate_up: &Tensor) -> Result<Tensor> {
    if !has_kernel(gate_up) {
        return composite::swiglu(gate_up);
    }
    let args = Args("swiglu");
    let [rows, width] = args.dims("gate_up", gate_up)?;
    let y = Tensor::f_empty([rows, width / 2], (Kind::Float, gate_up.device()))?;
    // SAFETY: the sizes of both tensors were checked or made here, and they outlive the call.
    let code = unsafe {
        kernels::anyroll_swiglu(
            args.floats("gate_up", gate_up, &[rows, width / 2 * 2])?,
            args.floats("y", &y, &[rows, width / 2])?,
            rows,
            width / 2,
        )
    };
    kernels::check(args.0, code)?;
    Ok(y)
}

/// Backward of [`swiglu`] in place: replaces `gate_up` by its gradient, and the gradient `dy` `[N, F]` by the
/// output `y`, which the caller needs for the gradient of the matrix behind it.
///
/// # Errors
/// As [`swiglu`].
pub fn swiglu_backward_(gate_up: &mut Tensor, dy: &mut Tensor) -> Result<()> {
    if !has_kernel(gate_up) {
        return composite::swiglu_backward_(gate_up, dy);
    }
    let args = Args("swiglu_backward_");
    let [rows, size] = args.dims("dy", dy)?;
    // SAFETY: the sizes of both tensors were checked, both are borrowed mutably and outlive the call.
    let code = unsafe {
        kernels::anyroll_swiglu_backward(
            args.floats("gate_up", gate_up, &[rows, 2 * size])?,
            args.floats("dy", dy, &[rows, size])?,
            rows,
            size,
        )
    };
    kernels::check(args.0, code)
}

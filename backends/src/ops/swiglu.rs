//! The gated activation of the MLP (Shazeer, 2020).

use tch::Tensor;

use super::check::{Args, Engine};
use super::{Result, composite, kernels};
use crate::model_kernels;

/// `silu(gate) * up` of the dense `[N, 2 F]` = `[gate | up]`: `[N, F]`.
///
/// # Errors
/// [`super::Error::Argument`] for a tensor that is not such a matrix, or libtorch's error.
pub fn swiglu(gate_up: &Tensor) -> Result<Tensor> {
    let Some(engine) = Engine::of(gate_up) else { return composite::swiglu(gate_up) };
    let args = Args::new("swiglu", gate_up);
    let [rows, width] = args.dims("gate_up", gate_up)?;
    let size = width / 2;
    let result = args.empty(&[rows, size])?;
    let from = args.values("gate_up", gate_up, &[rows, 2 * size])?;
    let to = args.values("y", &result, &[rows, size])?;
    // SAFETY: the sizes of both tensors were checked or made here, and they outlive the work.
    unsafe {
        match engine {
            Engine::Cpu => args.ran(kernels::anyroll_swiglu(from.cast(), to.cast(), rows, size))?,
            Engine::Device(device) => {
                args.launched(model_kernels::swiglu(&*device, args.kind(), from, to, rows, size))?;
            }
        }
    }
    Ok(result)
}

/// Backward of [`swiglu`] in place: replaces `gate_up` by its gradient, and the gradient `dy` `[N, F]` by the
/// output `y`, which the caller needs for the gradient of the matrix behind it.
///
/// # Errors
/// As [`swiglu`].
pub fn swiglu_backward_(gate_up: &mut Tensor, dy: &mut Tensor) -> Result<()> {
    let Some(engine) = Engine::of(gate_up) else { return composite::swiglu_backward_(gate_up, dy) };
    let args = Args::new("swiglu_backward_", gate_up);
    let [rows, size] = args.dims("dy", dy)?;
    let gate_up = args.values("gate_up", gate_up, &[rows, 2 * size])?;
    let dy = args.values("dy", dy, &[rows, size])?;
    // SAFETY: the sizes of both tensors were checked, both are borrowed mutably and outlive the work.
    unsafe {
        match engine {
            Engine::Cpu => args.ran(kernels::anyroll_swiglu_backward(gate_up.cast(), dy.cast(), rows, size)),
            Engine::Device(device) => {
                args.launched(model_kernels::swiglu_backward(&*device, args.kind(), gate_up, dy, rows, size))
            }
        }
    }
}

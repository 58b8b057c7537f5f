//! The gated activation of the MLP (Shazeer, 2020).

use tch::Tensor;

use super::check::{Args, Engine};
use super::{Activation, Result, composite, cpu_kernels};
use crate::kernels;

/// `activation(gate) * up` of the dense `[N, 2 F]` = `[gate | up]`: `[N, F]`.
///
/// # Errors
/// [`super::Error::Argument`] for a tensor that is not such a matrix, or libtorch's error.
pub fn glu(gate_up: &Tensor, activation: Activation) -> Result<Tensor> {
    let Some(engine) = Engine::of(gate_up) else { return composite::glu(gate_up, activation) };
    let args = Args::new("glu", gate_up);
    let [rows, width] = args.dims("gate_up", gate_up)?;
    let size = width / 2;
    let result = args.empty(&[rows, size])?;
    let from = args.values("gate_up", gate_up, &[rows, 2 * size])?;
    let to = args.values("y", &result, &[rows, size])?;
    // SAFETY: the sizes of both tensors were checked or made here, and they outlive the work.
    unsafe {
        match engine {
            Engine::Cpu => {
                let kernel = match activation {
                    Activation::Silu => cpu_kernels::anyroll_swiglu,
                    Activation::GeluTanh => cpu_kernels::anyroll_geglu,
                };
                args.ran(kernel(from.cast(), to.cast(), rows, size))?;
            }
            Engine::Device(device) => {
                args.launched(kernels::model::glu(
                    &*device,
                    args.kind(),
                    activation,
                    (from, to),
                    rows,
                    size,
                ))?;
            }
        }
    }
    Ok(result)
}

/// Backward of [`glu`] in place: replaces `gate_up` by its gradient, and the gradient `dy` `[N, F]` by the
/// output `y`, which the caller needs for the gradient of the matrix behind it.
///
/// # Errors
/// The same as [`glu`].
pub fn glu_backward_(gate_up: &mut Tensor, dy: &mut Tensor, activation: Activation) -> Result<()> {
    let Some(engine) = Engine::of(gate_up) else { return composite::glu_backward_(gate_up, dy, activation) };
    let args = Args::new("glu_backward_", gate_up);
    let [rows, size] = args.dims("dy", dy)?;
    let gate_up = args.values("gate_up", gate_up, &[rows, 2 * size])?;
    let dy = args.values("dy", dy, &[rows, size])?;
    // SAFETY: the sizes of both tensors were checked, both are borrowed mutably and outlive the work.
    unsafe {
        match engine {
            Engine::Cpu => {
                let kernel = match activation {
                    Activation::Silu => cpu_kernels::anyroll_swiglu_backward,
                    Activation::GeluTanh => cpu_kernels::anyroll_geglu_backward,
                };
                args.ran(kernel(gate_up.cast(), dy.cast(), rows, size))
            }
            Engine::Device(device) => {
                let kind = args.kind();
                args.launched(kernels::model::glu_backward(
                    &*device,
                    kind,
                    activation,
                    (gate_up, dy),
                    rows,
                    size,
                ))
            }
        }
    }
}

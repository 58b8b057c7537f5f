//! Products of matrices in which a row's result does not depend on what other rows there are.

use tch::Tensor;

use super::check::{Args, Engine, is_narrow_on_host};
use super::{Result, kernels};

/// `x W^T + bias`, where `x` is `[N, C]`, `weight` `[F, C]` and `bias` `[F]`, all dense: `[N, F]`. A row has the same bits
/// whatever the others hold and however many they are, unlike libtorch's, which chooses another order of summation for
/// another number of rows. Sums run in fp32; 16-bit values are widened before and the result rounded once.
///
/// # Errors
/// [`super::Error::Argument`] for tensors that do not fit, or that are not on a CPU; or libtorch's error.
pub fn linear_by_rows(x: &Tensor, weight: &Tensor, bias: Option<&Tensor>) -> Result<Tensor> {
    let args = Args::new("linear_by_rows", x);
    if is_narrow_on_host(x) {
        let wide = |tensor: &Tensor| tensor.f_to_kind(tch::Kind::Float);
        let bias = bias.map(wide).transpose()?;
        return Ok(linear_by_rows(&wide(x)?, &wide(weight)?, bias.as_ref())?.f_to_kind(x.kind())?);
    }
    let Some(Engine::Cpu) = Engine::of(x) else {
        let problem = format!("is {:?} on {:?}, where there are no products by rows", x.kind(), x.device());
        return Err(args.refuse("x", problem));
    };
    let [rows, inner] = args.dims("x", x)?;
    let [columns, _] = args.dims("weight", weight)?;
    let mut out = args.empty(&[rows, columns])?;
    // SAFETY: the sizes of all tensors were checked or made here, and they outlive the call.
    args.ran(unsafe {
        kernels::anyroll_linear(
            args.floats("x", x, &[rows, inner])?,
            args.floats("weight", weight, &[columns, inner])?,
            out.data_ptr().cast(),
            rows,
            inner,
            columns,
        )
    })?;
    if let Some(bias) = bias {
        args.floats("bias", bias, &[columns])?;
        drop(out.f_add_(bias)?);
    }
    Ok(out)
}

//! Gradients that are sums over the rows of a batch.

use tch::Tensor;

use super::check::{Args, has_kernel};
use super::{Result, Store, composite, kernels};

/// The gradient of an embedding: row `v` of `dweight` `[V, C]` is the sum of the rows of `dy` `[N, C]` whose
/// token is `v`, in the order of the rows. `tokens` is int64 `[N]`.
///
/// # Errors
/// [`super::Error::Argument`] for shapes that do not fit or a token outside of the vocabulary, or libtorch's
/// error.
pub fn embedding_backward(dy: &Tensor, tokens: &Tensor, dweight: &mut Tensor, how: Store) -> Result<()> {
    if !has_kernel(dy) {
        return composite::embedding_backward(dy, tokens, dweight, how);
    }
    let args = Args("embedding_backward");
    let [rows, columns] = args.dims("dy", dy)?;
    let [vocab, _] = args.dims("dweight", dweight)?;
    // SAFETY: the sizes of all tensors and the range of the tokens were checked, `dweight` is borrowed
    // mutably, and all outlive the call.
    let code = unsafe {
        kernels::anyroll_embedding_backward(
            args.floats("dy", dy, &[rows, columns])?,
            args.indices("tokens", tokens, &[rows], vocab)?,
            args.floats("dweight", dweight, &[vocab, columns])?,
            how == Store::Add,
            rows,
            vocab,
            columns,
        )
    };
    kernels::check(args.0, code)
}

/// The sum of the rows of the dense `x` `[N, C]`, the gradient of a bias: `out` `[C]`.
///
/// # Errors
/// [`super::Error::Argument`] for shapes that do not fit, or libtorch's error.
pub fn sum_rows(x: &Tensor, out: &mut Tensor, how: Store) -> Result<()> {
    if !has_kernel(x) {
        return composite::sum_rows(x, out, how);
    }
    let args = Args("sum_rows");
    let [rows, columns] = args.dims("x", x)?;
    // SAFETY: the sizes of both tensors were checked, `out` is borrowed mutably, and both outlive the call.
    let code = unsafe {
        kernels::anyroll_sum_rows(
            args.floats("x", x, &[rows, columns])?,
            args.floats("out", out, &[columns])?,
            how == Store::Add,
            rows,
            columns,
        )
    };
    kernels::check(args.0, code)
}

//! Gradients that are sums over the rows of a batch.

use tch::Tensor;

use super::check::{Args, Engine};
use super::{Result, Store, composite, cpu_kernels};
use crate::kernels;

/// The gradient of an embedding: row `v` of `dweight` `[V, C]` is the sum of the rows of `dy` `[N, C]` whose
/// token is `v`, in the order of the rows. `tokens` is int64 `[N]`.
///
/// # Errors
/// [`super::Error::Argument`] for shapes that do not fit or a token outside of the vocabulary, or libtorch's
/// error.
pub fn embedding_backward(dy: &Tensor, tokens: &Tensor, dweight: &mut Tensor, how: Store) -> Result<()> {
    add_up("embedding_backward", dy, (tokens, None), dweight, how)
}

/// [`embedding_backward`] for `op`, with the tokens in ascending order and their rows, if the caller has them.
pub(super) fn add_up(
    op: &'static str,
    dy: &Tensor,
    (tokens, sorted): (&Tensor, Option<&(Tensor, Tensor)>),
    dweight: &mut Tensor,
    how: Store,
) -> Result<()> {
    let Some(engine) = Engine::of(dy) else { return composite::embedding_backward(dy, tokens, dweight, how) };
    let args = Args::new(op, dy);
    let [rows, columns] = args.dims("dy", dy)?;
    let [vocab, _] = args.dims("dweight", dweight)?;
    let dy = args.values("dy", dy, &[rows, columns])?;
    let to = args.values("dweight", dweight, &[vocab, columns])?;
    let indices = args.indices("tokens", tokens, &[rows], vocab)?;
    let is_added = how == Store::Add;
    // SAFETY: the sizes of all tensors and on a CPU the range of the tokens were checked, `dweight` is borrowed
    // mutably, and all outlive the work.
    unsafe {
        match engine {
            Engine::Cpu => args.ran(cpu_kernels::anyroll_embedding_backward(
                dy.cast(),
                indices,
                to.cast(),
                is_added,
                rows,
                vocab,
                columns,
            )),
            Engine::Device(device) => {
                if how == Store::Write {
                    drop(dweight.f_zero_()?);
                }
                let own = sorted.is_none().then(|| tokens.f_sort_stable(true, 0, false)).transpose()?;
                let (sorted, order) = sorted.or(own.as_ref()).expect("one of them is there");
                args.launched(kernels::model::embedding_backward(
                    &*device,
                    args.kind(),
                    dy,
                    (sorted.data_ptr(), order.data_ptr()),
                    (to, is_added),
                    [rows, vocab, columns],
                ))
            }
        }
    }
}

/// The sum of the rows of the dense `x` `[N, C]`, the gradient of a bias: `out` `[C]`.
///
/// # Errors
/// [`super::Error::Argument`] for shapes that do not fit, or libtorch's error.
pub fn sum_rows(x: &Tensor, out: &mut Tensor, how: Store) -> Result<()> {
    let Some(engine) = Engine::of(x) else { return composite::sum_rows(x, out, how) };
    let args = Args::new("sum_rows", x);
    let [rows, columns] = args.dims("x", x)?;
    let from = args.values("x", x, &[rows, columns])?;
    let to = args.values("out", out, &[columns])?;
    let is_added = how == Store::Add;
    // SAFETY: the sizes of both tensors were checked, `out` is borrowed mutably, and both outlive the work.
    unsafe {
        match engine {
            Engine::Cpu => {
                args.ran(cpu_kernels::anyroll_sum_rows(from.cast(), to.cast(), is_added, rows, columns))
            }
            Engine::Device(device) => {
                let partial = args.empty_floats(&[kernels::rows::row_parts(rows), columns])?;
                let (partial, sizes) = (partial.data_ptr(), [rows, columns]);
                args.launched(kernels::model::sum_rows(
                    &*device,
                    args.kind(),
                    from,
                    partial,
                    (to, is_added),
                    sizes,
                ))
            }
        }
    }
}

//! Frozen linear layers with low-rank adapters and a hand-written backward. The backward of libtorch would
//! read a layer's input and output once per adapter, and again for their sum.

use anyroll_backends::ops::{self, Asked, differentiable};
use tch::{Tensor, no_grad};

use crate::Result;

/// An adapter of one of the layers that are fused into a linear layer.
#[derive(Clone, Copy, Debug)]
pub(super) struct Adapter<'w> {
    /// Index of that layer; all have the same number of outputs.
    pub part: usize,
    /// `[rank, inputs]`.
    pub a: &'w Tensor,
    /// `[outputs of the layer, rank]`.
    pub b: &'w Tensor,
}

/// Returns `x W^T + bias`, with `scale x A^T B^T` added to the part of each adapter. `x` is dense, `[..,
/// inputs]`. Weight and bias get no gradient.
pub(super) fn linear(
    x: &Tensor,
    [weight, bias]: [&Tensor; 2],
    adapters: &[Adapter],
    scale: f64,
) -> Result<Tensor> {
    let layer = no_grad(|| Layer::new(x, weight, adapters, scale))?;
    let out = no_grad(|| layer.forward(bias))?;
    let [.., width] = out.size()[..] else { unreachable!("a matrix") };
    let shape: Vec<i64> = x.size()[..x.dim() - 1].iter().copied().chain([width]).collect();
    // Not a view: libtorch would attach the graph to its base.
    let out = out.f_view(&shape[..])?.f_detach()?;
    let inputs: Vec<&Tensor> =
        [x].into_iter().chain(adapters.iter().flat_map(|adapter| [adapter.a, adapter.b])).collect();
    differentiable(&inputs, &[&out], move |asked| layer.backward(&asked))?;
    Ok(out)
}

/// Tensors that forward and backward read, without a graph.
struct Layer {
    /// `[N, inputs]`.
    x: Tensor,
    weight: Tensor,
    /// All A, stacked: `[ranks, inputs]`.
    down: Tensor,
    ups: Vec<Up>,
    /// `scale x A^T`: `[N, ranks]`.
    inner: Tensor,
    scale: f64,
}

/// A matrix B, and the offsets of its inputs and outputs.
struct Up {
    b: Tensor,
    first_rank: i64,
    first_output: i64,
}

impl Layer {
    fn new(x: &Tensor, weight: &Tensor, adapters: &[Adapter], scale: f64) -> Result<Layer> {
        let x = x.f_detach()?.f_flatten(0, -2)?;
        let mut ups = Vec::with_capacity(adapters.len());
        let mut first_rank = 0;
        for Adapter { part, b, .. } in adapters {
            let &[outputs, rank] = &b.size()[..] else { unreachable!("a matrix") };
            ups.push(Up { b: b.f_detach()?, first_rank, first_output: *part as i64 * outputs });
            first_rank += rank;
        }
        let downs: Vec<&Tensor> = adapters.iter().map(|adapter| adapter.a).collect();
        let down = Tensor::f_cat(&downs, 0)?;
        let inner = x.f_linear(&down, None::<&Tensor>)?.f_mul_scalar_(scale)?;
        Ok(Layer { x, weight: weight.f_detach()?, down, ups, inner, scale })
    }

    fn forward(&self, bias: &Tensor) -> Result<Tensor> {
        let out = self.x.f_linear(&self.weight, Some(bias))?;
        for up in &self.ups {
            drop(up.outputs(&out)?.f_addmm_(&up.ranks(&self.inner)?, &up.b.f_tr()?)?);
        }
        Ok(out)
    }

    /// Returns the gradients of x, and of A and B of each adapter.
    fn backward(&self, Asked { grads, wanted }: &Asked) -> ops::Result<Vec<Option<Tensor>>> {
        let [Some(grad)] = &grads[..] else { return Ok(wanted.iter().map(|_| None).collect()) };
        let dout = grad.f_contiguous()?.f_flatten(0, -2)?;
        let of_ups = self.ups.iter().map(|up| up.outputs(&dout)?.f_mm(&up.b));
        let dinner = Tensor::f_cat(&of_ups.collect::<Result<Vec<_>, _>>()?, 1)?.f_mul_scalar_(self.scale)?;
        let mut found = Vec::with_capacity(wanted.len());
        found.push(if wanted[0] {
            let mut dx = dout.f_mm(&self.weight)?;
            dx = dx.f_addmm_(&dinner, &self.down)?;
            let leading = &grad.size()[..grad.dim() - 1];
            Some(dx.f_view(&[leading, &[self.weight.size()[1]]].concat()[..])?)
        } else {
            None
        });
        for (up, wanted) in self.ups.iter().zip(wanted[1..].chunks(2)) {
            let of_a = || up.ranks(&dinner)?.f_tr()?.f_mm(&self.x);
            let of_b = || up.outputs(&dout)?.f_tr()?.f_mm(&up.ranks(&self.inner)?);
            found.push(wanted[0].then(of_a).transpose()?);
            found.push(wanted[1].then(of_b).transpose()?);
        }
        Ok(found)
    }
}

impl Up {
    /// Returns its columns of the rows between A and B.
    fn ranks(&self, inner: &Tensor) -> Result<Tensor, tch::TchError> {
        inner.f_narrow(1, self.first_rank, self.b.size()[1])
    }

    /// Returns its columns of all outputs.
    fn outputs(&self, out: &Tensor) -> Result<Tensor, tch::TchError> {
        out.f_narrow(1, self.first_output, self.b.size()[0])
    }
}

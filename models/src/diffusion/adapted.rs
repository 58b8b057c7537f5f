//! Frozen linear layers with low-rank adapters beside them, whose backward is written by hand: libtorch would pass over all
//! that a layer reads and makes once for each adapter, and again for their sum.

use anyroll_backends::ops::{self, Asked, differentiable};
use tch::{Tensor, no_grad};

use crate::Result;

/// An adapter of one of the layers that a linear layer is made of.
#[derive(Clone, Copy, Debug)]
pub(super) struct Adapter<'w> {
    /// The number of that layer, each of which makes as many values.
    pub part: usize,
    /// `[rank, inputs]`.
    pub a: &'w Tensor,
    /// `[outputs of the layer, rank]`.
    pub b: &'w Tensor,
}

/// `x W^T + bias`, with `scale x A^T B^T` added to the part of each adapter. `x` is dense, `[.., inputs]`; the weight and the
/// bias get no gradient.
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
    let out = out.f_view(&shape[..])?;
    let inputs: Vec<&Tensor> =
        [x].into_iter().chain(adapters.iter().flat_map(|adapter| [adapter.a, adapter.b])).collect();
    differentiable(&inputs, &[&out], move |asked| layer.backward(&asked))?;
    Ok(out)
}

/// What both ways read, without a graph.
struct Layer {
    /// `[N, inputs]`.
    x: Tensor,
    weight: Tensor,
    /// All A, one below the other: `[ranks, inputs]`.
    down: Tensor,
    ups: Vec<Up>,
    /// `scale x A^T`: `[N, ranks]`.
    inner: Tensor,
    scale: f64,
}

/// A B, and where it reads and writes.
struct Up {
    b: Tensor,
    first_rank: i64,
    first_output: i64,
}

impl Layer {
    fn new(x: &Tensor, weight: &Tensor, adapters: &[Adapter], scale: f64) -> Result<Layer> {
        let x = x.f_detach()?.f_view([-1, weight.size()[1]])?;
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

    /// The gradients of x, and of A and B of each adapter.
    fn backward(&self, Asked { grads, wanted }: &Asked) -> ops::Result<Vec<Option<Tensor>>> {
        let dout = grads[0].f_contiguous()?.f_view([-1, self.weight.size()[0]])?;
        let of_ups = self.ups.iter().map(|up| up.outputs(&dout)?.f_mm(&up.b));
        let dinner = Tensor::f_cat(&of_ups.collect::<Result<Vec<_>, _>>()?, 1)?.f_mul_scalar_(self.scale)?;
        let mut found = Vec::with_capacity(wanted.len());
        found.push(if wanted[0] {
            let mut dx = dout.f_mm(&self.weight)?;
            dx = dx.f_addmm_(&dinner, &self.down)?;
            Some(dx.f_view(&[&grads[0].size()[..grads[0].dim() - 1], &[-1]].concat()[..])?)
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
    /// Its columns of what all ranks have in common.
    fn ranks(&self, inner: &Tensor) -> Result<Tensor, tch::TchError> {
        inner.f_narrow(1, self.first_rank, self.b.size()[1])
    }

    /// Its columns of all outputs.
    fn outputs(&self, out: &Tensor) -> Result<Tensor, tch::TchError> {
        out.f_narrow(1, self.first_output, self.b.size()[0])
    }
}

#[cfg(test)]
mod tests {
    use tch::{Device, Kind};

    use super::*;

    /// Values and gradients of a layer of three, of which two have adapters, beside libtorch's of the plain formula.
    #[test]
    fn a_layer_and_its_gradients_are_those_of_the_plain_formula() {
        let leaf = |size: &[i64], seed: i64| {
            tch::manual_seed(seed);
            Tensor::randn(size, (Kind::Double, Device::Cpu)).set_requires_grad(true)
        };
        let (x, weight, bias) = (leaf(&[2, 5, 6], 1), leaf(&[12, 6], 2).detach(), leaf(&[12], 3).detach());
        let (a0, b0, a2, b2) = (leaf(&[2, 6], 4), leaf(&[4, 2], 5), leaf(&[3, 6], 6), leaf(&[4, 3], 7));
        let scale = 1.5;
        let adapters = [Adapter { part: 0, a: &a0, b: &b0 }, Adapter { part: 2, a: &a2, b: &b2 }];
        let found = linear(&x, [&weight, &bias], &adapters, scale).unwrap();

        let adapted = |a: &Tensor, b: &Tensor| x.matmul(&a.tr()).matmul(&b.tr()) * scale;
        let between = Tensor::zeros([2, 5, 4], (Kind::Double, Device::Cpu));
        let expected = x.linear(&weight, Some(&bias))
            + Tensor::cat(&[adapted(&a0, &b0), between, adapted(&a2, &b2)], -1);
        let differs = |found: &Tensor, expected: &Tensor| (found - expected).abs().max().double_value(&[]);
        assert!(differs(&found, &expected) < 1e-12);

        let grad = leaf(&[2, 5, 12], 8).detach();
        let gradients = |of: &Tensor, leaves: &[&Tensor]| {
            Tensor::run_backward(&[(of * &grad).sum(Kind::Double)], leaves, true, false)
        };
        let leaves = [&x, &a0, &b0, &a2, &b2];
        for (found, expected) in gradients(&found, &leaves).iter().zip(gradients(&expected, &leaves)) {
            assert!(differs(found, &expected) < 1e-12);
        }

        let frozen = leaf(&[1, 6], 9).detach();
        let only_b = [Adapter { part: 1, a: &a0, b: &b0 }];
        let out = linear(&frozen, [&weight, &bias], &only_b, scale).unwrap();
        let [of_b] = &Tensor::run_backward(&[out.sum(Kind::Double)], &[&b0], false, false)[..] else {
            panic!("one gradient")
        };
        assert_eq!(of_b.size(), [4, 2]);
    }
}

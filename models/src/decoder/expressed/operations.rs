//! The operations that layers are expressed with, over values of any kind: libtorch's tensors, which it
//! differentiates, and [`TracedTensor`](crate::memory_trace::TracedTensor)s, which have a size alone.

use anyroll_backends::ops::{self, Asked, ExpertOrder, Groups, Store};
use tch::{Kind, Tensor};

use crate::Result;
use crate::model::Weights;

/// Elements of a head that rotate together.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Pairs {
    /// Each one and the one behind it.
    Adjacent,
    /// Each one of the first half and its counterpart of the second.
    Halves,
}

/// The choice of a token's experts by their scores.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(super) struct Choice {
    /// Number of experts per token J.
    pub per_token: i64,
    /// Number of groups of experts.
    pub groups: i64,
    /// Number of groups that offer experts to a token.
    pub groups_per_token: i64,
    /// True if a token's weights are divided by their sum.
    pub is_normalized: bool,
    /// Factor of the weights.
    pub scale: f64,
}

/// A value in a layer. Rows N are tokens, R = N J those of a mixture's experts.
pub(super) trait Value: Sized {
    /// The experts that each token goes to.
    type Routes;

    /// Returns `x W^T + bias`.
    fn linear(&self, weight: &Self, bias: Option<&Self>) -> Result<Self>;
    /// Returns the sum of two values of one size.
    fn plus(&self, other: &Self) -> Result<Self>;
    /// Returns the product of two values of one size.
    fn times(&self, other: &Self) -> Result<Self>;
    /// Multiplies by a number.
    fn scaled(&self, by: f64) -> Result<Self>;
    /// Applies SiLU.
    fn silu(&self) -> Result<Self>;
    /// Applies the logistic function.
    fn sigmoid(&self) -> Result<Self>;
    /// Returns `x / rms(x) weight` over the last dimension.
    fn rms_norm(&self, weight: &Self, eps: f64) -> Result<Self>;
    /// Rotates heads `[N, H, R]` by the cosines and sines of their positions, fp32 `[N, R]`.
    fn rotated(&self, turns: &Self, pairs: Pairs) -> Result<Self>;
    /// Converts to fp32, if it is narrower.
    fn wide(&self) -> Result<Self>;
    /// Returns the values in another shape, in which -1 is computed.
    fn shaped(&self, size: &[i64]) -> Result<Self>;
    /// Returns part of the last dimension.
    fn columns(&self, start: i64, count: i64) -> Result<Self>;
    /// Concatenates along the last dimension.
    fn beside(&self, other: &Self) -> Result<Self>;
    /// Appends zeros to the last dimension, up to `width`.
    fn padded(&self, width: i64) -> Result<Self>;
    /// Repeats the single head of `[N, 1, R]`.
    fn repeated(&self, heads: i64) -> Result<Self>;

    /// Chooses experts by scores `[N, E]`, to which `bias` `[E]` is added for the choice alone. Returns the weights
    /// `[N, J]` of a token's experts. The choice has no gradient.
    fn routed(&self, bias: &Self, choice: Choice) -> Result<(Self, Self::Routes)>;
    /// Returns the rows of tokens `[N, C]` sorted by expert: `[R, C]`.
    fn spread(&self, routes: &Self::Routes) -> Result<Self>;
    /// Returns the product of sorted rows with their expert's matrix of the stacked `weight`.
    fn grouped_linear(&self, weight: &Self, routes: &Self::Routes) -> Result<Self>;
    /// Returns the sum of each token's sorted rows `[R, C]`, weighted by `weights` `[N, J]`: `[N, C]`.
    fn collected(&self, weights: &Self, routes: &Self::Routes) -> Result<Self>;
}

/// Weights of a layer: its unit, and then the adapters' if there are any.
pub(super) trait WeightsOf<V> {
    /// Returns a parameter of a unit.
    fn of(&self, unit: usize, param: usize) -> &V;
}

impl WeightsOf<Tensor> for Weights<'_> {
    fn of(&self, unit: usize, param: usize) -> &Tensor {
        self.get(unit, param)
    }
}

/// Order of the rows of experts, of which each token has J.
pub(super) struct Routes {
    order: ExpertOrder,
    per_token: i64,
}

impl Routes {
    /// Sorts the chosen experts `[N, J]` of `experts`.
    fn of(chosen: &Tensor, experts: i64) -> Result<Routes> {
        Ok(Routes { order: ExpertOrder::new(chosen, experts)?, per_token: chosen.size()[1] })
    }

    fn groups(&self) -> Result<Groups> {
        Ok(Groups::new(self.order.ends.shallow_clone())?)
    }
}

impl Value for Tensor {
    type Routes = Routes;

    fn linear(&self, weight: &Tensor, bias: Option<&Tensor>) -> Result<Tensor> {
        Ok(self.f_linear(weight, bias)?)
    }

    fn plus(&self, other: &Tensor) -> Result<Tensor> {
        Ok(self.f_add(other)?)
    }

    fn times(&self, other: &Tensor) -> Result<Tensor> {
        Ok(self.f_mul(other)?)
    }

    fn scaled(&self, by: f64) -> Result<Tensor> {
        Ok(self.f_mul_scalar(by)?)
    }

    fn silu(&self) -> Result<Tensor> {
        Ok(self.f_silu()?)
    }

    fn sigmoid(&self) -> Result<Tensor> {
        Ok(self.f_sigmoid()?)
    }

    fn rms_norm(&self, weight: &Tensor, eps: f64) -> Result<Tensor> {
        Ok(self.f_rms_norm(weight.size(), Some(weight), eps)?)
    }

    fn rotated(&self, turns: &Tensor, pairs: Pairs) -> Result<Tensor> {
        let half = turns.size()[1] / 2;
        let [cos, sin] = [0, half].map(|start| turns.f_narrow(1, start, half)?.f_unsqueeze(1));
        let (cos, sin, wide) = (cos?, sin?, self.wide()?);
        let (a, b) = match pairs {
            Pairs::Adjacent => {
                let pairs = wide.f_unflatten(2, [half, 2])?;
                (pairs.f_select(3, 0)?, pairs.f_select(3, 1)?)
            }
            Pairs::Halves => (wide.f_narrow(2, 0, half)?, wide.f_narrow(2, half, half)?),
        };
        let turned = [a.f_mul(&cos)?.f_sub(&b.f_mul(&sin)?)?, b.f_mul(&cos)?.f_add(&a.f_mul(&sin)?)?];
        let turned = match pairs {
            Pairs::Adjacent => Tensor::f_stack(&turned, 3)?.f_flatten(2, 3)?,
            Pairs::Halves => Tensor::f_cat(&turned, 2)?,
        };
        Ok(turned.f_to_kind(self.kind())?)
    }

    fn wide(&self) -> Result<Tensor> {
        super::super::wide(self)
    }

    fn shaped(&self, size: &[i64]) -> Result<Tensor> {
        Ok(self.f_reshape(size)?)
    }

    fn columns(&self, start: i64, count: i64) -> Result<Tensor> {
        Ok(self.f_narrow(-1, start, count)?)
    }

    fn beside(&self, other: &Tensor) -> Result<Tensor> {
        Ok(Tensor::f_cat(&[self, other], -1)?)
    }

    fn padded(&self, width: i64) -> Result<Tensor> {
        Ok(self.f_constant_pad_nd([0, width - self.size()[2]])?)
    }

    fn repeated(&self, heads: i64) -> Result<Tensor> {
        Ok(self.f_expand([-1, heads, -1], false)?)
    }

    fn routed(&self, bias: &Tensor, choice: Choice) -> Result<(Tensor, Routes)> {
        let experts = self.size()[1];
        let chosen = {
            let mut scores = self.f_detach()?.f_add(&bias.f_detach()?)?;
            if choice.groups_per_token < choice.groups {
                let of_groups = scores.f_view([-1, choice.groups, experts / choice.groups])?;
                // A group's score is the sum of its two best.
                let best = of_groups.f_topk(2, 2, true, true)?.0;
                let best = best.f_sum_dim_intlist([2i64].as_slice(), false, best.kind())?;
                let offering =
                    best.f_sort_stable(true, 1, true)?.1.f_narrow(1, 0, choice.groups_per_token)?;
                let is_out = best.f_ones_like()?.f_scatter_value(1, &offering, 0.0)?.f_to_kind(Kind::Bool)?;
                scores = of_groups.f_masked_fill(&is_out.f_unsqueeze(2)?, 0.0)?.f_view([-1, experts])?;
            }
            scores.f_sort_stable(true, 1, true)?.1.f_narrow(1, 0, choice.per_token)?.f_contiguous()?
        };
        let mut weights = self.f_gather(1, &chosen, false)?;
        if choice.is_normalized {
            let sum = weights.f_sum_dim_intlist([1i64].as_slice(), true, weights.kind())?;
            weights = weights.f_div(&sum.f_add_scalar(LEAST_SUM)?)?;
        }
        Ok((weights.f_mul_scalar(choice.scale)?, Routes::of(&chosen, experts)?))
    }

    fn spread(&self, routes: &Routes) -> Result<Tensor> {
        // A token's rows lie together first, so that no two gradients are added to one row at once.
        let rows = self.f_unsqueeze(1)?.f_expand([-1, routes.per_token, -1], false)?.f_flatten(0, 1)?;
        Ok(rows.f_index_select(0, &routes.order.order)?)
    }

    fn grouped_linear(&self, weight: &Tensor, routes: &Routes) -> Result<Tensor> {
        let (x, matrices, groups) = (self.f_detach()?, weight.f_detach()?, routes.groups()?);
        let y = ops::grouped_linear(&x, &matrices, &groups)?;
        ops::differentiable(&[self, weight], &[&y], move |Asked { grads, wanted }| {
            let Some(Some(dy)) = grads.into_iter().next() else { return Ok(vec![None, None]) };
            let dy = dy.f_contiguous()?;
            let dx = wanted[0].then(|| ops::grouped_input_backward(&dy, &matrices, &groups)).transpose()?;
            let dmatrices = wanted[1].then(|| {
                let mut found = matrices.f_empty_like()?;
                ops::grouped_weight_backward(&dy, &x, &groups, &mut found, Store::Write)?;
                Ok::<_, ops::Error>(found)
            });
            Ok(vec![dx, dmatrices.transpose()?])
        })?;
        Ok(y)
    }

    fn collected(&self, weights: &Tensor, routes: &Routes) -> Result<Tensor> {
        let rows = self.f_index_select(0, &routes.order.places)?.f_unflatten(0, [-1, routes.per_token])?;
        let sum = rows.f_mul(&weights.f_unsqueeze(2)?)?.f_sum_dim_intlist(
            [1i64].as_slice(),
            false,
            weights.kind(),
        )?;
        Ok(sum.f_to_kind(self.kind())?)
    }
}

/// Added to the sum of a token's weights.
const LEAST_SUM: f64 = 1e-20;

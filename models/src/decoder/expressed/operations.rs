//! The operations that layers are expressed with and that libtorch has not. It differentiates all of them.
//!
//! Rows N are tokens, R = N J those of a mixture's experts.

use anyroll_backends::ops::{self, Asked, ExpertOrder, Groups, Store};
use tch::{Kind, Tensor};

use super::super::wide;
use crate::Result;

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

/// Returns heads `[N, H, R]`, rotated by the cosines and sines of their positions, fp32 `[N, R]`.
pub(super) fn rotated(heads: &Tensor, turns: &Tensor, pairs: Pairs) -> Result<Tensor> {
    let half = turns.size()[1] / 2;
    let [cos, sin] = [0, half].map(|start| turns.f_narrow(1, start, half)?.f_unsqueeze(1));
    let (cos, sin, wide) = (cos?, sin?, wide(heads)?);
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
    Ok(turned.f_to_kind(heads.kind())?)
}

/// Returns part of the last dimension.
pub(super) fn columns(x: &Tensor, start: i64, count: i64) -> Result<Tensor> {
    Ok(x.f_narrow(-1, start, count)?)
}

/// Concatenates along the last dimension.
pub(super) fn beside(one: &Tensor, other: &Tensor) -> Result<Tensor> {
    Ok(Tensor::f_cat(&[one, other], -1)?)
}

/// Experts that each token goes to, and the order of their rows, of which each token has J.
pub(super) struct Routes {
    order: ExpertOrder,
    per_token: i64,
}

impl Routes {
    /// Chooses experts by scores `[N, E]`, to which `bias` `[E]` is added for the choice alone. Returns the weights
    /// `[N, J]` of a token's experts. The choice has no gradient.
    pub fn choose(scores: &Tensor, bias: &Tensor, choice: Choice) -> Result<(Tensor, Routes)> {
        let experts = scores.size()[1];
        let chosen = {
            let mut scores = scores.f_detach()?.f_add(&bias.f_detach()?)?;
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
        let mut weights = scores.f_gather(1, &chosen, false)?;
        if choice.is_normalized {
            let sum = weights.f_sum_dim_intlist([1i64].as_slice(), true, weights.kind())?;
            weights = weights.f_div(&sum.f_add_scalar(LEAST_SUM)?)?;
        }
        let routes = Routes { order: ExpertOrder::new(&chosen, experts)?, per_token: choice.per_token };
        Ok((weights.f_mul_scalar(choice.scale)?, routes))
    }

    /// Returns the rows of tokens `[N, C]` sorted by expert: `[R, C]`.
    pub fn spread(&self, tokens: &Tensor) -> Result<Tensor> {
        // A token's rows lie together first, so that no two gradients are added to one row at once.
        let rows = tokens.f_unsqueeze(1)?.f_expand([-1, self.per_token, -1], false)?.f_flatten(0, 1)?;
        Ok(rows.f_index_select(0, &self.order.order)?)
    }

    /// Returns the product of sorted rows with their expert's matrix of the stacked `weight`.
    pub fn linear(&self, rows: &Tensor, weight: &Tensor) -> Result<Tensor> {
        let (x, matrices) = (rows.f_detach()?, weight.f_detach()?);
        let groups = Groups::new(self.order.ends.shallow_clone())?;
        let y = ops::grouped_linear(&x, &matrices, &groups)?;
        ops::differentiable(&[rows, weight], &[&y], move |Asked { grads, wanted }| {
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

    /// Returns the sum of each token's sorted rows `[R, C]`, weighted by `weights` `[N, J]`: `[N, C]`.
    pub fn collect(&self, rows: &Tensor, weights: &Tensor) -> Result<Tensor> {
        let of_tokens = rows.f_index_select(0, &self.order.places)?.f_unflatten(0, [-1, self.per_token])?;
        let weighted = of_tokens.f_mul(&weights.f_unsqueeze(2)?)?;
        let sum = weighted.f_sum_dim_intlist([1i64].as_slice(), false, weights.kind())?;
        Ok(sum.f_to_kind(rows.kind())?)
    }
}

/// Added to the sum of a token's weights.
const LEAST_SUM: f64 = 1e-20;

//! Adapters of a mixture's experts: each expert has its own A and B for its gate, up and down matrices.
//!
//! Adapters of a layer are stacked like the matrices, A `[E rank, in]` and B `[E out, rank]`, so that grouped products read
//! them directly. Rows are sorted by expert ([`super::super::expert_rows`]), R of them. Files have a pair for each expert.

use anyroll_backends::ops::{self, Groups};
use tch::Tensor;

use super::{Adapter, Lora, Projection};
use crate::Result;
use crate::decoder::math::Math;
use crate::model::{Grads, Unit, Weights};

impl Lora {
    /// Returns true if a projection's adapters are of experts.
    pub fn is_of_experts(&self, projection: Projection) -> bool {
        let of_mlp = matches!(projection, Projection::GateUp | Projection::Down);
        of_mlp && self.experts_unit.is_some() && self.is_at(projection)
    }

    /// Adds the adapters' products of the sorted rows `x` `[R, in]` to those of the experts' matrices, `y` `[R, out]`.
    pub fn forward_sorted_(
        &self,
        projection: Projection,
        weights: &Weights,
        x: &Tensor,
        (groups, math): (&Groups, Math),
        y: &Tensor,
    ) -> Result<()> {
        for adapter in self.at(projection) {
            let z = self.inner_sorted(adapter, weights, x, (groups, math))?;
            let product = math.grouped_linear(&z, self.stacked(weights, adapter.b), groups)?;
            drop(adapter.columns_of(y)?.f_add_(&product)?);
        }
        Ok(())
    }

    /// Adds the adapters' part of the gradient of `x` of [`Self::forward_sorted_`] to `dx`, from that of its `y`, `dy`. Returns
    /// the gradients between A and B.
    pub fn input_backward_sorted_(
        &self,
        projection: Projection,
        weights: &Weights,
        dy: &Tensor,
        groups: &Groups,
        dx: &mut Tensor,
    ) -> Result<Vec<Tensor>> {
        let inner = self.at(projection).iter().map(|adapter| {
            let b = self.stacked(weights, adapter.b);
            let dz = ops::grouped_input_backward(&adapter.columns_of(dy)?, b, groups)?
                .f_mul_scalar_(adapter.shape.scale)?;
            drop(dx.f_add_(&ops::grouped_input_backward(&dz, self.stacked(weights, adapter.a), groups)?)?);
            Ok(dz)
        });
        inner.collect()
    }

    /// Writes the adapters' gradients. `inner` is what [`Self::input_backward_sorted_`] returned.
    pub fn weight_backward_sorted(
        &self,
        projection: Projection,
        weights: &Weights,
        grads: &mut Grads,
        (dy, x, groups): (&Tensor, &Tensor, &Groups),
        inner: &[Tensor],
    ) -> Result<()> {
        let unit = self.unit();
        for (adapter, dz) in self.at(projection).iter().zip(inner) {
            let z = self.inner_sorted(adapter, weights, x, (groups, Math::Fast))?;
            let dy = adapter.columns_of(dy)?;
            grads.put(unit, adapter.b, |buffer, how| {
                ops::grouped_weight_backward(&dy, &z, groups, buffer, how)
            })?;
            grads.put(unit, adapter.a, |buffer, how| {
                ops::grouped_weight_backward(dz, x, groups, buffer, how)
            })?;
        }
        Ok(())
    }

    /// Returns the sum of the ranks of a projection's adapters.
    pub fn rank_sum(&self, projection: Projection) -> usize {
        self.at(projection).iter().map(|adapter| adapter.shape.rank as usize).sum()
    }

    /// Returns the rows of the parameter `param` of the adapters' unit if it is of experts.
    pub fn of_experts(&self, param: usize, unit: &Unit) -> Option<i64> {
        (param >= self.first_of_experts()?).then(|| unit.params[param].shape[0])
    }

    /// Returns the index in the adapters' unit of the first one of experts, behind which there are no others; `None` without
    /// them.
    pub fn first_of_experts(&self) -> Option<usize> {
        self.experts_unit?;
        let of_experts = [Projection::GateUp, Projection::Down].into_iter().flat_map(|it| self.at(it));
        of_experts.map(|adapter| adapter.a).min()
    }

    /// Makes the adapters of experts, which begin at the index `first`, those of the block's unit `unit`.
    pub fn move_experts(&mut self, first: usize, unit: usize) {
        self.experts_unit = Some(unit);
        for projection in [Projection::GateUp, Projection::Down] {
            for adapter in self.adapters.get_mut(projection as usize).into_iter().flatten() {
                (adapter.a, adapter.b) = (adapter.a - first, adapter.b - first);
            }
        }
    }

    /// Returns `x A^T` of the sorted rows, scaled: `[R, rank]`.
    fn inner_sorted(
        &self,
        adapter: &Adapter,
        weights: &Weights,
        x: &Tensor,
        (groups, math): (&Groups, Math),
    ) -> Result<Tensor> {
        let mut z = math.grouped_linear(x, self.stacked(weights, adapter.a), groups)?;
        Ok(z.f_mul_scalar_(adapter.shape.scale)?)
    }

    fn stacked<'a>(&self, weights: &Weights<'a>, param: usize) -> &'a Tensor {
        weights.get(self.unit(), param)
    }

    fn unit(&self) -> usize {
        self.experts_unit.expect("only adapters of experts are stacked")
    }
}

impl Adapter {
    fn columns_of(&self, y: &Tensor) -> Result<Tensor> {
        Ok(y.f_narrow(1, self.start, self.columns)?)
    }
}

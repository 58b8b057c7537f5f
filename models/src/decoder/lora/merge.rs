//! Merging of adapters into their matrices: W + s B A, and with magnitudes g * (W + s B A).
//!
//! The merged model needs one product per matrix. Sums are fp32 and rounded once, to the weights' dtype. A
//! product smaller than half a rounding step at W is lost.

use tch::{Kind, Tensor};

use super::{Adapter, Lora, Projection, UNIT};
use crate::{Result, model::Weights};

/// Maximum number of values summed in fp32 at a time.
const CHUNK: i64 = 1 << 24;

impl Lora {
    /// Returns the parameters of the layer's own unit that [`Self::merge_`] changes.
    pub fn matrices(&self) -> impl Iterator<Item = usize> {
        self.adapters.iter().filter_map(|at_projection| Some(at_projection.first()?.matrix))
    }

    /// Merges the adapters of a layer into its matrices. `weights` are the layer's own unit and the adapters'
    /// unit.
    pub fn merge_(&self, weights: &Weights) -> Result<()> {
        let merge_at = |projection: &Vec<Adapter>| -> Result<()> {
            projection.iter().try_for_each(|adapter| adapter.merge_(weights))
        };
        if self.experts_unit.is_none() {
            return self.adapters.iter().try_for_each(merge_at);
        }
        let (of_attention, of_experts) = self.adapters.split_at(Projection::GateUp as usize);
        of_attention.iter().try_for_each(merge_at)?;
        of_experts.iter().flatten().try_for_each(|adapter| adapter.merge_experts_(weights))
    }
}

impl Adapter {
    fn merge_(&self, weights: &Weights) -> Result<()> {
        let rows = self.rows(weights)?;
        // The factors of training, computed from W before the merge.
        let factors = self.factors(weights)?;
        self.merge_into_(&rows, [weights.get(UNIT, self.a), weights.get(UNIT, self.b)], factors.as_ref())
    }

    /// Merges the adapters of a layer's experts into their stacked matrices.
    fn merge_experts_(&self, weights: &Weights) -> Result<()> {
        let [a, b] = [self.a, self.b].map(|param| weights.get(UNIT, param));
        let experts = b.size()[0] / self.columns;
        let matrices = weights.get(0, self.matrix).f_view([experts, -1, a.size()[1]])?;
        for expert in 0..experts {
            let rows = matrices.f_get(expert)?.f_narrow(0, self.start, self.columns)?;
            let own = |of: &Tensor| -> Result<Tensor> {
                let rows = of.size()[0] / experts;
                Ok(of.f_narrow(0, expert * rows, rows)?)
            };
            self.merge_into_(&rows, [&own(a)?, &own(b)?], None)?;
        }
        Ok(())
    }

    /// Merges A and B into the `rows` of a matrix, and multiplies these by `factors`, if there are any.
    fn merge_into_(&self, rows: &Tensor, [a, b]: [&Tensor; 2], factors: Option<&Tensor>) -> Result<()> {
        let a = a.f_to_kind(Kind::Float)?;
        let b = b.f_to_kind(Kind::Float)?.f_mul_scalar(self.shape.scale)?;
        let at_once = (CHUNK / rows.size()[1]).max(1);
        for start in (0..self.columns).step_by(at_once as usize) {
            let part = |of: &Tensor| of.f_narrow(0, start, at_once.min(self.columns - start));
            let mut merged = part(rows)?;
            let mut sum = merged.f_to_kind(Kind::Float)?;
            drop(sum.f_addmm_(&part(&b)?, &a)?);
            if let Some(factors) = factors {
                drop(sum.f_mul_(&part(factors)?.f_unsqueeze(1)?)?);
            }
            merged.f_copy_(&sum)?;
        }
        Ok(())
    }
}

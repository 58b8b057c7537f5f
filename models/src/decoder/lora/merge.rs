//! Adapters in the matrices that they stand beside: W + s B A, and with magnitudes g * (W + s B A).
//!
//! What comes of it computes with one product a matrix. Sums are fp32 and rounded once, to the weights' dtype: of a product
//! that is smaller than half a step of that at W nothing is left.

use tch::{Kind, Tensor};

use super::{Adapter, Lora, UNIT};
use crate::{Result, model::Weights};

/// The most values that are summed in fp32 at a time.
const CHUNK: i64 = 1 << 24;

impl Lora {
    /// The parameters of the layer's own unit that [`Self::merge_`] changes.
    pub fn matrices(&self) -> impl Iterator<Item = usize> {
        self.adapters.iter().filter_map(|at_site| Some(at_site.first()?.matrix))
    }

    /// Puts the adapters of a layer into its matrices, `weights` of its own unit and of theirs.
    pub fn merge_(&self, weights: &Weights) -> Result<()> {
        self.adapters.iter().flatten().try_for_each(|adapter| adapter.merge_(weights))
    }
}

impl Adapter {
    fn merge_(&self, weights: &Weights) -> Result<()> {
        let rows = self.rows(weights)?;
        // Those of training, from what W is before.
        let factors = self.factors(weights)?;
        let a = weights.get(UNIT, self.a).f_to_kind(Kind::Float)?;
        let b = weights.get(UNIT, self.b).f_to_kind(Kind::Float)?.f_mul_scalar(self.shape.scale)?;
        let at_once = (CHUNK / rows.size()[1]).max(1);
        for start in (0..self.columns).step_by(at_once as usize) {
            let part = |of: &Tensor| of.f_narrow(0, start, at_once.min(self.columns - start));
            let mut merged = part(&rows)?;
            let mut sum = merged.f_to_kind(Kind::Float)?;
            drop(sum.f_addmm_(&part(&b)?, &a)?);
            if let Some(factors) = &factors {
                drop(sum.f_mul_(&part(factors)?.f_unsqueeze(1)?)?);
            }
            merged.f_copy_(&sum)?;
        }
        Ok(())
    }
}

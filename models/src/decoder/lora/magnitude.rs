//! What weight-decomposed adapters multiply rows by: their magnitudes m over the norms n of W + s B A.
//!
//! As in PEFT the norms are constants to the gradient (section 4.3 of Liu et al.), and of the weights' dtype: the
//! magnitudes of a new adapter are rounded to that as well, and are then the same numbers.

use anyroll_backends::ops;
use tch::{Kind, Tensor};

use super::{Adapter, Lora, Site, UNIT};
use crate::Result;
use crate::model::{Grads, Weights};

/// The norm of a row of zeros, which stays one.
pub(crate) const LEAST_NORM: f64 = 1e-30;

/// Between a site's output and the sums of products that its magnitudes multiply.
pub(super) struct Scaled {
    /// The gradient of those sums: that of the output, its columns times their factors.
    pub dsum: Tensor,
    /// Of each adapter: fp32 `[columns]`.
    pub norms: Vec<Tensor>,
}

impl Lora {
    /// `weights` are those of a layer. Returns for each magnitude among the adapters' parameters what it multiplies by.
    pub fn all_factors(&self, weights: &Weights) -> Result<Vec<(usize, Tensor)>> {
        let of = |adapter: &Adapter| {
            let factors = adapter.factors(weights)?;
            Ok(adapter.magnitude.zip(factors))
        };
        self.adapters.iter().flatten().filter_map(|adapter| of(adapter).transpose()).collect()
    }

    /// From the gradient `dy` of a site's output `[N, out]`, if it has magnitudes.
    pub(super) fn scaled(&self, site: Site, weights: &Weights, dy: &Tensor) -> Result<Option<Scaled>> {
        if !self.scales(site) {
            return Ok(None);
        }
        let (mut dsum, mut norms) = (dy.f_empty_like()?, Vec::new());
        dsum.f_copy_(dy)?;
        for adapter in self.at(site) {
            let of_adapter = adapter.norms(weights)?;
            if let Some(magnitudes) = adapter.magnitudes(weights) {
                let mut columns = dsum.f_narrow(1, adapter.start, adapter.columns)?;
                drop(columns.f_mul_(&magnitudes.f_div(&of_adapter)?)?);
            }
            norms.push(of_adapter);
        }
        Ok(Some(Scaled { dsum, norms }))
    }
}

impl Adapter {
    /// Its part of the (fused) matrix: `[columns, in]`.
    pub(super) fn rows(&self, weights: &Weights) -> Result<Tensor> {
        Ok(weights.get(0, self.matrix).f_narrow(0, self.start, self.columns)?)
    }

    fn magnitudes<'a>(&self, weights: &Weights<'a>) -> Option<&'a Tensor> {
        self.magnitude.map(|param| weights.get(UNIT, param))
    }

    /// What it multiplies its columns by, if it has magnitudes: fp32 `[columns]`.
    pub(super) fn factors(&self, weights: &Weights) -> Result<Option<Tensor>> {
        let Some(magnitudes) = self.magnitudes(weights) else { return Ok(None) };
        if weights.are_prepared() {
            return Ok(Some(magnitudes.shallow_clone()));
        }
        Ok(Some(magnitudes.f_div(&self.norms(weights)?)?))
    }

    /// The norms of the rows of W + s B A, fp32 `[columns]` with values of the weights' dtype. Takes the memory of W once.
    fn norms(&self, weights: &Weights) -> Result<Tensor> {
        let (a, b) = (weights.get(UNIT, self.a), weights.get(UNIT, self.b));
        let sum = self.rows(weights)?.f_addmm(&b.f_mul_scalar(self.shape.scale)?, a)?;
        let norms = sum.f_norm_scalaropt_dim_dtype(2, [1i64].as_slice(), false, Kind::Float)?;
        Ok(norms.f_to_kind(sum.kind())?.f_to_kind(Kind::Float)?.f_clamp_min(LEAST_NORM)?)
    }

    /// Writes the gradient of the magnitudes: of each column the sum of `dy` times what the magnitude scales, which comes
    /// from what the adapter sees `[N, in]` and from its first, scaled, product `z` `[N, rank]`.
    pub(super) fn magnitude_backward(
        &self,
        weights: &Weights,
        grads: &mut Grads,
        (dy, seen, z): (&Tensor, &Tensor, &Tensor),
        norms: &Tensor,
    ) -> Result<()> {
        let Some(magnitude) = self.magnitude else { return Ok(()) };
        let mut sum = seen.f_mm(&self.rows(weights)?.f_tr()?)?;
        sum = sum.f_addmm_(z, &weights.get(UNIT, self.b).f_tr()?)?.f_div_(norms)?;
        sum = sum.f_mul_(&dy.f_narrow(1, self.start, self.columns)?)?;
        grads.put(UNIT, magnitude, |buffer, how| ops::sum_rows(&sum, buffer, how))
    }
}

#[cfg(test)]
mod tests {
    use tch::Device;

    use super::super::{Adapter, AdapterShape};
    use super::*;

    fn adapter(scale: f64) -> Adapter {
        let shape = AdapterShape { rank: 2, scale, dora: true };
        Adapter { matrix: 0, a: 0, b: 1, magnitude: Some(2), start: 3, columns: 40, shape, salt: 0 }
    }

    #[test]
    fn factors_of_norms_are_one() {
        for kind in [Kind::Float, Kind::BFloat16, Kind::Half] {
            let random = |size: [i64; 2]| Tensor::randn(size, (Kind::Float, Device::Cpu)).to_kind(kind);
            let (matrix, a, b) = (random([50, 64]), random([2, 64]), random([40, 2]));
            let _ = matrix.narrow(0, 5, 1).zero_();
            // Of values that a host would sum.
            let sum = matrix.narrow(0, 3, 40).to_kind(Kind::Double);
            let norms = (&sum * &sum).sum_dim_intlist(1, false, Kind::Double).sqrt().to_kind(kind);
            let lora = [a.shallow_clone(), b.zeros_like(), norms];
            let found =
                adapter(1.5).factors(&Weights::new(&[&[matrix.shallow_clone()], &lora])).unwrap().unwrap();
            let expected = Tensor::ones([40], (Kind::Float, Device::Cpu));
            let _ = expected.narrow(0, 2, 1).zero_(); // a row of zeros
            let error = (found - expected).abs().max().double_value(&[]);
            assert!(error <= if kind == Kind::Float { 1e-6 } else { 0.0 }, "{kind:?}: {error}");
        }
    }
}

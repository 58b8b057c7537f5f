//! Row factors of weight-decomposed adapters (DoRA): the magnitudes m divided by the norms n of W + s B A.
//!
//! Like in PEFT, norms are constants to the gradient (section 4.3 of Liu et al.) and have the weights' dtype.
//! A new adapter's magnitudes are rounded to that dtype, too, so they equal the norms.

use anyroll_backends::ops;
use tch::{Kind, Tensor};

use super::{Adapter, Lora, Projection, UNIT};
use crate::Result;
use crate::model::{Grads, Weights};

/// Norm of a row of zeros, which stays a row of zeros.
pub(crate) const LEAST_NORM: f64 = 1e-30;

/// Intermediate values between a projection's output and the sums of products that its magnitudes multiply.
pub(super) struct Scaled {
    /// Gradient of those sums: the output's gradient, its columns times their factors.
    pub dsum: Tensor,
    /// Norms of each adapter: fp32 `[columns]`.
    pub norms: Vec<Tensor>,
}

impl Lora {
    /// Returns each magnitude's parameter index and factors. `weights` belong to one layer.
    pub fn all_factors(&self, weights: &Weights) -> Result<Vec<(usize, Tensor)>> {
        let of = |adapter: &Adapter| {
            let factors = adapter.factors(weights)?;
            Ok(adapter.magnitude.zip(factors))
        };
        self.adapters.iter().flatten().filter_map(|adapter| of(adapter).transpose()).collect()
    }

    /// If the projection has magnitudes, scales the gradient `dy` of its output `[N, out]`.
    pub(super) fn scaled(
        &self,
        projection: Projection,
        weights: &Weights,
        dy: &Tensor,
    ) -> Result<Option<Scaled>> {
        if !self.scales(projection) {
            return Ok(None);
        }
        let (mut dsum, mut norms) = (dy.f_empty_like()?, Vec::new());
        dsum.f_copy_(dy)?;
        for adapter in self.at(projection) {
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
    /// Returns the adapter's part of the (fused) matrix: `[columns, in]`.
    pub(super) fn rows(&self, weights: &Weights) -> Result<Tensor> {
        Ok(weights.get(0, self.matrix).f_narrow(0, self.start, self.columns)?)
    }

    fn magnitudes<'a>(&self, weights: &Weights<'a>) -> Option<&'a Tensor> {
        self.magnitude.map(|param| weights.get(UNIT, param))
    }

    /// Returns the factors of the adapter's columns, fp32 `[columns]`, if it has magnitudes.
    pub(super) fn factors(&self, weights: &Weights) -> Result<Option<Tensor>> {
        let Some(magnitudes) = self.magnitudes(weights) else { return Ok(None) };
        if weights.are_prepared() {
            return Ok(Some(magnitudes.shallow_clone()));
        }
        Ok(Some(magnitudes.f_div(&self.norms(weights)?)?))
    }

    /// Returns the norms of the rows of W + s B A, fp32 `[columns]` with values rounded to the weights'
    /// dtype. Allocates a copy of W.
    fn norms(&self, weights: &Weights) -> Result<Tensor> {
        let (a, b) = (weights.get(UNIT, self.a), weights.get(UNIT, self.b));
        let sum = self.rows(weights)?.f_addmm(&b.f_mul_scalar(self.shape.scale)?, a)?;
        let norms = sum.f_norm_scalaropt_dim_dtype(2, [1i64].as_slice(), false, Kind::Float)?;
        Ok(norms.f_to_kind(sum.kind())?.f_to_kind(Kind::Float)?.f_clamp_min(LEAST_NORM)?)
    }

    /// Writes the gradient of the magnitudes: for each column, the sum of `dy` times the value that the
    /// magnitude scales. That value is computed from the adapter's input `[N, in]` and its scaled first
    /// product `z` `[N, rank]`.
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
    use anyroll_close::largest_difference;
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
            // Norms of values summed like on a host.
            let sum = matrix.narrow(0, 3, 40).to_kind(Kind::Double);
            let norms = (&sum * &sum).sum_dim_intlist(1, false, Kind::Double).sqrt().to_kind(kind);
            let lora = [a.shallow_clone(), b.zeros_like(), norms];
            let found =
                adapter(1.5).factors(&Weights::new(&[&[matrix.shallow_clone()], &lora])).unwrap().unwrap();
            let expected = Tensor::ones([40], (Kind::Float, Device::Cpu));
            let _ = expected.narrow(0, 2, 1).zero_(); // a row of zeros
            let error = largest_difference(&found, &expected);
            assert!(error <= if kind == Kind::Float { 1e-6 } else { 0.0 }, "{kind:?}: {error}");
        }
    }
}

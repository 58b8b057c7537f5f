//! Classifier-free guidance: moves a velocity away from the unconditional one.

use tch::{Kind, Tensor};

use super::DenoiseBatch;
use crate::Result;

/// Classifier-free guidance (Ho and Salimans 2022): `v = v_none + scale (v_class - v_none)`. At a scale of 1
/// the model is evaluated once, with the class.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Guidance {
    /// Guidance scale.
    pub scale: f64,
    /// Label of the unconditional class, or index of the negative prompt.
    pub no_class: i64,
    /// True if the model runs with its adapters, if it has any.
    pub adapters: bool,
}

impl Guidance {
    /// Returns the model's batch for the points `x` `[B, ...]` at `sigma` with `labels` `[B]`. If guidance is
    /// on, the unconditional points follow.
    ///
    /// # Errors
    /// libtorch's.
    pub fn batch(&self, x: &Tensor, sigma: f64, labels: &Tensor, latents_grad: bool) -> Result<DenoiseBatch> {
        let sigmas = Tensor::f_full([x.size()[0]], sigma, (Kind::Float, x.device()))?;
        if !self.asks_twice() {
            let [latents, labels] = [x, labels].map(Tensor::shallow_clone);
            return Ok(DenoiseBatch { latents, sigmas, labels, adapters: self.adapters, latents_grad });
        }
        Ok(DenoiseBatch {
            latents: Tensor::f_cat(&[x, x], 0)?,
            sigmas: Tensor::f_cat(&[&sigmas, &sigmas], 0)?,
            labels: Tensor::f_cat(&[labels, &labels.f_full_like(self.no_class)?], 0)?,
            adapters: self.adapters,
            latents_grad,
        })
    }

    /// Returns the guided velocities `[B, ...]` from the model's output for [`Self::batch`].
    ///
    /// # Errors
    /// libtorch's.
    pub fn combine(&self, velocity: &Tensor) -> Result<Tensor> {
        if !self.asks_twice() {
            return Ok(velocity.shallow_clone());
        }
        let [class, none] = halves(velocity)?;
        Ok(none.f_lerp(&class, self.scale)?)
    }

    /// Returns the gradient of the model's output from that of the guided velocities.
    ///
    /// # Errors
    /// libtorch's.
    pub fn combine_grad(&self, grad: &Tensor) -> Result<Tensor> {
        if !self.asks_twice() {
            return Ok(grad.shallow_clone());
        }
        Ok(Tensor::f_cat(&[grad.f_mul_scalar(self.scale)?, grad.f_mul_scalar(1.0 - self.scale)?], 0)?)
    }

    /// Returns the gradient of the points from that of the latents of [`Self::batch`].
    ///
    /// # Errors
    /// libtorch's.
    pub fn batch_grad(&self, grad: &Tensor) -> Result<Tensor> {
        if !self.asks_twice() {
            return Ok(grad.shallow_clone());
        }
        let [class, none] = halves(grad)?;
        Ok(class.f_add(&none)?)
    }

    fn asks_twice(&self) -> bool {
        self.scale != 1.0
    }
}

fn halves(both: &Tensor) -> Result<[Tensor; 2]> {
    let half = both.size()[0] / 2;
    Ok([both.f_narrow(0, 0, half)?, both.f_narrow(0, half, half)?])
}

#[cfg(test)]
mod tests {
    use anyroll_close::largest_difference;
    use tch::Device;

    use super::*;

    /// Uses a model that returns `k x + label`, whose output and gradient are known.
    #[test]
    fn guidance_and_its_gradient_are_those_of_the_formula() {
        for (scale, asked) in [(1.0, 2), (4.5, 4), (0.0, 4)] {
            let guidance = Guidance { scale, no_class: 7, adapters: true };
            let x = Tensor::from_slice(&[0.5, -1.0]).view([2, 1]);
            let labels = Tensor::from_slice(&[0i64, 3]);
            let batch = guidance.batch(&x, 0.25, &labels, true).unwrap();
            assert_eq!(batch.len(), asked);
            let answer = &batch.latents * 2.0 + batch.labels.view([-1, 1]).to_kind(Kind::Double);
            let guided = guidance.combine(&answer).unwrap();
            let expected = [(1.0, 0.0), (-2.0, 3.0)].map(|(kx, class)| kx + 7.0 + scale * (class - 7.0));
            let error = largest_difference(&guided.view([-1]), &Tensor::from_slice(&expected));
            assert!(error < 1e-12, "{scale}: {error}");
            let grad = guidance.combine_grad(&Tensor::ones([2, 1], (Kind::Double, Device::Cpu))).unwrap();
            let grad = guidance.batch_grad(&(grad * 2.0)).unwrap();
            assert!((grad - 2.0).abs().max().double_value(&[]) < 1e-12, "{scale}");
        }
    }
}

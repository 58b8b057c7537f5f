//! Sampling: integrates velocities from noise to data.

use tch::Tensor;

use super::{DenoiseBatch, Denoiser, Guidance, SdeNoise, SdeStep};
use crate::{Error, Result, passes};

/// Returns the sigmas of `steps` steps, from 1 to 0: evenly spaced, then shifted towards 1 by `sigma' = shift
/// sigma / (1 + (shift - 1) sigma)` (Esser et al. 2024). A `shift` of 1 leaves them evenly spaced.
///
/// # Errors
/// [`Error::Input`] without steps, or for a shift that is not a positive number.
pub fn sigmas(steps: usize, shift: f64) -> Result<Vec<f64>> {
    if steps == 0 {
        return Err(Error::Input { what: "steps", problem: "is 0, must be at least 1".into() });
    }
    if !(shift > 0.0 && shift.is_finite()) {
        return Err(Error::Input { what: "shift", problem: format!("{shift} is not a positive number") });
    }
    let even = (0..=steps).map(|step| 1.0 - step as f64 / steps as f64);
    Ok(even.map(|sigma| shift * sigma / (1.0 + (shift - 1.0) * sigma)).collect())
}

/// Returns the sigmas of diffusers' `FlowMatchEulerDiscreteScheduler`, followed by 0: evenly spaced from 1 to
/// the shifted sigma of the first of a thousand timesteps. Then all are shifted, so the last one is shifted
/// twice.
///
/// # Errors
/// The errors of [`sigmas`], and for a single step, which has no spacing.
pub fn sigmas_of_diffusers(steps: usize, shift: f64) -> Result<Vec<f64>> {
    if steps < 2 {
        return Err(Error::Input { what: "steps", problem: format!("is {steps}, must be at least 2") });
    }
    sigmas(steps, shift)?;
    let shifted = |sigma: f64| shift * sigma / (1.0 + (shift - 1.0) * sigma);
    let least = shifted(1e-3);
    let even = (0..steps).map(|step| 1.0 + (least - 1.0) * step as f64 / (steps - 1) as f64);
    Ok(even.map(shifted).chain([0.0]).collect())
}

/// Returns the velocities of a batch, without a gradient. `weights` are all of the model's, one list per
/// unit.
///
/// # Errors
/// The model's.
pub fn velocity<M: Denoiser>(model: &M, weights: &[&[Tensor]], batch: &DenoiseBatch) -> Result<Tensor> {
    Ok(passes::forward(model, weights, batch, false)?.0)
}

/// Schedule of sampling from noise to data.
#[derive(Clone, Debug, PartialEq)]
pub struct Sampler {
    /// All sigmas, from 1 to 0.
    pub sigmas: Vec<f64>,
    /// Guidance at each sigma but the last.
    pub guidance: Vec<Guidance>,
}

/// Trajectory of a batch from noise to data.
#[derive(Debug)]
pub struct Walk {
    /// Points at each sigma, from noise to samples: `[B, channels, height, width]`.
    pub points: Vec<Tensor>,
    /// Log-probability of each stochastic step: fp32 `[B]`.
    pub logprobs: Vec<Tensor>,
}

impl Sampler {
    /// Returns the number of steps.
    pub fn steps(&self) -> usize {
        self.sigmas.len() - 1
    }

    /// Returns the stochastic step `step`, from 0.
    pub fn sde_step(&self, noise: SdeNoise, step: usize) -> SdeStep {
        SdeStep::new(noise, &self.sigmas, step)
    }

    /// Returns the point after step `step` of Euler's method, from `x` with the velocity `v`.
    ///
    /// # Errors
    /// libtorch's.
    pub fn euler(&self, step: usize, x: &Tensor, v: &Tensor) -> Result<Tensor> {
        Ok(x.f_add(&v.f_mul_scalar(self.sigmas[step + 1] - self.sigmas[step])?)?)
    }

    /// Samples with Euler's method, or with stochastic steps if `sde` holds a noise level and a standard
    /// normal draw for each step. `weights` are all of the model's, one list per unit.
    ///
    /// # Errors
    /// The model's.
    pub fn walk<M: Denoiser>(
        &self,
        model: &M,
        weights: &[&[Tensor]],
        noise: Tensor,
        labels: &Tensor,
        sde: Option<(SdeNoise, &[Tensor])>,
    ) -> Result<Walk> {
        let mut walk = Walk { points: vec![noise], logprobs: Vec::new() };
        for step in 0..self.steps() {
            let x = &walk.points[step];
            let guidance = self.guidance[step];
            let batch = guidance.batch(x, self.sigmas[step], labels, false)?;
            let v = guidance.combine(&velocity(model, weights, &batch)?)?;
            let next = match sde {
                None => self.euler(step, x, &v)?,
                Some((noise, draws)) => {
                    let sde = self.sde_step(noise, step);
                    let mean = sde.mean(x, &v)?;
                    let next = mean.f_add(&draws[step].f_mul_scalar(sde.std)?)?;
                    walk.logprobs.push(sde.logprobs(&mean, &next)?);
                    next
                }
            };
            walk.points.push(next);
        }
        Ok(walk)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sigmas_are_those_of_the_formula() {
        let check = |steps, shift, expected: &[f64]| {
            let found = sigmas(steps, shift).unwrap();
            assert!(found.iter().zip(expected).all(|(a, b)| (a - b).abs() < 1e-12), "{found:?}");
            assert_eq!(found.len(), expected.len());
        };
        check(4, 1.0, &[1.0, 0.75, 0.5, 0.25, 0.0]);
        check(2, 3.0, &[1.0, 0.75, 0.0]);
        // The schedule of ROLL: eight steps, shifted by 5.
        check(8, 5.0, &[1.0, 35.0 / 36.0, 15.0 / 16.0, 25.0 / 28.0, 5.0 / 6.0, 0.75, 0.625, 5.0 / 12.0, 0.0]);
        let golden = concat!(env!("CARGO_MANIFEST_DIR"), "/../tests/golden/sd3/configs.json");
        let golden: serde_json::Value =
            serde_json::from_str(&std::fs::read_to_string(golden).unwrap()).unwrap();
        for schedule in golden["schedules"].as_array().unwrap() {
            let expected: Vec<f64> = serde_json::from_value(schedule["sigmas"].clone()).unwrap();
            let steps = schedule["steps"].as_u64().unwrap() as usize;
            let found = sigmas_of_diffusers(steps, schedule["shift"].as_f64().unwrap()).unwrap();
            assert!(found.iter().zip(&expected).all(|(a, b)| (a - b).abs() < 1e-6), "{found:?}");
            assert_eq!(found.len(), expected.len());
        }
        assert!(sigmas_of_diffusers(1, 1.0).is_err());
        assert!(sigmas(0, 1.0).is_err());
        assert!(sigmas(4, f64::NAN).is_err());
    }
}

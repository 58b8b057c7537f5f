//! A step between two sigmas that adds Gaussian noise, so that its result has a log-probability.
//!
//! The mean is linear in the point and in its velocity, and the standard deviation is a number: `x_next ~
//! N(x_coef x + v_coef v, std^2)`. For a deviation `s` per square root of time, with `dt = sigma_next - sigma
//! < 0`,
//!
//! ```text
//! mean = x (1 + s^2 dt / (2 sigma)) + v (1 + s^2 (1 - sigma) / (2 sigma)) dt,    std = s sqrt(-dt)
//! ```
//!
//! which has the marginals of sampling without noise (Flow-GRPO, Liu et al. 2025, equation 9).

use tch::Tensor;

use crate::Result;

/// Noise level of a step.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum SdeNoise {
    /// `s = level sqrt(sigma / (1 - sigma))`, with the second sigma in the denominator at sigma 1:
    /// Flow-GRPO's.
    Level(f64),
    /// `s = eta` at every sigma: DanceGRPO's (Xue et al. 2025).
    Constant(f64),
}

/// One stochastic step.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct SdeStep {
    /// Coefficient of the point in the mean.
    pub x_coef: f64,
    /// Coefficient of the velocity in the mean.
    pub v_coef: f64,
    /// Standard deviation.
    pub std: f64,
    /// Length of the step, `sigma - sigma_next`.
    pub length: f64,
}

impl SdeStep {
    /// Returns the step from `sigmas[step]` to the next.
    pub fn new(noise: SdeNoise, sigmas: &[f64], step: usize) -> SdeStep {
        let sigma = sigmas[step];
        let dt = sigmas[step + 1] - sigma;
        let per_root_time = match noise {
            SdeNoise::Constant(eta) => eta,
            SdeNoise::Level(level) => {
                let below = if sigma == 1.0 { sigmas[1] } else { sigma };
                level * (sigma / (1.0 - below)).sqrt()
            }
        };
        let square = per_root_time * per_root_time;
        SdeStep {
            x_coef: 1.0 + square / (2.0 * sigma) * dt,
            v_coef: (1.0 + square * (1.0 - sigma) / (2.0 * sigma)) * dt,
            std: per_root_time * (-dt).sqrt(),
            length: -dt,
        }
    }

    /// Returns the mean of the next point after `x` with velocity `v`.
    ///
    /// # Errors
    /// libtorch's.
    pub fn mean(&self, x: &Tensor, v: &Tensor) -> Result<Tensor> {
        Ok(x.f_mul_scalar(self.x_coef)?.f_add(&v.f_mul_scalar(self.v_coef)?)?)
    }

    /// Returns the log-probability of `next` `[B, ...]`, averaged over its elements: `[B]`.
    ///
    /// # Errors
    /// libtorch's.
    pub fn logprobs(&self, mean: &Tensor, next: &Tensor) -> Result<Tensor> {
        let log_norm = self.std.ln() + 0.5 * std::f64::consts::TAU.ln();
        let square = next.f_sub(mean)?.f_square()?.f_flatten(1, -1)?;
        let mean_square = square.f_mean_dim(-1, false, None)?;
        Ok(mean_square.f_mul_scalar(-0.5 / (self.std * self.std))?.f_sub_scalar(log_norm)?)
    }
}

#[cfg(test)]
mod tests {
    use anyroll_close::assert_close;
    use serde_json::Value;
    use tch::Device;

    use super::*;

    fn golden(name: &str) -> Value {
        let path = concat!(env!("CARGO_MANIFEST_DIR"), "/../tests/golden/flow_sde.json");
        let all: Value = serde_json::from_str(&std::fs::read_to_string(path).unwrap()).unwrap();
        all[name].clone()
    }

    fn tensor(value: &Value) -> Tensor {
        let rows: Vec<Vec<f64>> = serde_json::from_value(value.clone()).unwrap();
        Tensor::from_slice2(&rows).to_device(Device::Cpu)
    }

    #[test]
    fn steps_are_those_of_the_reference() {
        let flow = golden("flow_grpo");
        let (x, v, eps) = (tensor(&flow["x"]), tensor(&flow["v"]), tensor(&flow["eps"]));
        let sigmas: Vec<f64> = serde_json::from_value(flow["sigmas"].clone()).unwrap();
        let steps = flow["steps"].as_array().unwrap();
        assert_eq!(steps.len(), 3);
        for expected in steps {
            let noise = SdeNoise::Level(flow["noise_level"].as_f64().unwrap());
            let step = SdeStep::new(noise, &sigmas, expected["j"].as_u64().unwrap() as usize);
            assert!((step.std - expected["std"].as_f64().unwrap()).abs() < 1e-12, "{step:?}");
            let mean = step.mean(&x, &v).unwrap();
            assert_close("mean", &mean, &tensor(&expected["mean"]), 1e-6);
            let next = &mean + &eps * step.std;
            assert_close("next", &next, &tensor(&expected["prev"]), 1e-6);
            let logprobs: Vec<f64> = serde_json::from_value(expected["logp"].clone()).unwrap();
            assert_close(
                "log-probs",
                &step.logprobs(&mean, &next).unwrap(),
                &Tensor::from_slice(&logprobs),
                1e-6,
            );
        }
        for expected in golden("dance_grpo_eta0.3").as_array().unwrap() {
            let step =
                SdeStep::new(SdeNoise::Constant(0.3), &sigmas, expected["j"].as_u64().unwrap() as usize);
            assert!((step.std - expected["std"].as_f64().unwrap()).abs() < 1e-12, "{step:?}");
            assert_close("mean", &step.mean(&x, &v).unwrap(), &tensor(&expected["mean"]), 1e-6);
        }
    }
}

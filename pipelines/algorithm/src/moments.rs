//! Mean and standard deviation of values, joined over parts.

use serde::{Deserialize, Serialize};

/// Count, mean and squares of values, which suffice to normalize the values on any rank.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct Moments {
    /// The number of values.
    pub count: f64,
    /// The mean of the values.
    pub mean: f64,
    /// The sum of the squared differences from the mean.
    pub squares: f64,
}

impl Moments {
    /// Computes the moments of `values`.
    pub fn of(values: &[f64]) -> Self {
        let count = values.len() as f64;
        let mean = values.iter().sum::<f64>() / count.max(1.0);
        let squares = values.iter().map(|value| (value - mean).powi(2)).sum();
        Self { count, mean, squares }
    }

    /// Joins the moments of two disjoint sets of values (Chan et al., 1979).
    pub fn joined(&self, other: &Self) -> Self {
        let count = self.count + other.count;
        let apart = other.mean - self.mean;
        let share = other.count / count.max(1.0);
        let squares = self.squares + other.squares + apart * apart * self.count * share;
        Self { count, mean: self.mean + apart * share, squares }
    }

    /// The unbiased standard deviation; 0 for a single value.
    pub fn std(&self) -> f64 {
        (self.squares / (self.count - 1.0).max(1.0)).sqrt()
    }

    /// Shifts and scales values to the mean 0 and the unbiased variance 1, as in verl and ROLL. A single value
    /// becomes 0.
    pub fn whiten(&self, values: &mut [f64]) {
        const EPS: f64 = 1e-8;
        let scale = 1.0 / (self.std().powi(2) + EPS).sqrt();
        values.iter_mut().for_each(|value| *value = (*value - self.mean) * scale);
    }
}

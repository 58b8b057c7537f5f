//! Statistics of a step's micro-batches, kept on the device until read.

use tch::{Kind, Tensor};

use crate::{
    Result,
    metrics::Metrics,
    train::{Exchange, reduced},
};

/// Sums and maxima, by name.
#[derive(Debug, Default)]
pub struct Stats {
    sums: Vec<(&'static str, Tensor)>,
    largest: Vec<(&'static str, Tensor)>,
}

reduced! {
    /// [`Stats`] on the host, in the order of the names.
    struct Seen {
        /// Sums.
        nested sums: Vec<f64>,
        /// Largest values.
        nested largest: Vec<Largest>,
    }
}

reduced! {
    /// The largest value of a name.
    struct Largest {
        /// Largest value over all ranks.
        max value: f64,
    }
}

impl Stats {
    /// Adds the sum of `values`.
    pub fn add(&mut self, name: &'static str, values: &Tensor) -> Result<()> {
        let sum = values.f_sum(Kind::Double)?;
        match self.sums.iter_mut().find(|(known, _)| *known == name) {
            Some((_, total)) => *total = total.f_add(&sum)?,
            None => self.sums.push((name, sum)),
        }
        Ok(())
    }

    /// Updates the maximum with `values`.
    pub fn largest(&mut self, name: &'static str, values: &Tensor) -> Result<()> {
        let found = values.f_max()?.f_to_kind(Kind::Double)?;
        match self.largest.iter_mut().find(|(known, _)| *known == name) {
            Some((_, largest)) => *largest = largest.f_maximum(&found)?,
            None => self.largest.push((name, found)),
        }
        Ok(())
    }

    /// Totals over all ranks: sums divided by `count`, and maxima. Every rank must have the same names.
    pub fn read(&self, exchange: &Exchange, count: f64) -> Result<Metrics> {
        let read = |values: &[(&str, Tensor)]| -> Result<Vec<f64>> {
            Ok(values.iter().map(|(_, value)| value.f_double_value(&[])).collect::<Result<_, _>>()?)
        };
        let largest = read(&self.largest)?.into_iter().map(|value| Largest { value });
        let own = Seen { sums: read(&self.sums)?, largest: largest.collect() };
        let all = exchange.reduce(&own)?;
        let mut metrics = Metrics::new();
        for ((name, _), sum) in self.sums.iter().zip(all.sums) {
            metrics.insert(*name, sum / count);
        }
        for ((name, _), largest) in self.largest.iter().zip(all.largest) {
            metrics.insert(*name, largest.value);
        }
        Ok(metrics)
    }
}

//! Statistics of a step's micro-batches, kept on the device until read.

use tch::{Kind, Tensor};

use crate::{Result, metrics::Metrics, train::Exchange};

/// Sums and maxima, by name.
#[derive(Debug, Default)]
pub struct Stats {
    sums: Vec<(&'static str, Tensor)>,
    largest: Vec<(&'static str, Tensor)>,
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
        let mut own = Vec::with_capacity(self.sums.len() + self.largest.len());
        for (_, value) in self.sums.iter().chain(&self.largest) {
            own.push(value.f_double_value(&[])?);
        }
        let gathered = exchange.gather(&own)?;
        let mut metrics = Metrics::new();
        for (index, (name, _)) in self.sums.iter().enumerate() {
            metrics.insert(*name, gathered.iter().map(|rank| rank[index]).sum::<f64>() / count);
        }
        for (index, (name, _)) in (self.sums.len()..).zip(&self.largest) {
            let of_ranks = gathered.iter().map(|rank| rank[index]);
            metrics.insert(*name, of_ranks.fold(f64::NEG_INFINITY, f64::max));
        }
        Ok(metrics)
    }
}

//! The part of a run's metrics that rules read.

use std::collections::VecDeque;

use crate::metrics::{Metrics, Record};

/// Number of steps kept from the start of a run.
const FIRST: usize = 10;

/// Number of steps kept before the current one, itself included.
const LAST: usize = 20;

/// Metrics of the first and of the last training steps of a run.
#[derive(Clone, Debug, Default)]
pub struct Recent {
    first: Vec<Record>,
    last: VecDeque<Record>,
}

impl Recent {
    /// Adds the metrics of a step. Step 0 is no training step, and is left out.
    pub fn push(&mut self, step: u64, metrics: &Metrics) {
        if step == 0 {
            return;
        }
        let record = Record { step, metrics: metrics.clone() };
        if self.first.len() < FIRST {
            self.first.push(record.clone());
        }
        if self.last.len() == LAST {
            self.last.pop_front();
        }
        self.last.push_back(record);
    }

    /// The current step; `None` before the first one.
    pub(super) fn step(&self) -> Option<u64> {
        self.last.back().map(|record| record.step)
    }

    /// Values of a metric in the last `count` steps; `None` if a step has none, or one that is not finite.
    pub(super) fn last(&self, metric: &str, count: usize) -> Option<Vec<f64>> {
        let skipped = self.last.len().checked_sub(count)?;
        values(self.last.iter().skip(skipped), metric)
    }

    /// Mean of a metric over the last `count` steps.
    pub(super) fn mean(&self, metric: &str, count: usize) -> Option<f64> {
        self.last(metric, count).map(|values| mean(&values))
    }

    /// Mean of a metric over the first steps, once there are enough and the last ones are others.
    pub(super) fn mean_at_start(&self, metric: &str) -> Option<f64> {
        let is_later = self.last.len() == LAST && self.first.len() == FIRST;
        is_later.then(|| values(self.first.iter(), metric))?.map(|values| mean(&values))
    }

    /// Names of the current step's metrics.
    pub(super) fn names(&self) -> impl Iterator<Item = &str> {
        self.last.back().into_iter().flat_map(|record| record.metrics.iter().map(|(name, _)| name))
    }
}

fn values<'a>(records: impl Iterator<Item = &'a Record>, metric: &str) -> Option<Vec<f64>> {
    records.map(|record| record.metrics.get(metric).filter(|value| value.is_finite())).collect()
}

/// The mean of values.
pub(super) fn mean(values: &[f64]) -> f64 {
    values.iter().sum::<f64>() / values.len() as f64
}

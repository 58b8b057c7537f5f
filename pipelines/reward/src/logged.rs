//! Metrics and columns of a user's reward function.

use std::collections::BTreeMap;

use serde_json::Value;

/// Metrics and columns that a reward function logged for one completion.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Logged {
    /// Names and finite values of metrics, in the order of the calls.
    pub metrics: Vec<(String, f64)>,
    /// The completion's value in each column: a text, a number, a flag or null.
    pub columns: BTreeMap<String, Value>,
}

impl Logged {
    /// Returns the mean of each metric.
    pub fn means(&self) -> BTreeMap<&str, f64> {
        let mut values: BTreeMap<&str, Vec<f64>> = BTreeMap::new();
        self.metrics.iter().for_each(|(name, value)| values.entry(name).or_default().push(*value));
        let mean = |values: Vec<f64>| values.iter().sum::<f64>() / values.len() as f64;
        values.into_iter().map(|(name, values)| (name, mean(values))).collect()
    }
}

//! Statistics of the reward's terms.

use std::collections::BTreeMap;

use anyroll_reward::{Logged, Outcome, Score};
use serde::{Deserialize, Serialize};

use crate::{
    metrics::Metrics,
    train::{Reduce, reduced},
};

reduced! {
    /// Sums over samples for a term of the reward.
    pub struct TermSums {
        /// Sum of scores.
        sum score: f64,
        /// Number of samples with a score.
        sum scored: f64,
        /// Number of samples on which the term failed.
        sum failed: f64,
        /// Number of samples with a timeout.
        sum timed_out: f64,
        /// Metrics that its function logged.
        nested logged: MetricSums,
    }
}

/// Sum and number of the values of each metric that a reward function logged.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct MetricSums(BTreeMap<String, (f64, f64)>);

impl MetricSums {
    fn add(&mut self, logged: &Logged) {
        logged.metrics.iter().for_each(|(name, value)| self.add_sum(name.clone(), (*value, 1.0)));
    }

    fn add_sum(&mut self, name: String, (sum, count): (f64, f64)) {
        let own = self.0.entry(name).or_default();
        *own = (own.0 + sum, own.1 + count);
    }

    /// Means, as `PREFIX/METRIC`.
    fn insert_means(&self, prefix: &str, metrics: &mut Metrics) {
        for (name, (sum, count)) in &self.0 {
            metrics.insert(format!("{prefix}/{name}"), sum / count);
        }
    }
}

impl Reduce for MetricSums {
    fn reduce(&mut self, next: Self) {
        next.0.into_iter().for_each(|(name, sum)| self.add_sum(name, sum));
    }
}

impl TermSums {
    /// Collects the statistics of `terms` terms over `outcomes`.
    pub fn of<'a>(terms: usize, outcomes: impl Iterator<Item = &'a Outcome>) -> Vec<Self> {
        let mut sums = vec![Self::default(); terms];
        for outcome in outcomes {
            match outcome {
                Outcome::Scored(Score { parts, logged, .. }) => {
                    for ((sums, score), logged) in sums.iter_mut().zip(parts).zip(logged) {
                        sums.score += score.unwrap_or(0.0);
                        sums.scored += if score.is_some() { 1.0 } else { 0.0 };
                        sums.logged.add(logged);
                    }
                }
                Outcome::Failed { term, error } => {
                    sums[*term].failed += 1.0;
                    sums[*term].timed_out += if error.failure.is_timeout() { 1.0 } else { 0.0 };
                }
            }
        }
        sums
    }

    /// Metrics: the mean score, errors, timeouts and logged metrics of each term, and errors and error rate of all.
    pub fn metrics<'a>(terms: &[Self], names: impl Iterator<Item = &'a str>) -> Metrics {
        let mut metrics = Metrics::new();
        for (sums, name) in terms.iter().zip(names) {
            if sums.scored > 0.0 {
                metrics.insert(format!("reward/{name}/mean"), sums.score / sums.scored);
            }
            if sums.failed > 0.0 {
                metrics.insert(format!("reward/{name}/errors"), sums.failed);
                metrics.insert(format!("reward/{name}/timeouts"), sums.timed_out);
            }
            sums.logged.insert_means(&format!("logged/{name}"), &mut metrics);
        }
        let failed: f64 = terms.iter().map(|sums| sums.failed).sum();
        // A failed sample has scores of earlier terms, which are not counted.
        let samples = failed + terms.iter().map(|sums| sums.scored).fold(0.0, f64::max);
        metrics.insert("reward/errors", failed);
        metrics.insert("reward/error_rate", if samples > 0.0 { failed / samples } else { 0.0 });
        metrics
    }

    /// Logged metrics of an evaluation.
    pub fn logged_in_evaluation<'a>(terms: &[Self], names: impl Iterator<Item = &'a str>) -> Metrics {
        let mut metrics = Metrics::new();
        for (sums, name) in terms.iter().zip(names) {
            sums.logged.insert_means(&format!("eval/logged/{name}"), &mut metrics);
        }
        metrics
    }
}

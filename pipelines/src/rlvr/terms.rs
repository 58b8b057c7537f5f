//! Statistics of the reward's terms.

use anyroll_reward::{Outcome, Score};

use crate::{metrics::Metrics, train::reduced};

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
    }
}

impl TermSums {
    /// Collects the statistics of `terms` terms over `outcomes`.
    pub fn of<'a>(terms: usize, outcomes: impl Iterator<Item = &'a Outcome>) -> Vec<Self> {
        let mut sums = vec![Self::default(); terms];
        for outcome in outcomes {
            match outcome {
                Outcome::Scored(Score { parts, .. }) => {
                    for (sums, score) in sums.iter_mut().zip(parts) {
                        sums.score += score.unwrap_or(0.0);
                        sums.scored += if score.is_some() { 1.0 } else { 0.0 };
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

    /// Metrics: the mean score, errors and timeouts of each term, and errors and error rate of all.
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
        }
        let failed: f64 = terms.iter().map(|sums| sums.failed).sum();
        // A failed sample has scores of earlier terms, which are not counted.
        let samples = failed + terms.iter().map(|sums| sums.scored).fold(0.0, f64::max);
        metrics.insert("reward/errors", failed);
        metrics.insert("reward/error_rate", if samples > 0.0 { failed / samples } else { 0.0 });
        metrics
    }
}

//! Staleness of a step's groups, and of the groups that stay in flight.

use super::{Group, GroupQueue};
use crate::{inference::Sample, metrics::Metrics, train::reduced};

reduced! {
    /// Statistics of a step's groups, and of those that the step leaves in flight.
    pub struct Staleness {
        /// Number of trained tokens.
        sum tokens: u64,
        /// Staleness in steps, summed over tokens.
        sum steps: u64,
        /// Maximum staleness in steps.
        max oldest: f64,
        /// Number of trained completions.
        sum samples: u64,
        /// Number of completions that weights of several steps sampled.
        sum continued: u64,
        /// Number of groups that the step had to take, since they would be too old in the next step.
        sum due: u64,
        /// Number of unfinished completions in flight.
        sum open: u64,
        /// Number of their tokens so far.
        sum open_tokens: u64,
        /// Number of whole groups in flight.
        sum whole: u64,
    }
}

impl Staleness {
    /// Statistics of the groups that step `step` has `taken`, and of those `left` in flight. No token may be older
    /// than `bound` steps.
    pub fn of(taken: &[Group], left: &GroupQueue, step: u64, bound: u64) -> Self {
        let samples: Vec<&Sample> = taken.iter().flat_map(|group| &group.samples).collect();
        let spans = || samples.iter().flat_map(|sample| &sample.policies);
        let open = || {
            let all = left.groups.iter().flat_map(|group| &group.samples);
            all.filter(|sample| sample.ending.is_none() && sample.completion_len() > 0)
        };
        Self {
            tokens: spans().map(|span| span.tokens as u64).sum(),
            steps: spans().map(|span| (step - span.version) * span.tokens as u64).sum(),
            oldest: spans().map(|span| step - span.version).max().unwrap_or(0) as f64,
            samples: samples.len() as u64,
            continued: samples.iter().filter(|sample| sample.policies.len() > 1).count() as u64,
            due: taken.iter().filter(|group| group.age(step) >= bound).count() as u64,
            open: open().count() as u64,
            open_tokens: open().map(|sample| sample.completion_len() as u64).sum(),
            whole: left.groups.iter().filter(|group| group.is_whole()).count() as u64,
        }
    }

    /// Metrics of these statistics over all ranks, for a step of `groups` groups.
    pub fn metrics(&self, groups: usize) -> Metrics {
        let share = |part: u64, of: u64| part as f64 / of as f64;
        let mut metrics = Metrics::new();
        for (name, value) in [
            ("staleness/mean", share(self.steps, self.tokens)),
            ("staleness/max", self.oldest),
            ("staleness/continued", share(self.continued, self.samples)),
            ("staleness/waited_for", self.due as f64 / groups as f64),
            ("carried/sequences", self.open as f64),
            ("carried/tokens", self.open_tokens as f64),
            ("carried/whole_groups", self.whole as f64),
        ] {
            metrics.insert(name, value);
        }
        metrics
    }
}

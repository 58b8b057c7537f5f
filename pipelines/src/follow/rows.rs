//! The newest completions of a run.

use std::collections::{BTreeMap, VecDeque};

use serde::Serialize;

use crate::format::shortened;
use crate::sample_text::{SHOWN_CHARS, columns, facts};
use crate::samples::{Phase, Sample};

/// Most completions that are kept.
const ROWS: usize = 200;

/// The newest completions, oldest first.
#[derive(Debug, Default)]
pub(super) struct Rows {
    rows: VecDeque<SampleRow>,
    /// Number of all completions so far.
    count: u64,
}

/// A completion in the table.
#[derive(Debug, Clone, Serialize)]
pub struct SampleRow {
    step: u64,
    phase: Phase,
    prompt: String,
    completion: String,
    answer: String,
    reward: f64,
    facts: String,
    /// Columns that reward functions logged.
    columns: BTreeMap<String, String>,
}

impl Rows {
    pub(super) fn add(&mut self, sample: &Sample) {
        let short = |text| shortened(text, SHOWN_CHARS);
        if self.rows.len() == ROWS {
            self.rows.pop_front();
        }
        self.rows.push_back(SampleRow {
            step: sample.step,
            phase: sample.phase,
            prompt: short(&sample.prompt),
            completion: short(&sample.completion),
            answer: short(&sample.answer),
            reward: sample.reward,
            facts: facts(sample),
            columns: columns(sample).collect(),
        });
        self.count += 1;
    }

    /// Number of all completions so far.
    pub(super) fn count(&self) -> u64 {
        self.count
    }

    /// The kept ones of those after the first `count`.
    pub(super) fn since(&self, count: u64) -> impl Iterator<Item = &SampleRow> {
        let dropped = self.count - self.rows.len() as u64;
        self.rows.iter().skip(usize::try_from(count.saturating_sub(dropped)).unwrap_or(usize::MAX))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::sample_text::tests::sample;

    #[test]
    fn the_newest_are_kept_and_read_from_any_number() {
        let mut rows = Rows::default();
        let total = ROWS as u64 + 50;
        (0..total).for_each(|step| rows.add(&sample(step, 0, "c", 1.0)));
        let steps = |count| rows.since(count).map(|row| row.step).collect::<Vec<_>>();
        assert_eq!(steps(0), (50..total).collect::<Vec<_>>());
        assert_eq!(steps(total - 2), [total - 2, total - 1]);
        assert_eq!(steps(total), [0u64; 0]);
    }
}

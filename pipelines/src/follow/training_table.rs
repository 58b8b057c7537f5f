//! Completions of training steps: the best and the worst of each written group.

use std::collections::BTreeMap;

use serde::Serialize;

use crate::format::shortened;
use crate::sample_text::{SHOWN_CHARS, best_and_worst, facts_and_columns, groups};
use crate::samples::Sample;

/// Number of steps shown, the newest ones.
pub(super) const STEPS: usize = 3;

/// The best and the worst completion of groups, of the newest step first.
#[derive(Debug, Serialize)]
pub struct TrainingTable {
    rows: Vec<Row>,
}

#[derive(Debug, Serialize)]
struct Row {
    step: u64,
    prompt: String,
    answer: String,
    cells: [Cell; 2],
}

#[derive(Debug, Serialize)]
struct Cell {
    completion: String,
    facts: String,
}

impl TrainingTable {
    /// The table of samples of training by step; `None` without any.
    pub(super) fn new(samples: &BTreeMap<u64, Vec<Sample>>) -> Option<TrainingTable> {
        let of_step =
            |samples: &Vec<Sample>| groups(samples).filter_map(|group| row(&group)).collect::<Vec<_>>();
        let rows: Vec<Row> = samples.values().rev().flat_map(of_step).collect();
        (!rows.is_empty()).then_some(TrainingTable { rows })
    }
}

fn row(group: &[&Sample]) -> Option<Row> {
    let cell = |sample: &Sample| Cell {
        completion: shortened(&sample.completion, SHOWN_CHARS),
        facts: facts_and_columns(sample),
    };
    let of_both = best_and_worst(group)?;
    let [prompt, answer] = [&of_both[0].prompt, &of_both[0].answer].map(|text| shortened(text, SHOWN_CHARS));
    Some(Row { step: of_both[0].step, prompt, answer, cells: of_both.map(cell) })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::sample_text::tests::sample;
    use crate::samples::Ends;

    #[test]
    fn the_newest_steps_come_first_and_texts_are_bounded() {
        assert!(TrainingTable::new(&BTreeMap::new()).is_none());
        let mut ends = Ends::default();
        for step in [1, 10, 20, 30] {
            for group in [4, 2] {
                let texts = [format!("good {step}"), "x".repeat(2 * SHOWN_CHARS)];
                ends.add(sample(step, group, &texts[0], 1.0), STEPS);
                ends.add(sample(step, group, &texts[1], 0.0), STEPS);
            }
        }
        let rows = TrainingTable::new(&ends.training).unwrap().rows;
        let shown: Vec<(u64, &str)> = rows.iter().map(|row| (row.step, row.prompt.as_str())).collect();
        let both = |step| [(step, "prompt 4"), (step, "prompt 2")];
        assert_eq!(shown, [both(30), both(20), both(10)].concat());
        assert_eq!(rows[0].cells[0].completion, "good 30");
        assert!(rows[0].cells[1].completion.ends_with("… (800 more characters)"));
    }
}

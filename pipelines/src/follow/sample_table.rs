//! Completions of the same prompts before and after training.

use std::collections::HashMap;

use serde::Serialize;

use crate::format;
use crate::samples::{Phase, Sample, Turn};

/// Number of prompts shown.
const ROWS: usize = 16;

/// The first prompts of the evaluations, in order, so not selected by result.
#[derive(Debug, Serialize)]
pub struct SampleTable<'a> {
    note: String,
    before: String,
    after: Option<String>,
    rows: Vec<Row<'a>>,
}

#[derive(Debug, Serialize)]
struct Row<'a> {
    prompt: &'a str,
    answer: &'a str,
    cells: Vec<Cell<'a>>,
}

/// A completion; `verdict` is a class of the style sheet: `right`, `wrong` or `none` without a completion.
#[derive(Debug, Serialize)]
struct Cell<'a> {
    verdict: &'static str,
    completion: &'a str,
    /// Turns instead of the completion, if it has several.
    turns: &'a [Turn],
    /// Shown only if right and wrong do not express it.
    reward: Option<String>,
}

impl<'a> SampleTable<'a> {
    /// Rows of the prompts of the `first` evaluation; `None` without one. The `last` may be empty.
    pub(super) fn new(first: &'a [Sample], last: &'a [Sample]) -> Option<SampleTable<'a>> {
        let heading_before = heading(first.first()?);
        let before = first_of_each_prompt(first.iter());
        let after = first_of_each_prompt(last.iter());
        let after_by_prompt: HashMap<&str, &Sample> = after.iter().map(|s| (s.prompt.as_str(), *s)).collect();
        let changed = !last.is_empty();
        let row = |sample: &&'a Sample| {
            let after = changed.then(|| cell(after_by_prompt.get(sample.prompt.as_str()).copied()));
            let cells = std::iter::once(cell(Some(sample))).chain(after).collect();
            Row { prompt: &sample.prompt, answer: &sample.answer, cells }
        };
        let rows: Vec<Row> = before.iter().take(ROWS).map(row).collect();
        Some(SampleTable {
            note: format!("The first {} of {} held-out prompts, in their order.", rows.len(), before.len()),
            before: heading_before,
            after: last.first().map(heading),
            rows,
        })
    }
}

fn first_of_each_prompt<'a>(samples: impl Iterator<Item = &'a Sample>) -> Vec<&'a Sample> {
    let mut seen = std::collections::HashSet::new();
    samples.filter(|sample| seen.insert(sample.prompt.as_str())).collect()
}

fn heading(sample: &Sample) -> String {
    let phase = match sample.phase {
        Phase::Before => "before",
        Phase::Eval => "latest",
        Phase::After => "after",
        Phase::Train => "training",
    };
    format!("{phase} (step {})", sample.step)
}

fn cell(sample: Option<&Sample>) -> Cell<'_> {
    let Some(Sample { completion, turns, reward, .. }) = sample else {
        return Cell { verdict: "none", completion: "", turns: &[], reward: None };
    };
    let verdict = if *reward >= 1.0 { "right" } else { "wrong" };
    let told = *reward == 0.0 || *reward == 1.0;
    let reward = (!told).then(|| format!("reward {}", format::number(*reward)));
    Cell { verdict, completion, turns, reward }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn sample(step: u64, phase: Phase, prompt: &str, completion: &str, reward: f64) -> Sample {
        let [prompt, completion, answer] = [prompt, completion, "gold"].map(String::from);
        let (turns, columns) = Default::default();
        Sample { step, phase, prompt, completion, turns, answer, reward, columns, training: None }
    }

    #[test]
    fn the_same_prompt_stands_in_one_row_by_its_first_sample() {
        let samples = [
            sample(0, Phase::Before, "a", "a0", 0.0),
            sample(0, Phase::Before, "a", "a0 again", 1.0),
            sample(0, Phase::Before, "b", "b0", 0.25),
            sample(20, Phase::After, "c", "c20", 1.0),
            sample(20, Phase::After, "a", "a20", 1.0),
        ];
        let table = SampleTable::new(&samples[..3], &samples[3..]).unwrap();
        assert_eq!(
            (table.before.as_str(), table.after.as_deref()),
            ("before (step 0)", Some("after (step 20)"))
        );
        let cells =
            |row: &Row| row.cells.iter().map(|c| (c.verdict, c.completion.to_owned())).collect::<Vec<_>>();
        assert_eq!(table.rows.len(), 2);
        assert_eq!(cells(&table.rows[0]), [("wrong", "a0".into()), ("right", "a20".into())]);
        assert_eq!(cells(&table.rows[1]), [("wrong", "b0".into()), ("none", String::new())]);
        assert_eq!(table.rows[1].cells[0].reward.as_deref(), Some("reward 0.25"));
    }

    #[test]
    fn before_the_second_evaluation_there_is_one_column() {
        assert!(SampleTable::new(&[], &[]).is_none());
        let samples = [sample(0, Phase::Before, "a", "a0", 0.0)];
        let table = SampleTable::new(&samples, &[]).unwrap();
        assert!(table.after.is_none() && table.rows[0].cells.len() == 1);
    }
}

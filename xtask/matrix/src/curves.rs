//! Metrics over the steps of a run, and their golden values.
//!
//! A golden file is a text table: a line per step and a column per metric, empty if a step did not measure
//! it.

use std::collections::BTreeMap;
use std::fs;
use std::path::Path;

use serde_json::{Map, Value};

use crate::Result;
use crate::matrix::Tolerance;

const STEP: &str = "step";

/// Curves of some metrics of a run.
#[derive(Debug, PartialEq)]
pub struct Curves {
    names: Vec<String>,
    /// Values by step, one per name.
    rows: BTreeMap<u64, Vec<Option<f64>>>,
}

impl Curves {
    /// Reads these metrics from a run's `metrics.jsonl`, up to a step.
    pub fn of_run(path: &Path, names: &[String], until_step: u64) -> Result<Self> {
        let mut rows = BTreeMap::new();
        for line in read(path)?.lines() {
            let record: Map<String, Value> =
                serde_json::from_str(line).map_err(|error| format!("{}: {error}", path.display()))?;
            let step = record.get(STEP).and_then(Value::as_u64).unwrap_or_default();
            if step > until_step {
                break;
            }
            let values: Result<Vec<_>> = names.iter().map(|name| value(&record, name, step)).collect();
            rows.insert(step, values?);
        }
        let curves = Self { names: names.to_vec(), rows };
        match names.iter().find(|name| curves.last(name).is_none()) {
            Some(name) => Err(format!("the run did not measure {name}")),
            None => Ok(curves),
        }
    }

    /// Reads a golden file.
    pub fn read(path: &Path) -> Result<Self> {
        let text = read(path)?;
        let mut lines = text.lines().map(|line| line.split('\t'));
        let names = lines.next().into_iter().flatten().skip(1).map(str::to_owned).collect();
        let mut rows = BTreeMap::new();
        for mut fields in lines {
            let step = fields.next().and_then(|field| field.parse().ok());
            let number = |field: &str| match field {
                "" => Ok(None),
                field => field.parse().map(Some),
            };
            let values: std::result::Result<Vec<_>, _> = fields.map(number).collect();
            match (step, values) {
                (Some(step), Ok(values)) => drop(rows.insert(step, values)),
                _ => return Err(format!("{}: a line is not a step and its numbers", path.display())),
            }
        }
        Ok(Self { names, rows })
    }

    /// Returns the text of a golden file.
    pub fn text(&self) -> String {
        let line = |first: String, rest: Vec<String>| [vec![first], rest].concat().join("\t") + "\n";
        let mut text = line(STEP.to_owned(), self.names.clone());
        for (step, values) in &self.rows {
            let field = |value: &Option<f64>| value.map_or(String::new(), |value| value.to_string());
            text += &line(step.to_string(), values.iter().map(field).collect());
        }
        text
    }

    /// Returns a metric's last value.
    pub fn last(&self, name: &str) -> Option<f64> {
        let column = self.names.iter().position(|it| it == name)?;
        self.rows.values().rev().find_map(|values| values[column])
    }

    /// Returns the largest distance from `golden`, as a fraction of the tolerance. Above 1 it is an error
    /// that names the furthest value.
    pub fn compare(&self, golden: &Self, tolerance: Tolerance) -> Result<f64> {
        if self.names != golden.names {
            return Err(format!(
                "the curves are {:?}, but the golden ones {:?}: record them again",
                self.names, golden.names
            ));
        }
        if !self.rows.keys().eq(golden.rows.keys()) {
            let steps = [self, golden].map(|it| it.rows.len());
            return Err(format!("{} steps, and {} golden ones: record them", steps[0], steps[1]));
        }
        let mut worst = (0.0, String::new());
        for ((step, own), wanted) in self.rows.iter().zip(golden.rows.values()) {
            for ((name, own), wanted) in self.names.iter().zip(own).zip(wanted) {
                let part = match (own, wanted) {
                    (None, None) => continue,
                    (Some(own), Some(wanted)) => {
                        (own - wanted).abs() / (tolerance.absolute + tolerance.relative * wanted.abs())
                    }
                    _ => f64::INFINITY,
                };
                if part > worst.0 || part.is_nan() {
                    let shown = |value: &Option<f64>| value.map_or("nothing".into(), |it| it.to_string());
                    let text = format!("{name} at step {step} is {}, not {}", shown(own), shown(wanted));
                    worst = (part, text);
                }
            }
        }
        let (part, text) = worst;
        if part <= 1.0 { Ok(part) } else { Err(format!("{text}: {part:.1} times the tolerance")) }
    }
}

fn read(path: &Path) -> Result<String> {
    fs::read_to_string(path).map_err(|error| format!("cannot read {}: {error}", path.display()))
}

/// Returns `None` if the step did not measure it. Non-finite values are written as null, and are an error.
fn value(record: &Map<String, Value>, name: &str, step: u64) -> Result<Option<f64>> {
    match record.get(name) {
        None => Ok(None),
        Some(value) => value.as_f64().map(Some).ok_or_else(|| format!("{name} at step {step} is not finite")),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const TOLERANCE: Tolerance = Tolerance { absolute: 0.1, relative: 0.1 };

    fn curves(values: &[(u64, Option<f64>)]) -> Curves {
        let rows = values.iter().map(|(step, value)| (*step, vec![Some(1.0), *value])).collect();
        Curves { names: vec!["loss".into(), "eval/greedy".into()], rows }
    }

    #[test]
    fn a_golden_file_reads_back_bitwise() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("a.tsv");
        let written = curves(&[(0, Some(0.1 + 0.2)), (1, None), (2, Some(-1e-300))]);
        fs::write(&path, written.text()).unwrap();
        assert_eq!(Curves::read(&path).unwrap(), written);
        assert!(written.text().starts_with("step\tloss\teval/greedy\n0\t1\t0.30000000000000004\n1\t1\t\n"));
        fs::write(&path, "step\tloss\nzero\t1\n").unwrap();
        assert!(Curves::read(&path).unwrap_err().contains("not a step and its numbers"));
    }

    #[test]
    fn a_run_is_read_and_what_is_missing_is_named() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("metrics.jsonl");
        fs::write(&path, "{\"step\":0,\"eval/greedy\":0.5}\n{\"step\":1,\"loss\":2.0}\n").unwrap();
        let names = |names: &[&str]| names.iter().map(|it| (*it).to_owned()).collect::<Vec<_>>();
        let read = Curves::of_run(&path, &names(&["loss", "eval/greedy"]), 9).unwrap();
        assert_eq!(read.text(), "step\tloss\teval/greedy\n0\t\t0.5\n1\t2\t\n");
        assert_eq!(read.last("eval/greedy"), Some(0.5));
        let error = |names: &[String], until| Curves::of_run(&path, names, until).unwrap_err();
        assert_eq!(error(&names(&["kl"]), 9), "the run did not measure kl");
        assert_eq!(error(&names(&["loss"]), 0), "the run did not measure loss");
        fs::write(&path, "{\"step\":3,\"loss\":null}\n").unwrap();
        assert_eq!(error(&names(&["loss"]), 9), "loss at step 3 is not finite");
    }

    #[test]
    fn the_furthest_value_decides() {
        let golden = curves(&[(0, Some(1.0)), (1, None), (2, Some(-4.0))]);
        assert_eq!(golden.compare(&golden, TOLERANCE), Ok(0.0));
        let near = curves(&[(0, Some(1.1)), (1, None), (2, Some(-4.1))]);
        assert!((near.compare(&golden, TOLERANCE).unwrap() - 0.5).abs() < 1e-9);
        let check = |own: Curves, words: &str| {
            let message = own.compare(&golden, TOLERANCE).unwrap_err();
            assert!(message.contains(words), "{message}");
        };
        check(
            curves(&[(0, Some(1.1)), (1, None), (2, Some(-5.0))]),
            "eval/greedy at step 2 is -5, not -4: 2.0 times",
        );
        check(curves(&[(0, Some(f64::NAN)), (1, None), (2, Some(-4.0))]), "at step 0 is NaN");
        check(curves(&[(0, None), (1, None), (2, Some(-4.0))]), "at step 0 is nothing, not 1");
        check(curves(&[(0, Some(1.0))]), "1 steps, and 3 golden ones");
    }
}

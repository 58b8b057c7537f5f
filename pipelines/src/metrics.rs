//! Numbers of a run, by name and step: `metrics.jsonl`.
//!
//! One line is one step: `{"step":12,"reward/mean":0.5,...}`. Step 0 is the state before the first update;
//! an evaluation's numbers stand in the line of the step after which it ran.
//!
//! Names are `group/quantity`, and the unit comes last if there is one (`time/step_s`). Two runs with the same
//! config, seed, world size and machine are bitwise equal, resumed or not. Such runs write the same bits for every
//! metric except `time/*` and `perf/*`, which depend on the clock. Every metric that depends on the clock must have
//! such a name. Memory does too, since streams release memory at varying times.
//!
//! `time/step_s` is the duration of a training step without its evaluation, and `time/eval_s` is that of the
//! evaluation. The sum of both is the run's duration.

mod declared;
mod history;

use std::path::Path;

pub use declared::{DECLARED, Declared, Reduction, declared, page};
pub use history::{Curve, ENDS, History, Stretch};
use indexmap::IndexMap;
use serde::de::{Error as _, MapAccess, Visitor};
use serde::ser::SerializeMap;
use serde::{Deserialize, Deserializer, Serialize, Serializer};

use crate::json_lines::{self, JsonLines};
use crate::output_error::Result;

/// The key that is not a metric.
const STEP: &str = "step";

/// Numbers by name, in the order of insertion.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct Metrics {
    values: IndexMap<String, f64>,
}

impl Metrics {
    /// No numbers yet.
    pub fn new() -> Metrics {
        Metrics::default()
    }

    /// Sets `name` to `value`; an existing name keeps its position.
    ///
    /// # Panics
    /// If `name` is `step`, which is the key of the record.
    pub fn insert(&mut self, name: impl Into<String>, value: f64) {
        let name = name.into();
        assert_ne!(name, STEP, "`step` is the key of the record and cannot be a metric");
        self.values.insert(name, value);
    }

    /// The value of `name`.
    pub fn get(&self, name: &str) -> Option<f64> {
        self.values.get(name).copied()
    }

    /// Appends all of `other`; for a name that is in both, the value of `other` is kept.
    pub fn merge(&mut self, other: Metrics) {
        self.values.extend(other.values);
    }

    /// Names and values, in the order of insertion.
    pub fn iter(&self) -> impl Iterator<Item = (&str, f64)> {
        self.values.iter().map(|(name, &value)| (name.as_str(), value))
    }
}

/// One line of `metrics.jsonl`.
#[derive(Debug, Clone, PartialEq)]
pub struct Record {
    /// Number of updates before this record; 0 is before the first.
    pub step: u64,
    /// Measured values. A value that was not finite when written is read as NaN.
    pub metrics: Metrics,
}

/// The log of a run's metrics, open for appending.
#[derive(Debug)]
pub struct MetricsLog {
    lines: JsonLines,
}

impl MetricsLog {
    /// Starts the log of a new run.
    ///
    /// # Errors
    /// If the file exists or cannot be created.
    pub fn create(path: &Path) -> Result<MetricsLog> {
        Ok(MetricsLog { lines: JsonLines::create(path)? })
    }

    /// Continues the log of a run that resumes at `next_step`. Lines of that step and later ones are dropped, and so
    /// is an incomplete last line of a killed process. For this, a step's line must be appended before its checkpoint
    /// starts.
    ///
    /// # Errors
    /// If the file cannot be read or written, or holds an invalid line.
    pub fn resume(path: &Path, next_step: u64) -> Result<MetricsLog> {
        Ok(MetricsLog { lines: JsonLines::resume(path, next_step)? })
    }

    /// Continues the log at `next_step` if it exists, else starts it.
    ///
    /// # Errors
    /// If the file cannot be read or written, or holds an invalid line.
    pub fn open_at(path: &Path, next_step: u64) -> Result<MetricsLog> {
        if path.exists() { MetricsLog::resume(path, next_step) } else { MetricsLog::create(path) }
    }

    /// Appends the line of a step and hands it to the operating system, so that it outlives a kill.
    ///
    /// JSON has no infinities and no NaN: such a value is written as `null`, and a warning names the metric. In tests
    /// a name that is not [declared](DECLARED) is an error.
    pub fn append(&mut self, step: u64, metrics: &Metrics) -> Result<()> {
        for (name, _) in metrics.iter().filter(|_| cfg!(test)) {
            assert!(declared(name).is_some(), "`{name}` is not in metrics/declared.rs");
        }
        for (name, value) in metrics.iter().filter(|(_, value)| !value.is_finite()) {
            tracing::warn!(step, metric = name, value, "the metric is not finite and is logged as null");
        }
        self.lines.append(&Line { step, metrics })
    }

    /// Waits until all lines are on disk. Must be called before a checkpoint is declared complete, so that no power
    /// failure leaves a checkpoint ahead of its metrics.
    pub fn sync(&self) -> Result<()> {
        self.lines.sync()
    }
}

/// Reads the lines of a `metrics.jsonl`, in order, even during the run.
///
/// # Errors
/// If the file cannot be read, or holds an invalid line.
pub fn read_metrics(path: &Path) -> Result<Vec<Record>> {
    json_lines::read(path)
}

/// A record for writing that borrows its metrics.
struct Line<'a> {
    step: u64,
    metrics: &'a Metrics,
}

impl Serialize for Line<'_> {
    fn serialize<S: Serializer>(&self, serializer: S) -> std::result::Result<S::Ok, S::Error> {
        let mut map = serializer.serialize_map(None)?;
        map.serialize_entry(STEP, &self.step)?;
        for (name, value) in self.metrics.iter() {
            map.serialize_entry(name, &value)?;
        }
        map.end()
    }
}

impl<'de> Deserialize<'de> for Record {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> std::result::Result<Record, D::Error> {
        deserializer.deserialize_map(RecordVisitor)
    }
}

struct RecordVisitor;

impl<'de> Visitor<'de> for RecordVisitor {
    type Value = Record;

    fn expecting(&self, formatter: &mut std::fmt::Formatter) -> std::fmt::Result {
        formatter.write_str("an object with `step` and numbers")
    }

    fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> std::result::Result<Record, A::Error> {
        let mut step = None;
        let mut metrics = Metrics::new();
        while let Some(name) = map.next_key::<String>()? {
            if name == STEP {
                step = Some(map.next_value()?);
            } else {
                let value: Option<f64> = map.next_value()?;
                metrics.values.insert(name, value.unwrap_or(f64::NAN));
            }
        }
        let step = step.ok_or_else(|| A::Error::missing_field(STEP))?;
        Ok(Record { step, metrics })
    }
}

#[cfg(test)]
mod tests {
    use std::fs;
    use std::io::Write;
    use std::sync::{Arc, Mutex};

    use super::*;

    fn metrics(pairs: &[(&str, f64)]) -> Metrics {
        let mut metrics = Metrics::new();
        for &(name, value) in pairs {
            metrics.insert(name, value);
        }
        metrics
    }

    #[test]
    fn keeps_the_order_of_insertion_and_merges_behind() {
        let mut first = metrics(&[("b", 1.0), ("a", 2.0), ("b", 3.0)]);
        first.merge(metrics(&[("c", 4.0), ("a", 5.0)]));
        assert_eq!(first.iter().collect::<Vec<_>>(), [("b", 3.0), ("a", 5.0), ("c", 4.0)]);
        assert_eq!((first.get("c"), first.get("d")), (Some(4.0), None));
    }

    #[test]
    fn a_line_starts_with_its_step_and_numbers_read_back_bitwise() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("metrics.jsonl");
        // Numbers that a parser without exact rounding gets wrong by one bit, and the ends of the range.
        let odd = [51.248_178_371_012_68, 0.1 + 0.2, 1.0 / 3.0, 2.0f64.powi(60) + 1024.0];
        let ends = [-0.0, 0.0, f64::MIN_POSITIVE, 5e-324, f64::MAX, f64::MIN, f64::EPSILON, 7.0];
        let mut state = 1u64;
        let mut random = || {
            state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
            f64::from_bits(state)
        };
        let random = std::iter::repeat_with(&mut random).filter(|value| value.is_finite()).take(10_000);
        let values: Vec<f64> = odd.into_iter().chain(ends).chain(random).collect();

        let mut log = MetricsLog::create(&path).unwrap();
        for (step, &value) in values.iter().enumerate() {
            log.append(step as u64, &metrics(&[("loss/policy", value)])).unwrap();
        }
        assert!(
            fs::read_to_string(&path)
                .unwrap()
                .starts_with("{\"step\":0,\"loss/policy\":51.24817837101268}\n")
        );
        for (step, record) in read_metrics(&path).unwrap().iter().enumerate() {
            assert_eq!(record.step, step as u64);
            assert_eq!(record.metrics.get("loss/policy").unwrap().to_bits(), values[step].to_bits());
        }
    }

    #[test]
    fn a_value_that_is_not_finite_is_null_and_warned_about() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("metrics.jsonl");
        let mut log = MetricsLog::create(&path).unwrap();
        let warnings = captured(|| {
            let values =
                metrics(&[("grad_norm", f64::NAN), ("entropy", 1.5), ("kl/reference", f64::INFINITY)]);
            log.append(3, &values).unwrap();
        });
        let line = "{\"step\":3,\"grad_norm\":null,\"entropy\":1.5,\"kl/reference\":null}\n";
        assert_eq!(fs::read_to_string(&path).unwrap(), line);
        assert!(
            warnings.contains("WARN") && warnings.contains("grad_norm") && warnings.contains("kl/reference")
        );
        assert!(!warnings.contains("entropy"), "{warnings}");
        assert!(read_metrics(&path).unwrap()[0].metrics.get("grad_norm").unwrap().is_nan());
    }

    #[test]
    fn resumes_with_a_step_and_forgets_a_torn_line() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("metrics.jsonl");
        let mut log = MetricsLog::create(&path).unwrap();
        for step in 0..6 {
            log.append(step, &metrics(&[("reward/mean", step as f64)])).unwrap();
        }
        fs::OpenOptions::new().append(true).open(&path).unwrap().write_all(b"{\"step\":6,\"rew").unwrap();
        let mut log = MetricsLog::resume(&path, 4).unwrap();
        log.append(4, &metrics(&[("reward/mean", 0.5)])).unwrap();
        log.sync().unwrap();
        let rewards = read_metrics(&path).unwrap();
        let rewards: Vec<_> =
            rewards.iter().map(|r| (r.step, r.metrics.get("reward/mean").unwrap())).collect();
        assert_eq!(rewards, [(0, 0.0), (1, 1.0), (2, 2.0), (3, 3.0), (4, 0.5)]);
    }

    #[test]
    #[should_panic(expected = "`step` is the key of the record")]
    fn a_metric_cannot_be_called_step() {
        Metrics::new().insert("step", 1.0);
    }

    #[test]
    fn a_line_without_a_step_is_an_error() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("metrics.jsonl");
        fs::write(&path, "{\"step\":0}\n{\"loss/policy\":1.0}\n").unwrap();
        assert!(read_metrics(&path).unwrap_err().to_string().contains("line 2"));
    }

    /// Returns the output of tracing while `f` runs.
    fn captured(f: impl FnOnce()) -> String {
        #[derive(Clone, Default)]
        struct Sink(Arc<Mutex<Vec<u8>>>);
        impl Write for Sink {
            fn write(&mut self, bytes: &[u8]) -> std::io::Result<usize> {
                self.0.lock().unwrap().write(bytes)
            }
            fn flush(&mut self) -> std::io::Result<()> {
                Ok(())
            }
        }
        let sink = Sink::default();
        let writer = sink.clone();
        let subscriber =
            tracing_subscriber::fmt().with_ansi(false).with_writer(move || writer.clone()).finish();
        tracing::subscriber::with_default(subscriber, f);
        let bytes = sink.0.lock().unwrap().clone();
        String::from_utf8(bytes).unwrap()
    }
}

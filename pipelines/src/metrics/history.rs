//! Curves of a run's metrics in bounded memory, from which the report and the table at the end are made.
//!
//! A curve has a value per stretch of steps. Stretches are single steps until a run has [`STRETCHES`] of them; then
//! each has twice as many steps, and so on. A report of a million steps needs the memory of one of some thousand.

use std::collections::VecDeque;
use std::path::Path;

use indexmap::IndexMap;

use super::Record;
use crate::json_lines;
use crate::output_error::Result;

/// Most stretches of a curve, which is more than a chart can show.
const STRETCHES: u64 = 1024;

/// Most values that are kept from each end of a curve.
pub const ENDS: usize = 10;

/// Metrics of a run, by name in the order in which they were first logged.
#[derive(Debug, Clone)]
pub struct History {
    curves: IndexMap<String, Curve>,
    /// Steps per stretch, a power of two.
    width: u64,
    steps: Option<(u64, u64)>,
}

/// One metric over the steps.
#[derive(Debug, Clone, Default)]
pub struct Curve {
    stretches: Vec<Stretch>,
    first: Vec<f64>,
    last: VecDeque<f64>,
    sum: f64,
    count: usize,
    timed: Timed,
}

/// Sums over the steps whose duration is known.
#[derive(Debug, Clone, Copy, Default)]
struct Timed {
    time_s: f64,
    product: f64,
}

/// Values of adjacent steps.
#[derive(Debug, Clone, Copy)]
pub struct Stretch {
    /// Its first step over the width.
    pub number: u64,
    /// Number and sum of the finite values.
    count: u64,
    sum: f64,
    /// Lowest finite value; NaN without one.
    pub low: f64,
    /// Highest finite value; NaN without one.
    pub high: f64,
}

impl History {
    /// Reads a `metrics.jsonl`, even during the run.
    ///
    /// # Errors
    /// If the file cannot be read, or holds an invalid line.
    pub fn read(path: &Path) -> Result<History> {
        let mut history = History::default();
        json_lines::each(path, |record: Record| history.add(&record))?;
        Ok(history)
    }

    /// Adds the next record of a run.
    pub fn add(&mut self, record: &Record) {
        let step = record.step;
        self.steps = Some(self.steps.map_or((step, step), |(first, last)| (first.min(step), last.max(step))));
        while step / self.width >= STRETCHES {
            self.width *= 2;
            self.curves.values_mut().for_each(Curve::halve);
        }
        let time_s = record.metrics.get("time/step_s").filter(|time_s| time_s.is_finite());
        for (name, value) in record.metrics.iter() {
            let number = step / self.width;
            match self.curves.get_mut(name) {
                Some(curve) => curve.add(number, value, time_s),
                None => self.curves.entry(name.to_owned()).or_default().add(number, value, time_s),
            }
        }
    }

    /// The curve of a metric, if it was logged.
    pub fn get(&self, name: &str) -> Option<&Curve> {
        self.curves.get(name)
    }

    /// Names of all metrics.
    pub fn names(&self) -> impl Iterator<Item = &str> {
        self.curves.keys().map(String::as_str)
    }

    /// First and last step; `None` without a record.
    pub fn steps(&self) -> Option<(u64, u64)> {
        self.steps
    }

    /// Steps per point of the curves.
    pub fn width(&self) -> u64 {
        self.width
    }
}

impl Default for History {
    fn default() -> History {
        History { curves: IndexMap::new(), width: 1, steps: None }
    }
}

impl<'a> FromIterator<&'a Record> for History {
    fn from_iter<I: IntoIterator<Item = &'a Record>>(records: I) -> History {
        let mut history = History::default();
        records.into_iter().for_each(|record| history.add(record));
        history
    }
}

impl Curve {
    fn add(&mut self, number: u64, value: f64, time_s: Option<f64>) {
        let of_one = Stretch::of(number, value);
        match self.stretches.last_mut() {
            Some(last) if last.number == number => *last = last.and(of_one),
            _ => self.stretches.push(of_one),
        }
        if !value.is_finite() {
            return;
        }
        if self.first.len() < ENDS {
            self.first.push(value);
        }
        if self.last.len() == ENDS {
            self.last.pop_front();
        }
        self.last.push_back(value);
        self.sum += value;
        self.count += 1;
        if let Some(time_s) = time_s {
            self.timed.time_s += time_s;
            self.timed.product += time_s * value;
        }
    }

    /// Joins pairs of stretches.
    fn halve(&mut self) {
        let mut joined: Vec<Stretch> = Vec::with_capacity(self.stretches.len() / 2 + 1);
        for stretch in &self.stretches {
            let half = Stretch { number: stretch.number / 2, ..*stretch };
            match joined.last_mut() {
                Some(last) if last.number == half.number => *last = last.and(half),
                _ => joined.push(half),
            }
        }
        self.stretches = joined;
    }

    /// Stretches with `number` or a later one, in order.
    pub fn since(&self, number: u64) -> &[Stretch] {
        &self.stretches[self.stretches.partition_point(|it| it.number < number)..]
    }

    /// Number of finite values.
    pub fn count(&self) -> usize {
        self.count
    }

    /// Sum of the finite values.
    pub fn sum(&self) -> f64 {
        self.sum
    }

    /// First finite values, at most [`ENDS`].
    pub fn first(&self) -> &[f64] {
        &self.first
    }

    /// Last finite values, at most [`ENDS`], oldest first.
    pub fn last(&self) -> &VecDeque<f64> {
        &self.last
    }

    /// Mean weighted by the durations of the steps; `None` without a duration.
    pub fn mean_by_time(&self) -> Option<f64> {
        let Timed { time_s, product } = self.timed;
        (time_s > 0.0).then(|| product / time_s)
    }
}

impl Stretch {
    fn of(number: u64, value: f64) -> Stretch {
        match value.is_finite() {
            true => Stretch { number, count: 1, sum: value, low: value, high: value },
            false => Stretch { number, count: 0, sum: 0.0, low: f64::NAN, high: f64::NAN },
        }
    }

    /// Mean of the finite values; NaN without one.
    pub fn mean(&self) -> f64 {
        self.sum / self.count as f64
    }

    fn and(self, later: Stretch) -> Stretch {
        Stretch {
            number: self.number,
            count: self.count + later.count,
            sum: self.sum + later.sum,
            // Both ignore a NaN.
            low: self.low.min(later.low),
            high: self.high.max(later.high),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::metrics::Metrics;

    fn history(steps: u64, value: impl Fn(u64) -> f64) -> History {
        let record = |step| {
            let mut metrics = Metrics::new();
            metrics.insert("loss", value(step));
            if step % 1000 == 0 {
                metrics.insert("eval/loss", value(step));
            }
            Record { step, metrics }
        };
        (0..steps).map(record).collect::<Vec<_>>().iter().collect()
    }

    #[test]
    fn a_run_of_few_steps_has_each_of_them() {
        let history = history(STRETCHES, |step| step as f64);
        let curve = history.get("loss").unwrap();
        assert_eq!((history.width(), curve.since(0).len() as u64), (1, STRETCHES));
        for (step, it) in (0..).zip(curve.since(0)) {
            let value = step as f64;
            assert_eq!((it.number, it.mean(), it.low, it.high), (step, value, value, value));
        }
        assert_eq!(curve.since(STRETCHES - 2).len(), 2);
    }

    #[test]
    fn a_long_run_keeps_means_spikes_ends_and_sums_in_bounded_memory() {
        let steps = 50_000;
        let value = |step| if step == 31_415 { 9.0 } else { (step % 2) as f64 };
        let history = history(steps, value);
        let curve = history.get("loss").unwrap();
        assert_eq!((history.width(), history.steps()), (64, Some((0, steps - 1))));
        assert!(curve.since(0).len() as u64 <= STRETCHES);
        assert!(curve.stretches.capacity() as u64 <= 2 * STRETCHES);
        let width = history.width();
        let mean = |number: u64| {
            let of = (number * width..steps.min((number + 1) * width)).map(value);
            of.clone().sum::<f64>() / of.count() as f64
        };
        assert!(curve.since(0).iter().all(|it| it.mean() == mean(it.number)));
        assert!(curve.since(0).iter().any(|it| (it.number, it.high) == (31_415 / width, 9.0)));
        assert_eq!(curve.first(), [0.0, 1.0, 0.0, 1.0, 0.0, 1.0, 0.0, 1.0, 0.0, 1.0]);
        assert!(curve.last().iter().eq(curve.first()));
        assert_eq!((curve.count(), curve.sum()), (steps as usize, (0..steps).map(value).sum()));
        assert_eq!(history.get("eval/loss").unwrap().since(0).len(), 50);
    }

    #[test]
    fn a_value_that_is_not_finite_is_a_gap() {
        let history = history(2 * STRETCHES, |step| if step < 4 { f64::NAN } else { 1.0 });
        let stretches = history.get("loss").unwrap().since(0);
        assert!(stretches[1].mean().is_nan());
        assert_eq!((stretches[2].mean(), stretches.len() as u64), (1.0, STRETCHES));
        assert_eq!(history.get("loss").unwrap().count() as u64, 2 * STRETCHES - 4);
    }
}

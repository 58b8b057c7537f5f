//! Results of a run in a few numbers, shared by the terminal's table and the report.

use crate::metrics::{Curve, ENDS, History};

/// Metrics of a run's speed, with their units.
pub const SPEEDS: [(&str, &str); 2] = [("perf/tokens_per_s", "tokens/s"), ("perf/images_per_s", "images/s")];

/// The name of the training reward among the comparisons.
pub const REWARD: &str = "reward";

/// The name of the held-out loss.
pub const LOSS: &str = "loss";

/// The name of the distance of the images from those before training.
pub const DRIFT: &str = "drift";

/// The name of the loss in training, of runs without evaluations.
pub const TRAINING_LOSS: &str = "train loss";

/// Results of a run. A number is `None` if its metrics are absent.
#[derive(Debug, Clone, PartialEq)]
pub struct Headline<'a> {
    /// Evaluations, then the training reward if samples have rewards. Without evaluations, the training loss.
    pub comparisons: Vec<Comparison<'a>>,
    /// The last step.
    pub step: u64,
    /// Seconds of training and evaluation over all starts of the run.
    pub time_s: Option<f64>,
    /// Mean over the training steps, weighted by their duration, with its unit.
    pub speed: Option<(f64, &'static str)>,
}

/// A number at the beginning of a run and at its end.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Comparison<'a> {
    /// Name for people.
    pub name: &'a str,
    /// The first value.
    pub before: Option<f64>,
    /// The last value; `None` until there is a second one.
    pub after: Option<f64>,
    /// Number of steps averaged; `None` if the values are not means.
    pub steps: Option<usize>,
}

impl<'a> Headline<'a> {
    /// Computes the results from the log of a run.
    ///
    /// An evaluation has its first and its last value. The reward or loss of a single step depends on its prompts, so
    /// the first and the last ten steps are averaged. With fewer than twenty steps, each half is averaged.
    pub fn new(history: &'a History) -> Headline<'a> {
        let evaluation = |name, metric| {
            let curve = history.get(metric);
            let before = curve.and_then(|curve| curve.first().first().copied());
            let after =
                curve.filter(|curve| curve.count() > 1).and_then(|curve| curve.last().back().copied());
            Comparison { name, before, after, steps: None }
        };
        let of_several = || of_several(history.names());
        let reward = || of_steps(REWARD, history.get("reward/mean"));
        let has = |metric: &str| history.get(metric).is_some();
        let sum = |metric| history.get(metric).filter(|curve| curve.count() > 0).map(Curve::sum);
        let speed = |(metric, unit)| Some((history.get(metric)?.mean_by_time()?, unit));
        let comparisons = if has("eval/reward") {
            vec![evaluation("held-out", "eval/reward"), evaluation(DRIFT, "eval/drift"), reward()]
        } else if has("eval/loss") {
            let found = [
                (LOSS, "eval/loss"),
                ("pairs", "eval/accuracy"),
                ("steps", "eval/step_accuracy"),
                ("exact", "eval/exact"),
            ];
            let found = found.into_iter().filter(|(_, metric)| has(metric));
            found.map(|(name, metric)| evaluation(name, metric)).collect()
        } else if has("loss") {
            vec![of_steps(TRAINING_LOSS, history.get("loss"))]
        } else {
            let accuracies = [("greedy", "eval/greedy"), ("pass@1", "eval/pass@1")].into_iter();
            let accuracies = accuracies.chain(of_several());
            let accuracies = accuracies.map(|(name, metric)| evaluation(name, metric));
            accuracies.chain([reward()]).collect()
        };
        Headline {
            comparisons,
            step: history.steps().map_or(0, |(_, last)| last),
            time_s: ["time/step_s", "time/eval_s"].into_iter().filter_map(sum).reduce(|a, b| a + b),
            speed: SPEEDS.into_iter().find_map(speed),
        }
    }
}

/// The pass@k metric among `metrics` with k above 1, as its short and its full name: `pass@4` for four
/// samples per prompt.
pub fn of_several<'a>(mut metrics: impl Iterator<Item = &'a str>) -> Option<(&'a str, &'a str)> {
    metrics.find_map(|metric| {
        let name = metric.strip_prefix("eval/")?;
        (name.starts_with("pass@") && name != "pass@1").then_some((name, metric))
    })
}

/// Means over the first and the last steps, at most [`ENDS`] and at most half of them.
fn of_steps<'a>(name: &'a str, curve: Option<&Curve>) -> Comparison<'a> {
    let count = curve.map_or(0, |curve| ENDS.min(curve.count() / 2));
    let before = curve.and_then(|curve| mean(curve.first().iter().take(count)));
    // Summed in the order of the steps.
    let after = curve.and_then(|curve| mean(curve.last().iter().skip(curve.last().len() - count)));
    Comparison { name, before, after, steps: (count > 0).then_some(count) }
}

fn mean<'a>(values: impl ExactSizeIterator<Item = &'a f64>) -> Option<f64> {
    let count = values.len();
    (count > 0).then(|| values.sum::<f64>() / count as f64)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::metrics::{Metrics, Record};

    fn record(step: u64, pairs: &[(&str, f64)]) -> Record {
        let mut metrics = Metrics::new();
        for &(name, value) in pairs {
            metrics.insert(name, value);
        }
        Record { step, metrics }
    }

    #[test]
    fn takes_first_and_last_evaluations_mean_rewards_and_weighted_speed() {
        let mut records = vec![record(0, &[("eval/greedy", 0.25), ("time/eval_s", 2.0)])];
        for step in 1..=30 {
            let slow = if step == 30 { 3.0 } else { 1.0 };
            let reward = step as f64;
            let speed = 100.0 / slow;
            let pairs = [("reward/mean", reward), ("time/step_s", slow), ("perf/tokens_per_s", speed)];
            records.push(record(step, &pairs));
        }
        records[15].metrics.insert("eval/greedy", 0.5);
        records[30].metrics.insert("eval/greedy", 0.75);
        records[30].metrics.insert("eval/pass@8", 0.875);
        let history = records.iter().collect();
        let headline = Headline::new(&history);
        let [greedy, pass_1, pass_8, reward] = headline.comparisons[..] else { panic!() };
        assert_eq!((pass_8.name, pass_8.before), ("pass@8", Some(0.875)));
        assert_eq!((greedy.before, greedy.after), (Some(0.25), Some(0.75)));
        assert_eq!((pass_1.before, pass_1.after), (None, None));
        assert_eq!((reward.before, reward.after), (Some(5.5), Some(25.5)));
        assert_eq!((headline.step, headline.time_s), (30, Some(34.0)));
        assert_eq!(headline.speed, Some((30.0 * 100.0 / 32.0, "tokens/s")));
    }

    #[test]
    fn a_run_of_images_has_its_own_numbers() {
        let records = [
            record(0, &[("eval/reward", 0.4), ("eval/drift", 0.0)]),
            record(
                1,
                &[
                    ("eval/reward", 0.9),
                    ("eval/drift", 0.3),
                    ("time/step_s", 2.0),
                    ("perf/images_per_s", 64.0),
                ],
            ),
        ];
        let history = records.iter().collect();
        let headline = Headline::new(&history);
        let [held_out, drift, _] = headline.comparisons[..] else { panic!("{headline:?}") };
        assert_eq!((held_out.before, held_out.after), (Some(0.4), Some(0.9)));
        assert_eq!((drift.before, drift.after), (Some(0.0), Some(0.3)));
        assert_eq!(headline.speed, Some((64.0, "images/s")));
    }

    #[test]
    fn a_run_on_written_texts_has_its_own_numbers() {
        let records = [
            record(0, &[("eval/loss", 2.0), ("eval/accuracy", 0.5)]),
            record(9, &[("eval/loss", 0.5), ("eval/accuracy", 0.9), ("reward/margin", 1.0)]),
        ];
        let expected = [("loss", 2.0, 0.5), ("pairs", 0.5, 0.9)].map(|(name, before, after)| Comparison {
            name,
            before: Some(before),
            after: Some(after),
            steps: None,
        });
        assert_eq!(Headline::new(&records.iter().collect()).comparisons, expected);
    }

    #[test]
    fn a_run_without_evaluations_has_its_training_loss() {
        let records: Vec<Record> =
            (1..=30).map(|step| record(step, &[("loss", step as f64), ("reward/margin", 1.0)])).collect();
        let expected =
            Comparison { name: TRAINING_LOSS, before: Some(5.5), after: Some(25.5), steps: Some(10) };
        assert_eq!(Headline::new(&records.iter().collect()).comparisons, [expected]);
        let expected = Comparison { before: Some(1.5), after: Some(4.5), steps: Some(2), ..expected };
        assert_eq!(Headline::new(&records[..5].iter().collect()).comparisons, [expected]);
    }

    #[test]
    fn a_run_that_just_began_has_no_after() {
        let records = [record(0, &[("eval/greedy", 0.25)])];
        let history = records.iter().collect();
        let headline = Headline::new(&history);
        assert_eq!((headline.comparisons[0].before, headline.comparisons[0].after), (Some(0.25), None));
        assert_eq!((headline.time_s, headline.speed), (None, None));
        assert!(
            Headline::new(&History::default())
                .comparisons
                .iter()
                .all(|c| c.before.is_none() && c.after.is_none())
        );
    }
}

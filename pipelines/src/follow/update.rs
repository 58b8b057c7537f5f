//! Messages from a followed run to the page: the whole run, or its changes since the last message.

use indexmap::IndexMap;
use serde::Serialize;

use super::Follower;
use super::gallery::Shot;
use super::rows::SampleRow;
use super::sample_table::SampleTable;
use super::state::State;
use super::training_table::TrainingTable;
use crate::advice::Advice;
use crate::format;
use crate::headline::{Comparison, DRIFT, Headline, LOSS, TRAINING_LOSS};
use crate::metrics::{Curve, History, Stretch, declared};
use crate::run_log::LogLine;

/// End of the last message to a page. The default precedes the first message.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct Cursor {
    began: bool,
    generation: u64,
    curves: Stretches,
    warmup: Stretches,
    metrics: usize,
    samples: u64,
    lines: u64,
    pictured: Vec<u64>,
}

/// Width and number of the last stretch of curves.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
struct Stretches {
    width: u64,
    number: u64,
}

/// A message to the page. A part that is `None` has not changed.
#[derive(Debug, Serialize)]
pub struct Update<'a> {
    /// True to forget all earlier messages.
    reset: bool,
    /// Facts that change with each step.
    pub head: Head<'a>,
    config: Option<&'a str>,
    /// Sentences about the metrics.
    notes: Option<IndexMap<&'a str, &'static str>>,
    curves: Curves<'a>,
    /// Curves over the steps of the warm-up.
    warmup: Curves<'a>,
    before_and_after: Option<SampleTable<'a>>,
    training: Option<TrainingTable>,
    rows: Vec<&'a SampleRow>,
    log: Vec<&'a LogLine>,
    gallery: Option<&'a [Shot]>,
}

/// Facts of a run that change with each step.
#[derive(Debug, Serialize)]
pub struct Head<'a> {
    /// Name in the config, or of the folder.
    pub name: String,
    /// Folder of the run.
    pub path: String,
    /// Sentence about the run.
    pub description: &'a str,
    /// State of the run.
    pub state: State,
    /// Last line of a run that failed or was interrupted.
    pub reason: Option<&'a str>,
    /// Last step.
    pub step: Option<u64>,
    /// Number of steps after which the run is finished.
    pub steps: Option<u64>,
    /// Steps of the warm-up that are done, and all of them, before the first step.
    pub warmup: Option<(u64, u64)>,
    /// Seconds until it is finished, while it runs.
    pub left_s: Option<f64>,
    /// The newest result in few words, as in `pass@1 0.935`.
    pub newest: Option<String>,
    /// Results.
    pub tiles: Vec<Tile>,
    /// Advice.
    pub advice: &'a [Advice],
}

/// A number with its name and its change.
#[derive(Debug, Serialize)]
pub struct Tile {
    name: String,
    value: String,
    change: Option<String>,
    /// `up` for better, `down` for worse, or empty.
    direction: &'static str,
    detail: String,
}

/// Points of the curves from the stretch `from` on.
#[derive(Debug, Serialize)]
struct Curves<'a> {
    width: u64,
    from: u64,
    of: IndexMap<&'a str, Points>,
}

/// Points of a curve. A value that is not finite is null.
#[derive(Debug, Serialize)]
struct Points {
    /// Number of the stretch: its first step over the width.
    at: Vec<u64>,
    mean: Vec<f64>,
    /// Lowest and highest values, if a point is the mean of several steps.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    low: Vec<f64>,
    #[serde(skip_serializing_if = "Vec::is_empty")]
    high: Vec<f64>,
}

impl Follower {
    /// Returns the changes since `cursor`, and moves it.
    pub fn update(&self, cursor: &mut Cursor) -> Update<'_> {
        let reset = !cursor.began || cursor.generation != self.generation;
        if reset {
            *cursor = Cursor { began: true, generation: self.generation, ..Cursor::default() };
        }
        let samples_changed = reset || cursor.samples != self.rows.count();
        let metric_count = self.history.names().count() + self.warmup_history.names().count();
        let update = Update {
            reset,
            head: self.head(),
            config: reset.then_some(self.config.as_str()),
            notes: (metric_count != cursor.metrics).then(|| self.notes()),
            curves: Curves::since(&self.history, &mut cursor.curves),
            warmup: Curves::since(&self.warmup_history, &mut cursor.warmup),
            before_and_after: samples_changed
                .then(|| SampleTable::new(&self.ends.first, &self.ends.last))
                .flatten(),
            training: samples_changed.then(|| TrainingTable::new(&self.ends.training)).flatten(),
            rows: self.rows.since(cursor.samples).collect(),
            log: self.lines_since(cursor.lines).collect(),
            gallery: (reset || self.pictured != cursor.pictured).then_some(&self.gallery),
        };
        (cursor.metrics, cursor.pictured) = (metric_count, self.pictured.clone());
        (cursor.samples, cursor.lines) = (self.rows.count(), self.line_count);
        update
    }

    fn lines_since(&self, count: u64) -> impl Iterator<Item = &LogLine> {
        let dropped = self.line_count - self.lines.len() as u64;
        self.lines.iter().skip(usize::try_from(count.saturating_sub(dropped)).unwrap_or(usize::MAX))
    }

    fn notes(&self) -> IndexMap<&str, &'static str> {
        let names = self.history.names().chain(self.warmup_history.names());
        names.filter_map(|name| Some((name, declared(name)?.sentence))).collect()
    }

    fn head(&self) -> Head<'_> {
        let headline = Headline::new(&self.history);
        let ended = self.about.ended();
        let folder = self.dir.path().file_name().map(|name| name.to_string_lossy().into_owned());
        Head {
            name: folder.or_else(|| self.about.name().map(str::to_owned)).unwrap_or_default(),
            path: self.dir.path().display().to_string(),
            description: self.about.description(),
            state: self.state,
            reason: ended.filter(|_| self.state != State::Finished).map(|line| line.text.as_str()),
            step: self.history.steps().map(|(_, last)| last),
            steps: self.about.steps(),
            warmup: self.warmup_position(),
            left_s: self.left_s(&headline),
            newest: newest(&headline),
            tiles: tiles(&headline),
            advice: &self.advice,
        }
    }

    fn warmup_position(&self) -> Option<(u64, u64)> {
        let done = self.warmup_history.steps().filter(|_| self.history.steps().is_none())?.1;
        Some((done, self.about.warmup_steps()?))
    }

    /// Seconds for the steps that are left, at the mean speed of those that were made.
    fn left_s(&self, headline: &Headline) -> Option<f64> {
        let timed = self.history.get("time/step_s").filter(|curve| curve.count() > 0)?;
        let left = self.about.steps()?.saturating_sub(headline.step);
        Some(headline.time_s? / timed.count() as f64 * left as f64).filter(|_| self.state == State::Running)
    }
}

impl<'a> Curves<'a> {
    /// Points since the stretch `known`, which moves to the last one.
    fn since(history: &'a History, known: &mut Stretches) -> Curves<'a> {
        let width = history.width();
        // The last stretch may have grown since.
        let from = if width == known.width { known.number } else { 0 };
        let curves = history.names().filter_map(|name| {
            let points = Points::new(history.get(name)?, from, width);
            (!points.at.is_empty()).then_some((name, points))
        });
        *known = Stretches { width, number: history.steps().map_or(0, |(_, last)| last / width) };
        Curves { width, from, of: curves.collect() }
    }
}

impl Points {
    fn new(curve: &Curve, from: u64, width: u64) -> Points {
        let stretches = curve.since(from);
        let of = |value: fn(&Stretch) -> f64| stretches.iter().map(move |it| rounded(value(it)));
        let extremes = |value| if width > 1 { of(value).collect() } else { Vec::new() };
        Points {
            at: stretches.iter().map(|it| it.number).collect(),
            mean: of(|it| it.mean()).collect(),
            low: extremes(|it| it.low),
            high: extremes(|it| it.high),
        }
    }
}

/// The value with six digits, which a chart cannot tell from more.
fn rounded(value: f64) -> f64 {
    format!("{value:.5e}").parse().unwrap_or(value)
}

/// The first result with its newest value.
fn newest(headline: &Headline) -> Option<String> {
    let known = |comparison: &&Comparison| comparison.before.is_some();
    let preferred = headline.comparisons.iter().find(|it| it.name == "pass@1" && it.before.is_some());
    let found = preferred.or_else(|| headline.comparisons.iter().find(known))?;
    Some(format!("{} {}", found.name, format::score(found.after.or(found.before)?)))
}

fn tiles(headline: &Headline) -> Vec<Tile> {
    let plain =
        |name: &str, value, detail| Tile { name: name.into(), value, change: None, direction: "", detail };
    let time = headline
        .time_s
        .map(|time_s| plain("time", format::duration(time_s), format!("for {} steps", headline.step)));
    let speed =
        headline.speed.map(|(speed, unit)| plain(unit, format::count(speed), "while training".into()));
    let comparisons = headline.comparisons.iter().filter_map(comparison_tile);
    comparisons.chain(time).chain(speed).collect()
}

fn comparison_tile(&Comparison { name, before, after, steps }: &Comparison) -> Option<Tile> {
    let before = before?;
    let full_name = steps.map_or_else(|| name.to_owned(), |steps| format!("{name}, {steps}-step mean"));
    let tile = |value, change, direction, detail| {
        Some(Tile { name: full_name.clone(), value: format::score(value), change, direction, detail })
    };
    let Some(after) = after else { return tile(before, None, "", "before training".into()) };
    let change = after - before;
    let direction = match name {
        // Neither is better: a policy that learns moves away from where it began.
        DRIFT => "",
        _ if change == 0.0 => "",
        LOSS | TRAINING_LOSS => {
            if change < 0.0 {
                "up"
            } else {
                "down"
            }
        }
        _ => {
            if change > 0.0 {
                "up"
            } else {
                "down"
            }
        }
    };
    tile(after, Some(format!("{change:+.3}")), direction, format!("from {}", format::score(before)))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_what_is_better_is_green() {
        let check = |name, before, after, expected| {
            let comparison = Comparison { name, before: Some(before), after: Some(after), steps: None };
            assert_eq!(comparison_tile(&comparison).unwrap().direction, expected, "{name}");
        };
        check("pass@1", 0.1, 0.9, "up");
        check("pass@1", 0.9, 0.1, "down");
        check("pass@1", 0.5, 0.5, "");
        check(LOSS, 2.0, 1.0, "up");
        check(TRAINING_LOSS, 1.0, 2.0, "down");
        check(DRIFT, 0.0, 0.3, "");
    }

    #[test]
    fn six_digits_are_kept() {
        let check = |value: f64, expected: f64| assert_eq!(rounded(value), expected);
        check(0.123_456_789, 0.123_457);
        check(-1.0, -1.0);
        check(1.234_567_89e-12, 1.234_57e-12);
        assert!(rounded(f64::NAN).is_nan());
    }
}

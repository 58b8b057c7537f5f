//! Terminal output of a run: a progress bar while it runs, a table at the end.
//!
//! The bar goes to standard error. If that is not a terminal (a log file, CI, a batch system), a plain line
//! is written every few seconds instead.

use std::io::{self, Write as _};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

use indicatif::{MultiProgress, ProgressBar, ProgressFinish, ProgressStyle};

use crate::format;
use crate::headline::{Comparison, Headline, SPEEDS, TRAINING_LOSS};
use crate::metrics::Metrics;
use crate::run_dir::RunDir;
use crate::run_log::{LogKind, RunLog};

/// The least time between two plain lines.
const PLAIN_INTERVAL: Duration = Duration::from_secs(5);

/// Standard error, shared by all writers while a progress bar may be at its bottom. Clones are the same
/// screen. It is an [`io::Write`] for a tracing subscriber. A run's log gets all that is written to it.
#[derive(Debug, Clone, Default)]
pub struct Screen {
    bars: MultiProgress,
    log: Arc<Mutex<Option<RunLog>>>,
}

impl Screen {
    /// Writes all further lines to `log`, too.
    pub fn keep_in(&self, log: RunLog) {
        *self.log.lock().unwrap_or_else(PoisonError::into_inner) = Some(log);
    }

    /// Writes a line to the log alone.
    pub fn record(&self, kind: LogKind, line: &str) {
        if let Some(log) = &mut *self.log.lock().unwrap_or_else(PoisonError::into_inner) {
            // A full disk also fails the next write of the metrics, which ends the run.
            let _ = log.append(kind, line);
        }
    }

    fn show(&self, bytes: &[u8]) -> io::Result<()> {
        self.bars.suspend(|| io::stderr().write_all(bytes))
    }
}

impl io::Write for Screen {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        self.record(LogKind::Line, &String::from_utf8_lossy(bytes));
        self.show(bytes).map(|()| bytes.len())
    }

    fn flush(&mut self) -> io::Result<()> {
        io::stderr().flush()
    }
}

/// The part of a step's metrics that is shown.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct StepSummary {
    /// Mean reward of the samples, or the loss if there are no rewards, with its name.
    pub learning: (&'static str, f64),
    /// Value of the evaluation after the step, if there was one, with its name.
    pub held_out: Option<(&'static str, f64)>,
    /// Rate, with its unit.
    pub speed: (f64, &'static str),
}

impl StepSummary {
    /// Selects the shown values from a step's metrics; `None` if it was not a training step.
    pub fn of(metrics: &Metrics) -> Option<StepSummary> {
        let first = |names: &[(&str, &'static str)]| {
            names.iter().find_map(|(metric, name)| Some((*name, metrics.get(metric)?)))
        };
        let (unit, speed) = first(&SPEEDS)?;
        let learning = first(&[("reward/mean", "reward"), ("loss", "loss")])?;
        let held_out =
            first(&[("eval/pass@1", "pass@1"), ("eval/reward", "held-out"), ("eval/loss", "held-out")]);
        Some(StepSummary { learning, held_out, speed: (speed, unit) })
    }
}

/// The progress bar of a run. When it is dropped, the bar stays on screen.
#[derive(Debug)]
pub struct Progress {
    screen: Screen,
    bar: ProgressBar,
    steps: u64,
    /// The first step shown and its time, from which the mean speed is computed.
    first: Option<(u64, Instant)>,
    /// Value of the last evaluation; most steps have no evaluation.
    held_out: Option<(&'static str, f64)>,
    last_line: Option<Instant>,
}

impl Progress {
    /// Shows that `start_step` of `steps` steps are done.
    pub fn new(screen: &Screen, steps: u64, start_step: u64) -> Progress {
        let template = "step {pos}/{len} {bar:10.cyan/black.bright} {wide_msg}";
        let style = ProgressStyle::with_template(template).expect("the template is well formed");
        let bar = ProgressBar::new(steps)
            .with_position(start_step)
            .with_style(style.progress_chars("━╸━"))
            .with_finish(ProgressFinish::Abandon);
        let bar = screen.bars.add(bar);
        bar.tick();
        Progress { screen: screen.clone(), bar, steps, first: None, held_out: None, last_line: None }
    }

    /// Shows that `step` steps are done, with the values of the last one.
    pub fn update(&mut self, step: u64, shown: StepSummary) {
        self.held_out = shown.held_out.or(self.held_out);
        let (first, since) = *self.first.get_or_insert_with(|| (step, Instant::now()));
        let left_s = time_left_s(since.elapsed(), step - first, self.steps.saturating_sub(step));
        let message = message(StepSummary { held_out: self.held_out, ..shown }, left_s);
        if self.screen.bars.is_hidden() {
            self.plain_line(step, &message);
        } else {
            self.bar.set_message(message);
            self.bar.set_position(step);
        }
    }

    /// Writes a line to standard error, above the bar.
    pub fn println(&self, line: &str) {
        // A failure to write to standard error cannot be reported anywhere.
        let _ = self.screen.clone().write_all(format!("{line}\n").as_bytes());
    }

    /// Writes a line to standard error, which tells the log how the run ended.
    pub fn end(&self, kind: LogKind, line: &str) {
        let _ = self.screen.show(format!("{line}\n").as_bytes());
        self.screen.record(kind, line);
    }

    fn plain_line(&mut self, step: u64, message: &str) {
        let due = self.last_line.is_none_or(|last| last.elapsed() >= PLAIN_INTERVAL);
        if due || step == self.steps {
            self.last_line = Some(Instant::now());
            // Not for the log: the metrics have it.
            let _ = self.screen.show(format!("step {step}/{}  {message}\n", self.steps).as_bytes());
        }
    }
}

/// Results of a run and the paths of its files, as lines for a terminal.
pub fn summary_table(headline: &Headline, run: &RunDir) -> String {
    let mut lines = vec![format!("{:<10}{:>8}{:>9}{:>10}", "", "before", "after", "change")];
    lines.extend(headline.comparisons.iter().map(comparison_line));
    for &Comparison { name, steps, .. } in &headline.comparisons {
        let what = if name == TRAINING_LOSS { "records" } else { "prompts" };
        lines.extend(steps.map(|steps| {
            let plural = if steps == 1 { "" } else { "s" };
            format!("{:<10}{name}: training {what}, mean of {steps} step{plural}", "")
        }));
    }
    lines.push(String::new());
    let mut fact = |name: &str, value: String| lines.push(format!("{name:<10}{value}"));
    let time = headline.time_s.map(|time_s| format!(" in {}", format::duration(time_s)));
    let speed = headline.speed.map(|(speed, unit)| format!(", {} {unit}", format::count(speed)));
    fact("steps", format!("{}{}{}", headline.step, time.unwrap_or_default(), speed.unwrap_or_default()));
    fact("run", run.path().display().to_string());
    fact("report", format!("{}  (opens in any browser)", run.report().display()));
    fact("curves", format!("tensorboard --logdir {}", run.tensorboard().display()));
    lines.iter().map(|line| format!("  {line}").trim_end().to_owned() + "\n").collect()
}

fn comparison_line(&Comparison { name, before, after, .. }: &Comparison) -> String {
    let or_dash = |value: Option<String>| value.unwrap_or_else(|| "-".to_owned());
    let change = before.zip(after).map(|(before, after)| format!("{:+.3}", after - before));
    let [before, after] = [before, after].map(|value| or_dash(value.map(format::score)));
    format!("{name:<10}{before:>8}{after:>9}{:>10}", or_dash(change))
}

/// Seconds for `left` steps at the mean speed of the `done` ones, which took `elapsed`; `None` if none is
/// done.
fn time_left_s(elapsed: Duration, done: u64, left: u64) -> Option<f64> {
    (done > 0).then(|| elapsed.as_secs_f64() / done as f64 * left as f64)
}

fn message(
    StepSummary { learning, held_out, speed: (speed, unit) }: StepSummary,
    left_s: Option<f64>,
) -> String {
    let (name, value) = learning;
    let mut parts = vec![format!("{name} {}", format::score(value))];
    parts.extend(held_out.map(|(name, value)| format!("{name} {}", format::score(value))));
    parts.push(format!("{} {unit}", format::count(speed)));
    parts.extend(left_s.map(|seconds| format!("{} left", format::clock(seconds))));
    parts.join("  ")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_message_has_what_is_known() {
        let check = |pairs: &[(&str, f64)], left_s, expected: &str| {
            let mut metrics = Metrics::new();
            pairs.iter().for_each(|&(name, value)| metrics.insert(name, value));
            let found = StepSummary::of(&metrics).map(|shown| message(shown, left_s));
            assert_eq!(found.unwrap_or_default(), expected);
        };
        let (reward, tokens) = (("reward/mean", 0.41249), ("perf/tokens_per_s", 12_345.0));
        check(&[reward, tokens], None, "reward 0.412  12.3k tokens/s");
        let expected = "reward 0.412  pass@1 0.388  12.3k tokens/s  0:31 left";
        check(&[reward, tokens, ("eval/pass@1", 0.388)], Some(31.2), expected);
        let images = [reward, ("perf/images_per_s", 99.0), ("eval/reward", 0.5)];
        check(&images, None, "reward 0.412  held-out 0.500  99 images/s");
        let texts = [("loss", 0.5), ("reward/margin", 2.0), tokens, ("eval/loss", 0.6)];
        check(&texts, None, "loss 0.500  held-out 0.600  12.3k tokens/s");
        check(&[("eval/reward", 0.5)], None, "");
    }

    #[test]
    fn time_left_is_judged_by_the_steps_of_this_start() {
        let check = |done, left, expected| {
            assert_eq!(time_left_s(Duration::from_secs(10), done, left), expected);
        };
        check(0, 200, None);
        check(5, 20, Some(40.0));
        check(5, 0, Some(0.0));
    }

    #[test]
    fn the_table_is_aligned_and_says_where_the_files_are() {
        let folder = tempfile::tempdir().unwrap();
        let run = RunDir::create(&folder.path().join("sort-1"), "", "").unwrap();
        let comparison = |name, before, after| Comparison { name, before, after, steps: None };
        let headline = Headline {
            comparisons: vec![
                comparison("greedy", Some(0.634), Some(0.936)),
                comparison("pass@1", Some(0.071), Some(0.05)),
                comparison("pass@4", None, None),
                Comparison { steps: Some(4), ..comparison("reward", Some(-12.5), Some(0.861)) },
            ],
            step: 200,
            time_s: Some(45.4),
            speed: Some((12_345.0, "tokens/s")),
        };
        let table = summary_table(&headline, &run).replace(folder.path().to_str().unwrap(), "runs");
        let expected = "              \
              before    after    change
  greedy       0.634    0.936    +0.302
  pass@1       0.071    0.050    -0.021
  pass@4           -        -         -
  reward     -12.500    0.861   +13.361
            reward: training prompts, mean of 4 steps

  steps     200 in 45 s, 12.3k tokens/s
  run       runs/sort-1
  report    runs/sort-1/report.html  (opens in any browser)
  curves    tensorboard --logdir runs/sort-1/tensorboard
";
        assert_eq!(table.lines().collect::<Vec<_>>(), expected.lines().collect::<Vec<_>>());
    }
}

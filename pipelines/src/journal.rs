//! Output of rank 0 while a run is in progress: the run folder's files and the terminal.

use std::{
    fs,
    time::{Duration, Instant},
};

use anyroll_config::MetricsConfig;

use crate::{
    Error, Result,
    advice::{Advice, AdviceLog, Recent},
    atomic_file::write_atomic,
    headline::Headline,
    json_lines,
    metrics::{History, Metrics, MetricsLog, Record},
    output_error::OutputError,
    picture::Picture,
    progress::{Progress, Screen, StepSummary, summary_table},
    prometheus::Prometheus,
    report::write_report,
    run_dir::RunDir,
    run_log::{LogKind, RunLog},
    sample_text,
    samples::{Phase, Sample, SamplesLog},
    tensorboard::EventWriter,
    trackers::{State, Trackers},
};

/// Writer of the run folder's files and the terminal.
pub struct Journal {
    dir: RunDir,
    metrics: MetricsLog,
    /// Steps of the warm-up, once there is one.
    warmup: Option<MetricsLog>,
    samples: SamplesLog,
    advice: AdviceLog,
    recent: Recent,
    board: EventWriter,
    prometheus: Option<Prometheus>,
    trackers: Option<Trackers>,
    progress: Progress,
    name: String,
    /// Earliest time of the next report between steps.
    next_report: Instant,
    /// Earliest time of the next completion on the terminal; `None` to print none.
    next_shown: Option<Instant>,
}

/// Least time between two completions on the terminal.
const SHOW_INTERVAL: Duration = Duration::from_secs(20);

/// Part of a run's time that reports between steps may take: each reads all metrics and samples again.
const REPORTING: f64 = 0.02;

impl Journal {
    /// Creates the files of a new run, or continues those of a resumed one at `next_step`.
    pub fn new(
        dir: RunDir,
        screen: &Screen,
        name: &str,
        description: &str,
        steps: u64,
        next_step: Option<u64>,
    ) -> Result<Self> {
        let (metrics, samples, advice) = match next_step {
            Some(step) => (
                MetricsLog::resume(&dir.metrics(), step)?,
                SamplesLog::resume(&dir.samples(), step)?,
                AdviceLog::resume(&dir.advice(), step)?,
            ),
            None => (
                MetricsLog::create(&dir.metrics())?,
                SamplesLog::create(&dir.samples())?,
                AdviceLog::create(&dir.advice())?,
            ),
        };
        let mut recent = Recent::default();
        json_lines::each(&dir.metrics(), |record: Record| recent.push(record.step, &record.metrics))?;
        let first_step = next_step.unwrap_or(0);
        let mut board = EventWriter::create(&dir.tensorboard(), first_step)?;
        let config = dir.resolved();
        let config =
            fs::read_to_string(&config).map_err(|source| OutputError::io("read", &config, source))?;
        board.text(first_step, "config", &format!("```yaml\n{config}```"))?;
        screen.keep_in(RunLog::open(&dir.log())?);
        screen.record(LogKind::Start, description);
        let progress = Progress::new(screen, steps, first_step.saturating_sub(1));
        let name = name.to_owned();
        let next_report = Instant::now();
        Ok(Self {
            dir,
            metrics,
            warmup: None,
            samples,
            advice,
            recent,
            board,
            prometheus: None,
            trackers: None,
            progress,
            name,
            next_report,
            next_shown: None,
        })
    }

    /// Serves all further metrics to Prometheus, and starts the trackers.
    pub fn publish(&mut self, config: &MetricsConfig) -> Result<()> {
        if let Some(address) = config.prometheus.map(|listen| listen.0) {
            let started = Prometheus::start(address, &self.name);
            let started = started.map_err(|source| Error::Prometheus { address, source })?;
            self.say(&format!("metrics for Prometheus at http://{}/metrics", started.address()));
            self.prometheus = Some(started);
        }
        if config.has_trackers() {
            self.trackers = Some(Trackers::start(config, &self.dir, &self.name)?);
        }
        Ok(())
    }

    /// Lets the trackers send the rest, with a deadline, and tells which of them did not get everything.
    pub fn finish_trackers(&mut self, state: State) {
        let Some(mut trackers) = self.trackers.take() else { return };
        trackers.news().iter().for_each(|line| self.say(line));
        for line in trackers.finish(Some(state), |line| self.say(line)) {
            self.say(&format!("warning: {line}"));
        }
    }

    /// Prints a completion of training now and then.
    pub fn show_samples(&mut self) {
        self.next_shown = Some(Instant::now());
    }

    /// Records a step of the warm-up, numbered from 1.
    pub fn warm_up(&mut self, step: u64, loss: f64, learning_rate: f64) -> Result<()> {
        let log = match &mut self.warmup {
            Some(log) => log,
            none => none.insert(MetricsLog::open_at(&self.dir.warmup(), step)?),
        };
        let mut metrics = Metrics::new();
        metrics.insert("warmup/loss", loss);
        metrics.insert("warmup/learning_rate", learning_rate);
        Ok(log.append(step, &metrics)?)
    }

    /// Records a step: its metrics, its samples, and those of an evaluation after it.
    pub fn record(&mut self, step: u64, metrics: &Metrics, samples: &[Sample]) -> Result<()> {
        // Samples come first: a tracker that finds the metrics of a step finds all of its samples.
        for sample in samples {
            self.samples.append(sample)?;
        }
        self.metrics.append(step, metrics)?;
        self.board.scalars(step, metrics)?;
        let of_training = samples.iter().take_while(|sample| sample.phase == Phase::Train).count();
        self.samples_of_training(step, &samples[..of_training])?;
        if let Some(prometheus) = &mut self.prometheus {
            prometheus.show(step, metrics);
        }
        self.recent.push(step, metrics);
        for Advice { text, .. } in self.advice.news(&self.recent)? {
            self.say(&format!("advice at step {step}: {text}"));
        }
        let news = self.trackers.as_mut().map(Trackers::news).unwrap_or_default();
        news.iter().for_each(|line| self.say(line));
        if let Some(shown) = StepSummary::of(metrics) {
            self.progress.update(step, shown);
        }
        Ok(())
    }

    fn samples_of_training(&mut self, step: u64, samples: &[Sample]) -> Result<()> {
        if samples.is_empty() {
            return Ok(());
        }
        self.board.text(step, "samples/training", &sample_text::markdown(samples))?;
        let now = Instant::now();
        let best = sample_text::best_and_worst(&samples.iter().collect::<Vec<_>>());
        if let Some([best, _]) = best.filter(|_| self.next_shown.is_some_and(|next| next <= now)) {
            self.next_shown = Some(now + SHOW_INTERVAL);
            self.say(&sample_text::lines(best));
        }
        Ok(())
    }

    /// Writes the images of the evaluation after a step.
    pub fn picture(&mut self, step: u64, picture: &Picture) -> Result<()> {
        let (png, folder) = (picture.png(), self.dir.pictures());
        std::fs::create_dir_all(&folder).map_err(|source| OutputError::io("create", &folder, source))?;
        write_atomic(&self.dir.picture(step), &png)?;
        Ok(self.board.image(step, "eval/images", (picture.width, picture.height, picture.channels), &png)?)
    }

    /// Flushes all records to disk, so that a checkpoint never gets ahead of them.
    pub fn sync(&self) -> Result<()> {
        self.metrics.sync()?;
        self.samples.sync()?;
        Ok(self.advice.sync()?)
    }

    /// Rewrites `report.html`, unless reports have taken more than 2 % of the time since the last one.
    pub fn report_between_steps(&mut self) -> Result<()> {
        let start = Instant::now();
        if start >= self.next_report {
            self.report()?;
            self.next_report = start + pause_after(start.elapsed());
        }
        Ok(())
    }

    /// Rewrites `report.html`.
    pub fn report(&self) -> Result<()> {
        Ok(write_report(&self.dir)?)
    }

    /// Prints a line above the progress bar.
    pub fn say(&self, line: &str) {
        self.progress.println(line);
    }

    /// Prints the last line above the progress bar, and logs how the run ended.
    pub fn end(&self, kind: LogKind, line: &str) {
        self.progress.end(kind, line);
    }

    /// The table of results at the end.
    pub fn summary(&self) -> Result<String> {
        Ok(summary_table(&Headline::new(&History::read(&self.dir.metrics())?), &self.dir))
    }
}

/// Time from one report to the next, for one that took `took`.
fn pause_after(took: Duration) -> Duration {
    took.div_f64(REPORTING)
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Takes its times from a run of 20,000 quick steps, whose reports took more than half of its time.
    #[test]
    fn reports_take_a_bounded_part_of_a_run() {
        let (mut now, mut reporting) = (Duration::ZERO, Duration::ZERO);
        let mut next = Duration::ZERO;
        for step in 0..200_000 {
            now += Duration::from_millis(25);
            if step % 25 == 0 && now >= next {
                // It grows with the steps.
                let took = Duration::from_micros(20 * step);
                next = now + pause_after(took);
                now += took;
                reporting += took;
            }
        }
        assert!(reporting.as_secs_f64() < 0.021 * now.as_secs_f64(), "{reporting:?} of {now:?}");
    }
}

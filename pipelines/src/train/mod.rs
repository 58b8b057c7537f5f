//! The loop, for every pipeline: warm-up, evaluation, then steps, with an evaluation and a checkpoint every so often.
//!
//! A [`Pipeline`] says what a step is, how it is measured and what a checkpoint holds; the loop says when, keeps the
//! run's place, writes its folder and ends when it is asked to. [`Exchange`] and [`Share`] are what pipelines have in
//! common, [`Place`] where they run, `role` how a model is held there and [`Reference`] one that stays as it was.

mod exchange;
mod learner;
mod pipeline;
mod place;
mod reduce;
mod reference;
mod role;
mod seed;
mod share;

use std::{
    net::SocketAddr,
    path::{Path, PathBuf},
    sync::atomic::{AtomicBool, Ordering},
    time::Instant,
};

use anyroll_strategy::checkpoint::{self, Saver, Stamp};
use serde::{Deserialize, Serialize};

pub use exchange::Exchange;
pub use learner::{Learner, MiniBatch, Schedule, Stepped, Update};
pub use pipeline::{Evaluation, Kept, Nothing, Pipeline, Plan, StepOutcome};
pub use place::Place;
#[cfg(test)]
pub use place::tests::ranks;
pub use place::{open_device, torch_device};
pub use reduce::Reduce;
pub use reduce::operations;
pub(crate) use reduce::{device_sums, reduced};
pub use reference::Reference;
pub use role::{adamw, allocated_bytes, describe, hold, learning_rate, offloaded, zero_config};
pub use seed::{Purpose, sample_seed, turn_seed};
pub use share::Share;

use crate::{
    Error, Result,
    journal::Journal,
    metrics::{Metrics, read_metrics},
    progress::Screen,
    run_dir::RunDir,
    samples::Phase,
};

/// How a run ended that did not fail.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Ended {
    /// All steps are done.
    Finished,
    /// Somebody asked for the end; a checkpoint has what was done.
    Interrupted,
}

/// What a rank is asked to do with a pipeline.
pub struct Job<'a> {
    /// The run's name.
    pub name: &'a str,
    /// Tells its data from others, if it reads any: [`anyroll_data::Dataset::digest`].
    pub data: Option<String>,
    /// Number of a new run, which its checkpoints contain; the same on all ranks.
    pub number: u32,
    /// The run folder, on rank 0, which alone writes into it but for checkpoints.
    pub dir: Option<RunDir>,
    /// Its path, as this rank calls it.
    pub folder: PathBuf,
    /// Whether to go on from the folder's last checkpoint.
    pub resume: bool,
    /// Where rank 0 shows the metrics to Prometheus, if anywhere.
    pub prometheus: Option<SocketAddr>,
}

/// Where a run stands, as a checkpoint keeps it. Data, seeds and schedules are functions of the step.
#[derive(Clone, Debug, Default, Serialize, Deserialize)]
struct Position<S> {
    /// Steps of the warm-up that are done.
    warmup_steps: u64,
    /// RL steps that are done.
    steps: u64,
    /// The best evaluation so far, if its policy is kept.
    #[serde(default)]
    best: Option<f64>,
    /// Tells the data from others: which records a step has follows from all of them.
    #[serde(default)]
    data: Option<String>,
    /// What the pipeline carries from one step to the next.
    #[serde(flatten)]
    carried: S,
}

impl<S> Position<S> {
    /// The first step whose record is still to be written: in the warm-up not even that of step 0 is.
    fn next_record(&self) -> u64 {
        if self.steps == 0 { 0 } else { self.steps + 1 }
    }
}

/// Trains on this rank. `stop` may be set at any time: the run then ends after its current step, with a checkpoint.
pub fn train<P: Pipeline>(
    pipeline: P,
    exchange: Exchange,
    job: Job,
    screen: &Screen,
    stop: &AtomicBool,
) -> Result<Ended> {
    let mut training = Training::start(pipeline, exchange, job, screen)?;
    let mut ended = training.warm_up(stop)?;
    if ended == Ended::Finished {
        if training.position.steps == 0 {
            training.begin()?;
        }
        ended = training.steps(stop)?;
    }
    training.finish_save()?;
    if ended == Ended::Finished {
        training.pipeline.check_divergence()?;
    }
    training.tell(ended)?;
    Ok(ended)
}

struct Training<P: Pipeline> {
    pipeline: P,
    plan: Plan,
    exchange: Exchange,
    position: Position<P::Carried>,
    folder: PathBuf,
    /// On rank 0.
    journal: Option<Journal>,
    /// Writes checkpoints beside the steps.
    saver: Saver,
    /// Of the last warm-up step of this process.
    warmup_loss: Option<f64>,
}

impl<P: Pipeline> Training<P> {
    fn start(mut pipeline: P, exchange: Exchange, job: Job, screen: &Screen) -> Result<Self> {
        let Job { name, data, number, dir, folder, resume, prometheus } = job;
        let plan = pipeline.plan();
        let saved = if resume { checkpoint::list(&folder.join(CHECKPOINTS))? } else { Vec::new() };
        let (mut position, stamp) = match saved.split_last() {
            Some((last, _)) => {
                load(&mut pipeline, &plan, last, data.as_deref()).map_err(|error| or_older(error, &saved))?
            }
            None => (Position::default(), None),
        };
        position.data = data;
        if let (true, true, Some(dir)) = (resume, saved.is_empty(), &dir) {
            begins_anew(dir, plan.save_every)?;
        }
        let description = pipeline.description();
        let next_step = resume.then(|| position.next_record());
        let mut journal = dir
            .map(|dir| Journal::new(dir, screen, name, &description, plan.steps, next_step))
            .transpose()?;
        if let (Some(journal), Some(address)) = (&mut journal, prometheus) {
            journal.publish(address)?;
        }
        let saver = Saver::of_run(stamp.map_or(number, |stamp| stamp.run));
        let mut training =
            Self { pipeline, plan, exchange, position, folder, journal, saver, warmup_loss: None };
        training.say(&format!("{description}; everything lands in {}", training.folder.display()));
        if training.position.steps > 0 {
            training.freeze(true)?;
        }
        Ok(training)
    }

    /// The rest of the supervised warm-up, then a new optimizer.
    fn warm_up(&mut self, stop: &AtomicBool) -> Result<Ended> {
        let steps = self.plan.warmup_steps;
        if self.position.warmup_steps >= steps {
            return Ok(Ended::Finished);
        }
        self.say(&format!("warm-up: {steps} supervised steps"));
        while self.position.warmup_steps < steps {
            let step = self.position.warmup_steps;
            self.warmup_loss = Some(self.pipeline.warmup_step(&self.exchange, step)?);
            self.position.warmup_steps += 1;
            // Every tenth step, since asking all ranks takes about as long as a step.
            let asks = self.position.warmup_steps.is_multiple_of(10) && self.position.warmup_steps < steps;
            if asks && self.anyone_stops(stop)? {
                self.save()?;
                return Ok(Ended::Interrupted);
            }
        }
        self.pipeline.check_divergence()?;
        self.pipeline.end_warm_up()?;
        Ok(Ended::Finished)
    }

    /// What comes once, between warm-up and RL.
    fn begin(&mut self) -> Result<()> {
        self.freeze(false)?;
        let mut metrics = Metrics::new();
        if let Some(loss) = self.warmup_loss {
            metrics.insert("warmup/loss", loss);
        }
        match (self.plan.evaluate_every, self.warmup_loss) {
            (Some(_), _) => self.evaluate_and_record(0, metrics, Phase::Before),
            (None, Some(_)) => self.record(0, &metrics),
            (None, None) => Ok(()),
        }
    }

    fn steps(&mut self, stop: &AtomicBool) -> Result<Ended> {
        while self.position.steps < self.plan.steps {
            let wish = stop.load(Ordering::Relaxed);
            let Position { steps, carried, .. } = &mut self.position;
            let outcome = self.pipeline.step(&self.exchange, *steps, carried, wish)?;
            *steps += 1;
            let (step, metrics) = (*steps, outcome.metrics);
            if self.saver.poll(self.exchange.group())? {
                self.prune()?;
            }
            let is_last = step == self.plan.steps;
            let every = self.plan.evaluate_every;
            if every.is_some_and(|every| is_last || step.is_multiple_of(every)) {
                let phase = if is_last { Phase::After } else { Phase::Eval };
                self.evaluate_and_record(step, metrics, phase)?;
            } else {
                self.record(step, &metrics)?;
            }
            let stops = outcome.stop && !is_last;
            if is_last || stops || step.is_multiple_of(self.plan.save_every) {
                self.save()?;
            }
            if stops {
                return Ok(Ended::Interrupted);
            }
        }
        Ok(Ended::Finished)
    }

    fn freeze(&mut self, is_saved: bool) -> Result<()> {
        let run = self.saver.stamp().run;
        self.pipeline.freeze(Kept { folder: &self.folder, run, is_saved })
    }

    fn evaluate_and_record(&mut self, step: u64, mut metrics: Metrics, phase: Phase) -> Result<()> {
        let started = Instant::now();
        let evaluation = self.pipeline.evaluate(&self.exchange, step, phase)?;
        metrics.insert("time/eval_s", started.elapsed().as_secs_f64());
        self.keep_best(&evaluation.metrics)?;
        metrics.merge(evaluation.metrics);
        if let Some(journal) = &mut self.journal {
            journal.record(step, &metrics, &evaluation.samples)?;
            if let Some(picture) = &evaluation.picture {
                journal.picture(step, picture)?;
            }
            journal.say(&format!("step {step}: {}", evaluation.summary));
            journal.report()?;
        }
        Ok(())
    }

    fn record(&mut self, step: u64, metrics: &Metrics) -> Result<()> {
        self.journal.as_mut().map_or(Ok(()), |journal| journal.record(step, metrics, &[]))
    }

    /// Starts a checkpoint; [`Self::finish_save`], or a later step, completes it.
    fn save(&mut self) -> Result<()> {
        if let Some(journal) = &self.journal {
            journal.sync()?;
            // Otherwise evaluations write it.
            if self.plan.evaluate_every.is_none() && self.position.steps > 0 {
                journal.report()?;
            }
        }
        let path = self.folder.join(CHECKPOINTS).join(format!("step_{:06}", self.position.steps));
        let position = serde_json::to_value(&self.position).expect("plain numbers");
        self.pipeline.save(self.saver.at(self.position.steps), &path, position)
    }

    /// Waits for a checkpoint that is under way.
    fn finish_save(&mut self) -> Result<()> {
        self.saver.finish(self.exchange.group())?;
        self.prune()
    }

    fn prune(&self) -> Result<()> {
        if self.journal.is_some() {
            checkpoint::prune(&self.folder.join(CHECKPOINTS), self.plan.keep_last)?;
        }
        Ok(())
    }

    /// Writes a checkpoint beside the others if the policy is better than ever.
    fn keep_best(&mut self, metrics: &Metrics) -> Result<()> {
        let score = self.pipeline.best_by(metrics);
        let Some(score) = score.filter(|score| is_best(*score, self.position.best)) else { return Ok(()) };
        self.position.best = Some(score);
        let position = serde_json::to_value(&self.position).expect("plain numbers");
        self.pipeline.save(self.saver.at(self.position.steps), &self.folder.join(BEST), position)
    }

    /// The report, the table, and how to go on if there is more to do.
    fn tell(&self, ended: Ended) -> Result<()> {
        let Some(journal) = &self.journal else { return Ok(()) };
        if self.position.steps > 0 {
            journal.report()?;
            journal.say(&journal.summary()?);
        }
        if ended == Ended::Interrupted {
            let (folder, position) = (self.folder.display(), &self.position);
            let done = match position.steps {
                0 => format!("step {} of the warm-up", position.warmup_steps),
                steps => format!("step {steps}"),
            };
            journal.say(&format!("interrupted after {done}: go on with `anyroll run --resume {folder}`"));
        }
        Ok(())
    }

    fn anyone_stops(&self, stop: &AtomicBool) -> Result<bool> {
        self.exchange.any(stop.load(Ordering::Relaxed))
    }

    fn say(&self, line: &str) {
        if let Some(journal) = &self.journal {
            journal.say(line);
        }
    }
}

/// Whether a score is better than the best one so far. One that is not a number is none, and of equal ones the first is kept.
fn is_best(score: f64, best: Option<f64>) -> bool {
    score.is_finite() && best.is_none_or(|best| score > best)
}

const CHECKPOINTS: &str = "checkpoints";
const BEST: &str = "best";

/// A run that has ended before its first checkpoint begins anew. Its steps are made once more, and their records written
/// again; one with more of them than can be without a checkpoint has lost some.
fn begins_anew(dir: &RunDir, save_every: u64) -> Result<()> {
    let records = if dir.metrics().exists() { read_metrics(&dir.metrics())? } else { Vec::new() };
    // The first is written beside the steps that follow it.
    match records.last().is_some_and(|record| record.step >= 2 * save_every) {
        false => Ok(()),
        true => Err(Error::Resume {
            run: dir.path().to_owned(),
            problem: format!("{CHECKPOINTS}/ has no checkpoint; start anew with another --output"),
        }),
    }
}

/// Loads the checkpoint at `path` of a run on the same `data`. Returns its position, and its stamp if the format has
/// one.
fn load<P: Pipeline>(
    pipeline: &mut P,
    plan: &Plan,
    path: &Path,
    data: Option<&str>,
) -> Result<(Position<P::Carried>, Option<Stamp>)> {
    let refused = |problem: String| Error::Resume { run: path.to_owned(), problem };
    let position: Position<P::Carried> =
        serde_json::from_value(checkpoint::extra(path)?).map_err(|error| refused(error.to_string()))?;
    // One that was written before digests were has none.
    if position.data.is_some() && position.data.as_deref() != data {
        let problem = "its data have changed since, so that its steps would have other prompts: bring the files back as \
                       they were, or `anyroll export` the model and start a new run from it";
        return Err(refused(problem.to_owned()));
    }
    let Position { steps, warmup_steps, .. } = position;
    if steps > plan.steps {
        let problem =
            format!("{steps} steps are done, and `steps` is {}: write {steps} or above", plan.steps);
        return Err(refused(problem));
    }
    // It would come between the steps that are done and those that follow.
    if steps > 0 && warmup_steps < plan.warmup_steps {
        let now = plan.warmup_steps;
        let problem = format!(
            "it has {steps} steps behind a warm-up of {warmup_steps}, and `warmup.steps` is {now}: write {warmup_steps} again"
        );
        return Err(refused(problem));
    }
    if position.warmup_steps >= plan.warmup_steps {
        pipeline.end_warm_up()?;
    }
    pipeline.load(path)?;
    Ok((position, checkpoint::stamp(path)?))
}

/// Adds the newest complete checkpoint of `saved` to `error`, if a file of the last one is missing, damaged or of
/// another save.
pub fn or_older(error: Error, saved: &[PathBuf]) -> Error {
    let is_whole = |path: &PathBuf| checkpoint::verify(path).is_ok();
    match error {
        Error::Strategy(source) if source.is_of_a_file() => match saved.split_last() {
            Some((last, older))
                if source.is_in(last)
                    && let Some(whole) = older.iter().rposition(is_whole) =>
            {
                let (older, broken) = (saved[whole].clone(), saved[whole + 1..].to_vec());
                Error::LastCheckpoint { broken, older, source: source.into() }
            }
            _ => Error::Strategy(source),
        },
        error => error,
    }
}

#[cfg(test)]
mod tests {
    use super::is_best;

    #[test]
    fn the_best_is_a_number_and_the_first_of_equals() {
        let mut best = None;
        let mut kept = Vec::new();
        for score in [f64::NAN, f64::NEG_INFINITY, -3.0, -3.0, f64::NAN, -2.0, f64::INFINITY, -2.5, -1.0] {
            if is_best(score, best) {
                best = Some(score);
                kept.push(score);
            }
        }
        assert_eq!(kept, [-3.0, -2.0, -1.0]);
    }
}

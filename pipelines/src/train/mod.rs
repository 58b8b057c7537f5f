//! The training loop of every pipeline: warm-up, evaluation, then steps, with periodic evaluations and checkpoints.
//!
//! A [`Pipeline`] defines the step, its evaluation and the content of a checkpoint. The loop schedules these, keeps
//! the run's position, writes the run folder and ends on request. [`Exchange`] and [`Share`] are common to all
//! pipelines. [`Place`] is a role's device, `role` holds a model there, and [`Reference`] is a frozen model.

mod device_load;
mod exchange;
mod learner;
mod micro_batch;
mod mirror;
mod pipeline;
mod place;
mod reduce;
mod reference;
mod role;
mod router;
mod seed;
mod share;
mod timeline;

use std::{
    path::{Path, PathBuf},
    sync::{
        Arc,
        atomic::{AtomicBool, Ordering},
    },
    time::Instant,
};

use anyroll_backends::profile::span;
use anyroll_config::{MetricsConfig, error_chain::one_line};
pub use anyroll_strategy::checkpoint::Folders;
use anyroll_strategy::checkpoint::{self, Saver, Stamp};
use device_load::device_load;
use serde::{Deserialize, Serialize};

pub use exchange::Exchange;
pub use learner::{Learner, MiniBatch, Schedule, Stepped, Update};
pub use micro_batch::MicroBatch;
pub use mirror::{Mirror, fetch_records, newest};
pub use pipeline::{Evaluation, Kept, Nothing, Pipeline, Plan, StepOutcome, WarmupStep};
pub use place::Place;
#[cfg(test)]
pub use place::tests::ranks;
pub use place::{open_device, torch_device};
pub use reduce::Reduce;
pub use reduce::operations;
pub(crate) use reduce::{device_sums, reduced};
pub use reference::Reference;
pub use role::{adamw, allocated_bytes, describe, hold, learning_rate, offloaded, zero_config};
pub use router::RouterStats;
pub use seed::{Purpose, sample_seed, turn_seed};
pub use share::Share;
pub(crate) use share::chunks;
use timeline::Timeline;

use crate::{
    Error, Result,
    journal::Journal,
    json_lines, launch,
    metrics::{Metrics, Record},
    progress::Screen,
    run_dir::RunDir,
    run_log::LogKind,
    samples::{Phase, Sample},
    trackers::State,
};

/// Ending of a run that did not fail.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Ended {
    /// All steps are done.
    Finished,
    /// The run was interrupted; a checkpoint has its state.
    Interrupted,
}

/// Task of a rank with a pipeline.
pub struct Job<'a> {
    /// The run's name.
    pub name: &'a str,
    /// Digest of the run's data, if it reads any: [`anyroll_data::Dataset::digest`].
    pub data: Option<String>,
    /// Number of a new run, contained in its checkpoints; equal on all ranks.
    pub number: u32,
    /// The run folder, on rank 0, which alone writes into it, except for checkpoints.
    pub dir: Option<RunDir>,
    /// Path of the run folder on this rank.
    pub folder: PathBuf,
    /// Folders of the ranks.
    pub folders: Folders,
    /// Copies of the checkpoints in a store.
    pub mirror: Option<Mirror>,
    /// True to resume from the folder's last checkpoint.
    pub resume: bool,
    /// True to print a completion of training now and then.
    pub show: bool,
    /// Number of steps to record as a timeline; 0 for none.
    pub profile: u64,
    /// Publication of the metrics by rank 0 while the run continues.
    pub metrics: MetricsConfig,
}

/// Position of a run in its checkpoints. Data, seeds and schedules are functions of the step.
#[derive(Clone, Debug, Default, Serialize, Deserialize)]
struct Position<S> {
    /// Finished steps of the warm-up.
    warmup_steps: u64,
    /// Finished RL steps.
    steps: u64,
    /// Score of the best evaluation so far, if its policy is kept.
    #[serde(default)]
    best: Option<f64>,
    /// Digest of the data, since all of them determine the records of a step.
    #[serde(default)]
    data: Option<String>,
    /// State that the pipeline carries from one step to the next.
    #[serde(flatten)]
    carried: S,
}

impl<S> Position<S> {
    /// The first step without a record; during the warm-up that is step 0.
    fn next_record(&self) -> u64 {
        if self.steps == 0 { 0 } else { self.steps + 1 }
    }
}

/// Trains on this rank. `stop` may be set at any time: the run then ends after the current step, with a checkpoint. A
/// step whose completions are not scored soon is left out.
pub fn train<P: Pipeline>(
    mut pipeline: P,
    exchange: Exchange,
    job: Job,
    screen: &Screen,
    stop: &Arc<AtomicBool>,
) -> Result<Ended> {
    pipeline.stop_by(stop);
    let mut training = Training::start(pipeline, exchange, job, screen)?;
    let ended = training.run(stop);
    // The parent that started this rank reports the failure of the first rank that had one.
    if let (Err(error), false) = (&ended, launch::is_launched()) {
        screen.record(LogKind::Failed, &one_line(error));
    }
    ended
}

struct Training<P: Pipeline> {
    pipeline: P,
    plan: Plan,
    exchange: Exchange,
    position: Position<P::Carried>,
    folder: PathBuf,
    /// The journal, on rank 0.
    journal: Option<Journal>,
    /// Writes checkpoints during the steps.
    saver: Saver,
    /// The checkpoint that is being written, or was last.
    saving: Option<PathBuf>,
    /// Copies them to a store.
    mirror: Option<Mirror>,
    /// Records some steps, if that was asked for.
    timeline: Option<Timeline>,
    /// Loss of the last warm-up step of this process.
    warmup_loss: Option<f64>,
    /// Steps that were done when this process began.
    first_step: u64,
}

impl<P: Pipeline> Training<P> {
    fn start(mut pipeline: P, exchange: Exchange, job: Job, screen: &Screen) -> Result<Self> {
        let Job { name, data, number, dir, folder, folders, mut mirror, resume, show, profile, metrics } =
            job;
        let plan = pipeline.plan();
        let saved = if resume { saved(&folder, mirror.as_mut(), &exchange)? } else { Vec::new() };
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
        if let Some(journal) = &mut journal {
            journal.publish(&metrics)?;
        }
        if let Some(journal) = journal.as_mut().filter(|_| show) {
            journal.show_samples();
        }
        let saver = Saver::of_run(stamp.map_or(number, |stamp| stamp.run)).into_folders(folders);
        let (warmup_loss, first_step) = (None, position.steps);
        let steps = (first_step, plan.steps);
        let timeline = match exchange.group().stream().device().torch_device() {
            Some(device) => Timeline::new(profile, steps, device, &folder, exchange.rank()),
            None => None,
        };
        let mut training = Self {
            pipeline,
            plan,
            exchange,
            position,
            folder,
            journal,
            saver,
            saving: None,
            mirror,
            timeline,
            warmup_loss,
            first_step,
        };
        training.say(&format!("{description}; everything lands in {}", training.folder.display()));
        if profile > 0 && training.timeline.is_none() {
            training.say("no step is left to record as a timeline");
        }
        if training.position.steps > 0 {
            training.freeze(true)?;
        }
        Ok(training)
    }

    /// Trains from the present position to the end.
    fn run(&mut self, stop: &AtomicBool) -> Result<Ended> {
        let mut ended = self.warm_up(stop)?;
        if ended == Ended::Finished {
            if self.position.steps == 0 {
                ended = self.begin()?;
            }
            if ended == Ended::Finished {
                ended = self.steps(stop)?;
            }
        }
        self.finish_save()?;
        if ended == Ended::Finished {
            self.pipeline.check_divergence()?;
        }
        self.pipeline.end()?;
        self.tell(ended)?;
        Ok(ended)
    }

    /// Runs the rest of the supervised warm-up, then starts a new optimizer.
    fn warm_up(&mut self, stop: &AtomicBool) -> Result<Ended> {
        let steps = self.plan.warmup_steps;
        if self.position.warmup_steps >= steps {
            return Ok(Ended::Finished);
        }
        self.say(&format!("warm-up: {steps} supervised steps"));
        while self.position.warmup_steps < steps {
            let step = self.position.warmup_steps;
            let made = self.pipeline.warmup_step(&self.exchange, step)?;
            self.warmup_loss = Some(made.loss);
            self.position.warmup_steps += 1;
            if let Some(journal) = &mut self.journal {
                journal.warm_up(step + 1, made.loss, made.learning_rate)?;
            }
            // Only every tenth step asks, since asking all ranks takes about as long as a step.
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

    /// Freezes the models and evaluates, once between warm-up and RL.
    fn begin(&mut self) -> Result<Ended> {
        self.freeze(false)?;
        let mut metrics = Metrics::new();
        if let Some(loss) = self.warmup_loss {
            metrics.insert("warmup/loss", loss);
        }
        match (self.plan.evaluate_every, self.warmup_loss) {
            (Some(_), _) => self.evaluate_and_record(0, (metrics, Vec::new()), Phase::Before),
            (None, Some(_)) => self.record(0, &metrics, &[]).map(|()| Ended::Finished),
            (None, None) => Ok(Ended::Finished),
        }
    }

    fn steps(&mut self, stop: &AtomicBool) -> Result<Ended> {
        while self.position.steps < self.plan.steps {
            let wish = stop.load(Ordering::Relaxed);
            let Position { steps, carried, .. } = &mut self.position;
            self.timeline.as_mut().map_or(Ok(()), |timeline| timeline.before(*steps))?;
            let named = span(format_args!("step {}", *steps + 1));
            let outcome = match self.pipeline.step(&self.exchange, *steps, carried, wish) {
                Err(Error::Unscored) => return self.leave_out_step(),
                outcome => outcome?,
            };
            drop(named);
            *steps += 1;
            let (step, StepOutcome { mut metrics, samples, stop: asked }) = (*steps, outcome);
            self.end_timeline()?;
            metrics.merge(device_load(&self.exchange)?);
            self.poll_save()?;
            let is_last = step == self.plan.steps;
            let every = self.plan.evaluate_every;
            let mut evaluated = Ended::Finished;
            if every.is_some_and(|every| is_last || step.is_multiple_of(every)) {
                let phase = if is_last { Phase::After } else { Phase::Eval };
                evaluated = self.evaluate_and_record(step, (metrics, samples), phase)?;
            } else {
                self.record(step, &metrics, &samples)?;
            }
            let stops = asked && !is_last || evaluated == Ended::Interrupted;
            if is_last || stops || step.is_multiple_of(self.plan.save_every) {
                self.save()?;
            }
            if stops {
                return Ok(Ended::Interrupted);
            }
        }
        Ok(Ended::Finished)
    }

    /// Writes the timeline once its last step is done.
    fn end_timeline(&mut self) -> Result<()> {
        let Some(timeline) = &mut self.timeline else { return Ok(()) };
        let written = timeline.after(self.position.steps - 1)?.map(|path| path.display().to_string());
        if let Some(path) = written {
            self.say(&format!("the timeline of this rank's steps is {path}"));
        }
        Ok(())
    }

    /// Ends the run as it was before the current step, with a checkpoint if there is none of it.
    fn leave_out_step(&mut self) -> Result<Ended> {
        let steps = self.position.steps;
        self.say(&format!("step {}: left out, its completions are not scored yet", steps + 1));
        let is_saved = steps == self.first_step || steps.is_multiple_of(self.plan.save_every);
        if !is_saved && self.pipeline.is_unchanged_if_unscored() {
            self.save()?;
        }
        Ok(Ended::Interrupted)
    }

    fn freeze(&mut self, is_saved: bool) -> Result<()> {
        let save = self.saver.save();
        let (run, folders) = (save.stamp.run, save.folders);
        self.pipeline.freeze(Kept { folder: &self.folder, run, folders, is_saved })
    }

    /// Without the evaluation where completions are not scored before the run has to stop.
    fn evaluate_and_record(
        &mut self,
        step: u64,
        (mut metrics, mut samples): (Metrics, Vec<Sample>),
        phase: Phase,
    ) -> Result<Ended> {
        let started = Instant::now();
        let _named = span(format_args!("evaluation"));
        let evaluation = match self.pipeline.evaluate(&self.exchange, step, phase) {
            Err(Error::Unscored) => {
                self.say(&format!("step {step}: not evaluated, its completions are not scored yet"));
                self.record(step, &metrics, &samples)?;
                return Ok(Ended::Interrupted);
            }
            evaluation => evaluation?,
        };
        metrics.insert("time/eval_s", started.elapsed().as_secs_f64());
        self.keep_best(&evaluation.metrics)?;
        metrics.merge(evaluation.metrics);
        samples.extend(evaluation.samples);
        if let Some(journal) = &mut self.journal {
            journal.record(step, &metrics, &samples)?;
            if let Some(picture) = &evaluation.picture {
                journal.picture(step, picture)?;
            }
            journal.say(&format!("step {step}: {}", evaluation.summary));
            journal.report_between_steps()?;
        }
        Ok(Ended::Finished)
    }

    fn record(&mut self, step: u64, metrics: &Metrics, samples: &[Sample]) -> Result<()> {
        self.journal.as_mut().map_or(Ok(()), |journal| journal.record(step, metrics, samples))
    }

    /// Starts a checkpoint; [`Self::finish_save`], or a later step, completes it.
    fn save(&mut self) -> Result<()> {
        if let Some(journal) = &mut self.journal {
            journal.sync()?;
            // Otherwise evaluations write the report.
            if self.plan.evaluate_every.is_none() && self.position.steps > 0 {
                journal.report_between_steps()?;
            }
        }
        self.save_to(self.folder.join(CHECKPOINTS).join(format!("step_{:06}", self.position.steps)))
    }

    /// Starts a checkpoint in a folder, once the one before it is complete.
    fn save_to(&mut self, path: PathBuf) -> Result<()> {
        self.end_save()?;
        let position = serde_json::to_value(&self.position).expect("plain numbers");
        self.pipeline.save(self.saver.at(self.position.steps), &path, position)?;
        self.saving = Some(path);
        Ok(())
    }

    /// Completes the checkpoint in flight if it is written by now. Until a copy is over, the next checkpoint stays aside, as
    /// it may take the place of what is copied.
    fn poll_save(&mut self) -> Result<()> {
        if let Some(mirror) = &mut self.mirror {
            let failed = mirror.poll(&self.exchange)?;
            let is_busy = mirror.is_busy();
            self.warn(failed);
            if is_busy {
                return Ok(());
            }
        }
        if self.saver.poll(self.exchange.group())? { self.copy_save() } else { Ok(()) }
    }

    /// Waits for the checkpoint in flight, if there is one.
    fn end_save(&mut self) -> Result<()> {
        self.end_copy()?;
        if self.saver.finish(self.exchange.group())? { self.copy_save() } else { Ok(()) }
    }

    /// Waits for the last checkpoint and its copy.
    fn finish_save(&mut self) -> Result<()> {
        self.end_save()?;
        self.prune()?;
        self.end_copy()?;
        let failure = self.mirror.as_ref().and_then(Mirror::failure);
        failure.map_or(Ok(()), |problem| Err(Error::NotStored { problem: problem.to_owned() }))
    }

    fn end_copy(&mut self) -> Result<()> {
        let Some(mirror) = &mut self.mirror else { return Ok(()) };
        let failed = mirror.finish(&self.exchange)?;
        self.warn(failed);
        Ok(())
    }

    /// Starts to copy the checkpoint that has just been completed.
    fn copy_save(&mut self) -> Result<()> {
        if let Some((mirror, path)) = self.mirror.as_mut().zip(self.saving.take()) {
            mirror.start(&self.exchange, &path)?;
        }
        self.prune()
    }

    fn warn(&self, problem: Option<String>) {
        if let Some(problem) = problem {
            self.say(&format!("warning: {problem}"));
        }
    }

    fn prune(&self) -> Result<()> {
        if self.saver.save().folders.leads(self.exchange.rank()) {
            checkpoint::prune(&self.folder.join(CHECKPOINTS), self.plan.keep_last)?;
        }
        Ok(())
    }

    /// Writes a checkpoint to the folder of the best policy if the score is the best so far.
    fn keep_best(&mut self, metrics: &Metrics) -> Result<()> {
        let trains = self.plan.steps > 0;
        let score = self.pipeline.best_by(metrics).filter(|_| trains);
        let Some(score) = score.filter(|score| is_best(*score, self.position.best)) else { return Ok(()) };
        self.position.best = Some(score);
        self.save_to(self.folder.join(BEST))
    }

    /// Writes the report and prints the table; after an interruption, also prints the command to resume.
    fn tell(&mut self, ended: Ended) -> Result<()> {
        let Some(journal) = &mut self.journal else { return Ok(()) };
        let has_results = self.position.steps > 0 || self.plan.steps == 0;
        let summary = if has_results { journal.summary()? } else { String::new() };
        if ended == Ended::Finished {
            journal.end(LogKind::Finished, &summary);
        } else {
            if has_results {
                journal.say(&summary);
            }
            let (folder, position) = (self.folder.display(), &self.position);
            let done = match position.steps {
                0 => format!("step {} of the warm-up", position.warmup_steps),
                steps => format!("step {steps}"),
            };
            let text = format!("interrupted after {done}: go on with `anyroll run --resume {folder}`");
            journal.end(LogKind::Interrupted, &text);
        }
        if has_results {
            journal.report()?;
        }
        journal.finish_trackers(match ended {
            Ended::Finished => State::Finished,
            Ended::Interrupted => State::Interrupted,
        });
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

/// Returns true if a score is better than the best so far. Non-finite scores are ignored, and the first of equal
/// scores is kept.
fn is_best(score: f64, best: Option<f64>) -> bool {
    score.is_finite() && best.is_none_or(|best| score > best)
}

const CHECKPOINTS: &str = "checkpoints";
const BEST: &str = "best";

/// Checkpoints in the run's folder that the run may continue from, sorted. The last one is that of a store, if it has one
/// that is newer.
fn saved(folder: &Path, mirror: Option<&mut Mirror>, exchange: &Exchange) -> Result<Vec<PathBuf>> {
    let list = || checkpoint::list(&folder.join(CHECKPOINTS));
    let Some(mirror) = mirror else { return Ok(list()?) };
    let Some(newest) = mirror.restore(exchange)? else { return Ok(Vec::new()) };
    Ok(list()?.into_iter().filter(|path| *path <= newest).collect())
}

/// Restarts a run that ended before its first checkpoint: its steps are repeated, and their records rewritten.
/// Reports a run with more records than are possible without a checkpoint, since it has lost one.
fn begins_anew(dir: &RunDir, save_every: u64) -> Result<()> {
    let mut last = None;
    if dir.metrics().exists() {
        json_lines::each(&dir.metrics(), |record: Record| last = Some(record.step))?;
    }
    // The first checkpoint is in flight during the steps after it.
    match last.is_some_and(|last| last >= 2 * save_every) {
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
    // Checkpoints from before digests have none.
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
    // The warm-up would come between the finished steps and the next ones.
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

/// Adds the newest complete checkpoint of `saved` to `error` if a file of the last checkpoint is missing, damaged or
/// from another save.
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

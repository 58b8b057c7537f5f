//! The loop.

use std::{
    path::{Path, PathBuf},
    sync::atomic::{AtomicBool, Ordering},
    time::Instant,
};

use anyroll_strategy::checkpoint;
use serde::{Deserialize, Serialize};

use super::{
    Roles, Setup,
    exchange::Exchange,
    roles::{Place, adamw},
};
use crate::{
    Error, Result,
    config::{Advantage, AlgorithmConfig, GrpoConfig, PolicyLoss, Run, Scale},
    data::Dataset,
    journal::Journal,
    metrics::Metrics,
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

/// What a rank is asked to do.
pub struct Job {
    /// The config, resolved for this machine.
    pub run: Run,
    /// Its data.
    pub dataset: Dataset,
    /// This rank's device, and the ranks that it has met.
    pub place: Place,
    /// The run folder, on rank 0.
    pub dir: Option<RunDir>,
    /// Whether to go on from the folder's last checkpoint.
    pub resume: bool,
}

/// Where a run stands, as a checkpoint keeps it. Data, seeds and schedules are functions of the step.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize, Deserialize)]
struct Position {
    /// Steps of the warm-up that are done.
    warmup_steps: u64,
    /// RL steps that are done.
    steps: u64,
    /// Batches of prompts that they drew: as many, but with `mixed_groups`.
    #[serde(default)]
    batches: u64,
    /// The weight of the KL divergence off the reward, once a controller has moved it.
    #[serde(default)]
    kl_coef: Option<f64>,
}

impl Position {
    /// The first step whose record is still to be written: in the warm-up not even that of step 0 is.
    fn next_record(self) -> u64 {
        if self.steps == 0 { 0 } else { self.steps + 1 }
    }
}

/// Trains on this rank: warm-up, evaluation, then steps, with an evaluation and a checkpoint every so often. `stop`
/// may be set at any time: the run then ends after its current step, with a checkpoint.
pub fn train(job: Job, screen: &Screen, stop: &AtomicBool) -> Result<Ended> {
    let exchange = Exchange::new(&job.place.group)?;
    let setup = Setup::new(&job.run, job.dataset, &job.place)?;
    let mut training = Training::start(&job.run, job.dir, job.resume, setup, job.place, exchange, screen)?;

    let mut ended = training.warm_up(stop)?;
    if ended == Ended::Finished {
        if training.position.steps == 0 {
            training.begin()?;
        }
        ended = training.steps(stop)?;
    }
    training.tell(ended)?;
    Ok(ended)
}

struct Training<'a> {
    run: &'a Run,
    setup: Setup,
    place: Place,
    exchange: Exchange,
    roles: Roles,
    position: Position,
    folder: PathBuf,
    /// On rank 0.
    journal: Option<Journal>,
    /// Of the last warm-up step of this process.
    warmup_loss: Option<f64>,
}

impl<'a> Training<'a> {
    fn start(
        run: &'a Run,
        dir: Option<RunDir>,
        resume: bool,
        setup: Setup,
        place: Place,
        exchange: Exchange,
        screen: &Screen,
    ) -> Result<Self> {
        let own = dir.as_ref().map_or(String::new(), |dir| dir.path().display().to_string());
        let folder = PathBuf::from(exchange.text_of_first(&own)?);
        let last = if resume { Some(last_checkpoint(&folder)?) } else { None };
        let position = match &last {
            Some(path) => position_of(path)?,
            None => Position::default(),
        };
        let in_warmup = position.warmup_steps < setup.warmup_steps();
        let optimizer = match &setup.rlvr.warmup {
            Some(warmup) if in_warmup => &warmup.optimizer,
            _ => &setup.rlvr.optimizer,
        };
        let mut policy = setup.policy(run, &place, optimizer)?;
        if let Some(path) = &last {
            checkpoint::load(&mut policy, path)?;
        }
        let steps = setup.rlvr.steps;
        let (name, description) = (&run.config.name, setup.description(run));
        let next_step = last.map(|_| position.next_record());
        let journal =
            dir.map(|dir| Journal::new(dir, screen, name, &description, steps, next_step)).transpose()?;
        let roles = Roles { policy, reference: None };
        let mut training =
            Self { run, setup, place, exchange, roles, position, folder, journal, warmup_loss: None };
        training.say(&format!("{description}; everything lands in {}", training.folder.display()));
        if position.steps > 0 {
            training.reference(true)?;
        }
        Ok(training)
    }

    /// The rest of the supervised warm-up, then a new optimizer.
    fn warm_up(&mut self, stop: &AtomicBool) -> Result<Ended> {
        let Some(warmup) = self.setup.rlvr.warmup.clone() else { return Ok(Ended::Finished) };
        if self.position.warmup_steps >= warmup.steps {
            return Ok(Ended::Finished);
        }
        self.say(&format!("warm-up: {} supervised steps", warmup.steps));
        while self.position.warmup_steps < warmup.steps {
            let step = self.position.warmup_steps;
            let loss = self.setup.warmup_step(&mut self.roles.policy, &self.exchange, &warmup, step)?;
            self.warmup_loss = Some(loss);
            self.position.warmup_steps += 1;
            // Every tenth step, since asking all ranks takes about as long as a step.
            let asks =
                self.position.warmup_steps.is_multiple_of(10) && self.position.warmup_steps < warmup.steps;
            if asks && self.anyone_stops(stop)? {
                self.save()?;
                return Ok(Ended::Interrupted);
            }
        }
        self.roles.policy.reset_optimizer(adamw(&self.setup.rlvr.optimizer))?;
        Ok(Ended::Finished)
    }

    /// What comes once, between warm-up and RL.
    fn begin(&mut self) -> Result<()> {
        self.reference(false)?;
        let mut metrics = Metrics::new();
        if let Some(loss) = self.warmup_loss {
            metrics.insert("warmup/loss", loss);
        }
        self.evaluate_and_record(0, metrics, Phase::Before)
    }

    fn steps(&mut self, stop: &AtomicBool) -> Result<Ended> {
        let rlvr = self.setup.rlvr.clone();
        while self.position.steps < rlvr.steps {
            let wish = stop.load(Ordering::Relaxed);
            let Position { steps, batches, kl_coef, .. } = self.position;
            let kl_coef = kl_coef.unwrap_or(rlvr.algorithm.kl_coef);
            let outcome =
                self.setup.step(&mut self.roles, &self.exchange, (steps, batches), kl_coef, wish)?;
            self.position.steps += 1;
            self.position.batches += outcome.batches;
            self.position.kl_coef = outcome.kl_coef;
            let (step, metrics) = (self.position.steps, outcome.metrics);
            let is_last = step == rlvr.steps;
            if is_last || step.is_multiple_of(rlvr.evaluation.every) {
                let phase = if is_last { Phase::After } else { Phase::Eval };
                self.evaluate_and_record(step, metrics, phase)?;
            } else if let Some(journal) = &mut self.journal {
                journal.record(step, &metrics, &[])?;
            }
            let stops = outcome.stop && !is_last;
            if is_last || stops || step.is_multiple_of(rlvr.checkpoint.every) {
                self.save()?;
            }
            if stops {
                return Ok(Ended::Interrupted);
            }
        }
        Ok(Ended::Finished)
    }

    fn evaluate_and_record(&mut self, step: u64, mut metrics: Metrics, phase: Phase) -> Result<()> {
        let started = Instant::now();
        let (evaluated, samples) =
            self.setup.evaluate(&mut self.roles.policy, &self.exchange, step, phase)?;
        metrics.insert("time/eval_s", started.elapsed().as_secs_f64());
        metrics.merge(evaluated);
        if let Some(journal) = &mut self.journal {
            journal.record(step, &metrics, &samples)?;
            let value = |name: &str| metrics.get(name).unwrap_or(f64::NAN);
            journal.say(&format!(
                "step {step}: held-out greedy {:.3}, pass@1 {:.3}",
                value("eval/greedy"),
                value("eval/pass@1")
            ));
            journal.report()?;
        }
        Ok(())
    }

    /// Makes the frozen reference: from the policy as it is, kept in the run folder, or from there.
    fn reference(&mut self, kept: bool) -> Result<()> {
        let path = self.folder.join("reference");
        self.roles.reference = self.setup.reference(self.run, &self.place, &mut self.roles.policy)?;
        match &mut self.roles.reference {
            None => {}
            Some(reference) if kept => drop(checkpoint::load(&mut reference.model, &path)?),
            Some(reference) => checkpoint::save(&mut reference.model, &path, serde_json::Value::Null)?,
        }
        Ok(())
    }

    fn save(&mut self) -> Result<()> {
        if let Some(journal) = &self.journal {
            journal.sync()?;
        }
        let folder = self.folder.join(CHECKPOINTS);
        let path = folder.join(format!("step_{:06}", self.position.steps));
        let position = serde_json::to_value(self.position).expect("plain numbers");
        let policy = &mut self.roles.policy;
        policy.load_states(&self.setup.offloaded)?;
        checkpoint::save(policy, &path, position)?;
        policy.start_offload(&self.setup.offloaded)?;
        if self.journal.is_some() {
            checkpoint::prune(&folder, self.setup.rlvr.checkpoint.keep_last)?;
        }
        Ok(())
    }

    /// The report, the table, and how to go on if there is more to do.
    fn tell(&self, ended: Ended) -> Result<()> {
        let Some(journal) = &self.journal else { return Ok(()) };
        if self.position.steps > 0 {
            journal.report()?;
            journal.say(&journal.summary()?);
        }
        if ended == Ended::Interrupted {
            let (folder, position) = (self.folder.display(), self.position);
            let done = match position.steps {
                0 => format!("step {} of the warm-up", position.warmup_steps),
                steps => format!("step {steps}"),
            };
            journal.say(&format!("interrupted after {done}: go on with `anyroll run --resume {folder}`"));
        }
        Ok(())
    }

    fn anyone_stops(&self, stop: &AtomicBool) -> Result<bool> {
        let wish = f64::from(u8::from(stop.load(Ordering::Relaxed)));
        Ok(self.exchange.sum(&[wish])?[0] > 0.0)
    }

    fn say(&self, line: &str) {
        if let Some(journal) = &self.journal {
            journal.say(line);
        }
    }
}

impl Setup {
    /// The run in a line, for the report.
    fn description(&self, run: &Run) -> String {
        let parameters: usize = anyroll_models::Model::units(&*self.model)
            .iter()
            .flat_map(|unit| &unit.params)
            .map(|p| p.elements())
            .sum();
        format!(
            "{}, {parameters} parameters, {} on {} x {}, ZeRO {}, seed {}",
            title(&self.rlvr.algorithm),
            run.policy.strategy.precision.name(),
            run.world_size,
            run.policy.backend,
            run.policy.strategy.zero_stage,
            self.seed
        )
    }

    fn warmup_steps(&self) -> u64 {
        self.rlvr.warmup.as_ref().map_or(0, |warmup| warmup.steps)
    }
}

/// The algorithm as papers call it.
fn title(algorithm: &AlgorithmConfig) -> String {
    let advantage = match (&algorithm.advantage, algorithm.whiten_advantages) {
        (Advantage::Reinforce(_), true) => "REINFORCE++",
        (Advantage::Reinforce(_), false) => "REINFORCE",
        (Advantage::Grpo(GrpoConfig { scale: Scale::None, .. }), true) => "REINFORCE++ with a baseline",
        (Advantage::Grpo(GrpoConfig { scale: Scale::None, .. }), false) => "Dr. GRPO",
        (Advantage::Grpo(_), _) => "GRPO",
        (Advantage::Rloo, _) => "RLOO",
        (Advantage::Opo, _) => "OPO",
        (Advantage::Gpg, _) => "GPG",
    };
    let loss = match &algorithm.loss {
        PolicyLoss::Clipped(_) | PolicyLoss::Reinforce => return advantage.to_owned(),
        PolicyLoss::Gspo(_) => "GSPO",
        PolicyLoss::Cispo(_) => "CISPO",
        PolicyLoss::Sapo(_) => "SAPO",
        PolicyLoss::Topr(_) => "TOPR",
    };
    format!("{loss} on {advantage}")
}

const CHECKPOINTS: &str = "checkpoints";

fn last_checkpoint(folder: &Path) -> Result<PathBuf> {
    checkpoint::list(&folder.join(CHECKPOINTS))?.pop().ok_or_else(|| Error::Resume {
        run: folder.to_owned(),
        problem: format!("{CHECKPOINTS}/ has no checkpoint; start anew with another --output"),
    })
}

fn position_of(path: &Path) -> Result<Position> {
    serde_json::from_value(checkpoint::extra(path)?)
        .map_err(|error| Error::Resume { run: path.to_owned(), problem: error.to_string() })
}

//! [`Pipeline`]: what the loop trains, and all that differs from one kind of run to the next.

use std::path::Path;

use anyroll_strategy::checkpoint::{Saver, Stamp};
use serde::{Deserialize, Serialize, de::DeserializeOwned};

use super::Exchange;
use crate::{
    Result,
    metrics::Metrics,
    picture::Picture,
    samples::{Phase, Sample},
};

/// A policy, with what it is trained on, for and by. Every rank holds one, and calls the same methods in the same
/// order.
pub trait Pipeline {
    /// What goes from one step to the next beside weights and moments, as a controller's coefficient does. It is
    /// written into checkpoints; most of what a step needs is a function of its number instead.
    type Carried: Default + Serialize + DeserializeOwned;

    /// When things happen.
    fn plan(&self) -> Plan;

    /// How good an evaluation found the policy, if the best one so far is kept beside the checkpoints.
    fn best_by(&self, _evaluation: &Metrics) -> Option<f64> {
        None
    }

    /// The run in a line, for the report.
    fn description(&self) -> String;

    /// One supervised step, numbered from 0, and its loss.
    fn warmup_step(&mut self, exchange: &Exchange, step: u64) -> Result<f64>;

    /// An error if the optimizer's steps so far have led to nothing that is a model.
    fn check_divergence(&mut self) -> Result<()>;

    /// Starts the optimizer of the RL steps.
    fn end_warm_up(&mut self) -> Result<()>;

    /// Builds the frozen models before the first RL step: copies of the policy, which are saved as `kept` says, or
    /// loaded if they were saved before.
    fn freeze(&mut self, kept: Kept) -> Result<()>;

    /// One RL step, numbered from 0. `stop` is this rank's wish to end the run after it.
    fn step(
        &mut self,
        exchange: &Exchange,
        step: u64,
        carried: &mut Self::Carried,
        stop: bool,
    ) -> Result<StepOutcome>;

    /// Measures the policy on what it is never trained on.
    fn evaluate(&mut self, exchange: &Exchange, step: u64, phase: Phase) -> Result<Evaluation>;

    /// Starts to write a checkpoint of everything that steps change to the new folder `path`, with the run's
    /// `position`. The next steps may change it meanwhile.
    fn save(&mut self, saver: &mut Saver, path: &Path, position: serde_json::Value) -> Result<()>;

    /// Loads what [`Self::save`] has led to.
    fn load(&mut self, path: &Path) -> Result<()>;
}

/// Location of a run's frozen models, which are saved before its first RL step.
#[derive(Clone, Copy, Debug)]
pub struct Kept<'a> {
    /// The run's folder.
    pub folder: &'a Path,
    /// Number of the run, which the files contain.
    pub run: u32,
    /// True if they were saved there before.
    pub is_saved: bool,
}

impl Kept<'_> {
    /// Stamp of their files.
    pub fn stamp(&self) -> Stamp {
        Stamp { run: self.run, step: 0 }
    }
}

/// What goes from step to step where every step is a function of its number, the weights and the seed.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct Nothing {}

/// When things happen in a run.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Plan {
    /// Supervised steps before the first RL step.
    pub warmup_steps: u64,
    /// RL steps.
    pub steps: u64,
    /// RL steps from one evaluation to the next, with one before and after them all; `None` if there are no evaluations.
    pub evaluate_every: Option<u64>,
    /// RL steps from one checkpoint to the next.
    pub save_every: u64,
    /// Checkpoints that are kept, the newest.
    pub keep_last: usize,
}

/// What a step leaves: its metrics, and whether some rank was asked to stop.
#[derive(Debug)]
pub struct StepOutcome {
    /// Over all ranks.
    pub metrics: Metrics,
    /// Whether the run should end here.
    pub stop: bool,
}

/// What an evaluation found.
#[derive(Debug)]
pub struct Evaluation {
    /// Over all ranks.
    pub metrics: Metrics,
    /// This rank's first samples, for people to read.
    pub samples: Vec<Sample>,
    /// Of images, this rank's first samples.
    pub picture: Option<Picture>,
    /// The result in a few words, for the terminal.
    pub summary: String,
}

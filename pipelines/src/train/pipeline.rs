//! [`Pipeline`]: the part of the loop that differs between kinds of runs.

use std::{
    path::Path,
    sync::{Arc, atomic::AtomicBool},
};

use anyroll_strategy::checkpoint::{Folders, Save, Saver, Stamp};
use serde::{Deserialize, Serialize, de::DeserializeOwned};

use super::Exchange;
use crate::{
    Result,
    metrics::Metrics,
    picture::Picture,
    samples::{Phase, Sample},
};

/// A policy with its data, method and models. Every rank has one, and calls the same methods in the same order.
pub trait Pipeline {
    /// State that a step leaves to the next, except weights and moments, such as a controller's coefficient.
    /// Checkpoints contain it. Most inputs of a step are functions of its number instead.
    type Carried: Default + Serialize + DeserializeOwned;

    /// The schedule of the run.
    fn plan(&self) -> Plan;

    /// Score of an evaluation, if the best policy so far is kept in addition to the checkpoints.
    fn best_by(&self, _evaluation: &Metrics) -> Option<f64> {
        None
    }

    /// Description of the run in one line, for the report.
    fn description(&self) -> String;

    /// Runs one supervised step, numbered from 0.
    fn warmup_step(&mut self, exchange: &Exchange, step: u64) -> Result<WarmupStep>;

    /// Returns an error if the optimizer steps so far have led to weights that are not finite.
    fn check_divergence(&mut self) -> Result<()>;

    /// Starts the optimizer of the RL steps.
    fn end_warm_up(&mut self) -> Result<()>;

    /// Builds the frozen models before the first RL step. These copies of the policy are saved to the files of
    /// `kept`, or loaded if they were saved before.
    fn freeze(&mut self, kept: Kept) -> Result<()>;

    /// Runs one RL step, numbered from 0. `stop` is this rank's request to end the run after the step.
    fn step(
        &mut self,
        exchange: &Exchange,
        step: u64,
        carried: &mut Self::Carried,
        stop: bool,
    ) -> Result<StepOutcome>;

    /// Receives the flag that is set once the run is to stop. A step or an evaluation that would then last may end
    /// with [`Error::Unscored`](crate::Error::Unscored), on all ranks.
    fn stop_by(&mut self, _stop: &Arc<AtomicBool>) {}

    /// Returns true if a step that ended so has left all state unchanged.
    fn is_unchanged_if_unscored(&self) -> bool {
        false
    }

    /// Evaluates the policy on data that it is never trained on.
    fn evaluate(&mut self, exchange: &Exchange, step: u64, phase: Phase) -> Result<Evaluation>;

    /// Starts to write a checkpoint of all state that steps change to the new folder `path`, with the run's
    /// `position`. The next steps may change the state in the meantime.
    fn save(&mut self, saver: &mut Saver, path: &Path, position: serde_json::Value) -> Result<()>;

    /// Loads a checkpoint of [`Self::save`].
    fn load(&mut self, path: &Path) -> Result<()>;

    /// Tells processes of the run that are no ranks that it has ended without a failure.
    fn end(&mut self) -> Result<()> {
        Ok(())
    }
}

/// Location of a run's frozen models, which are saved before the first RL step.
#[derive(Clone, Copy, Debug)]
pub struct Kept<'a> {
    /// The run's folder.
    pub folder: &'a Path,
    /// Number of the run, contained in the files.
    pub run: u32,
    /// Folders of the ranks.
    pub folders: Folders,
    /// True if the models were saved before.
    pub is_saved: bool,
}

impl Kept<'_> {
    /// Stamp of the files.
    pub fn stamp(&self) -> Stamp {
        Stamp { run: self.run, step: 0 }
    }

    /// The save that writes them.
    pub fn save(&self) -> Save {
        Save { stamp: self.stamp(), folders: self.folders }
    }
}

/// No state: every step is a function of its number, the weights and the seed.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct Nothing {}

/// Results of a step of the warm-up.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct WarmupStep {
    /// Loss before the update.
    pub loss: f64,
    /// Learning rate of the update.
    pub learning_rate: f64,
}

/// Schedule of a run.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Plan {
    /// Supervised steps before the first RL step.
    pub warmup_steps: u64,
    /// RL steps.
    pub steps: u64,
    /// RL steps between evaluations, with one before and one after all of them; `None` for no evaluations.
    pub evaluate_every: Option<u64>,
    /// RL steps between checkpoints.
    pub save_every: u64,
    /// Number of checkpoints to keep, the newest ones.
    pub keep_last: usize,
}

/// Result of a step.
#[derive(Debug)]
pub struct StepOutcome {
    /// Metrics over all ranks.
    pub metrics: Metrics,
    /// Samples of the step, on rank 0, for `samples.jsonl`.
    pub samples: Vec<Sample>,
    /// True if some rank requested to end the run after this step.
    pub stop: bool,
}

/// Result of an evaluation.
#[derive(Debug)]
pub struct Evaluation {
    /// Metrics over all ranks.
    pub metrics: Metrics,
    /// This rank's first samples, for `samples.jsonl`.
    pub samples: Vec<Sample>,
    /// Picture of this rank's first samples, for images.
    pub picture: Option<Picture>,
    /// Short summary for the terminal.
    pub summary: String,
}

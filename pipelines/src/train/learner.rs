//! A model that is trained: what RLVR, offline training, diffusion and critics share of a step.

use std::{path::Path, sync::Arc};

use anyroll_config::OptimizerConfig;
use anyroll_models::{Model, init::WeightSource};
use anyroll_strategy::{
    State, StepStats, Zero,
    checkpoint::{self, Saver},
};

use super::{Place, adamw, allocated_bytes, hold, learning_rate, offloaded};
use crate::{Result, metrics::Metrics, run::Role};

/// A model with its optimizer, held as a role says.
///
/// States that the role offloads are on the device from [`Self::load`] to [`Self::finish`], or to [`Self::offload`].
#[derive(Debug)]
pub struct Learner<M: Model> {
    /// The weights, gradients and moments of the ranks.
    pub model: Zero<M>,
    /// Sequences or images that a rank puts through forward and backward at a time.
    pub micro_batch_size: usize,
    /// States that leave the device between steps, or while something else needs the room.
    offloaded: Vec<State>,
    /// The part of `offloaded` that leaves after every step.
    leaving: Vec<State>,
    schedule: Schedule,
}

/// The optimizer of a learner, and over which steps its learning rate runs.
#[derive(Clone, Debug)]
pub struct Schedule {
    /// Its constants.
    pub optimizer: OptimizerConfig,
    /// Steps after the warm-up.
    pub steps: u64,
    /// Optimizer of the warm-up, which comes first, if there is one.
    pub warmup: Option<OptimizerConfig>,
}

/// One of the mini-batches that [`Learner::update`] takes an optimizer step for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct MiniBatch {
    /// Pass over the step's samples, from 0.
    pub epoch: usize,
    /// Its index in the pass.
    pub index: usize,
}

impl MiniBatch {
    /// True where no optimizer step came since the step began.
    pub fn is_first(self) -> bool {
        self.epoch == 0 && self.index == 0
    }
}

/// The optimizer steps of a step.
#[derive(Debug)]
pub struct Update {
    steps: Vec<StepStats>,
    learning_rate: f64,
}

/// Results of the optimizer steps of a step.
#[derive(Debug)]
pub struct Stepped {
    /// The mean norm of the gradients that were not skipped, in fp16 the last loss scale and the number of steps that were
    /// skipped, and the learning rate.
    pub metrics: Metrics,
    /// Bytes that this process had allocated on the device behind the last one; libtorch's own memory is not in it.
    pub allocated_bytes: f64,
}

impl<M: Model> Learner<M> {
    /// Holds `model` on `place` as `role` says, with its first `weights`. Every rank calls.
    pub fn new(
        model: Arc<M>,
        role: &Role,
        place: &Place,
        weights: &dyn WeightSource,
        schedule: Schedule,
    ) -> Result<Self> {
        let strategy = &role.strategy;
        let first = schedule.warmup.as_ref().unwrap_or(&schedule.optimizer);
        let model = hold(model, strategy, place, Some(adamw(first)), weights)?;
        let offloaded = offloaded(strategy);
        let micro_batch_size = strategy.micro_batch_size;
        Ok(Self { model, micro_batch_size, leaving: offloaded.clone(), offloaded, schedule })
    }

    /// The same, whose states stay on the device after a step: nothing else needs the room.
    pub fn staying(self) -> Self {
        Self { leaving: Vec::new(), ..self }
    }

    /// The device on which it computes.
    pub fn device(&self) -> tch::Device {
        self.model.torch_device()
    }

    /// Starts the optimizer of the steps after the warm-up.
    pub fn end_warm_up(&mut self) -> Result<()> {
        Ok(self.model.reset_optimizer(adamw(&self.schedule.optimizer))?)
    }

    /// An error if the optimizer's steps so far have led to weights that are no numbers.
    pub fn check_divergence(&mut self) -> Result<()> {
        self.load()?;
        Ok(self.model.check_divergence()?)
    }

    /// Brings all states back to the device; compute waits for each where it first uses it.
    pub fn load(&mut self) -> anyroll_strategy::Result<()> {
        self.model.load_states(&self.offloaded)
    }

    /// Takes all states off the device that the role offloads, and waits for them.
    pub fn offload(&mut self) -> anyroll_strategy::Result<()> {
        self.model.offload_states(&self.offloaded)?;
        Ok(())
    }

    /// Starts to take those off the device that leave after every step.
    pub fn start_leaving(&mut self) -> Result<()> {
        Ok(self.model.start_offload(&self.leaving)?)
    }

    /// Waits until those have left.
    pub fn finish_leaving(&mut self) -> Result<()> {
        self.model.offload_states(&self.leaving)?;
        Ok(())
    }

    /// Step `step`, from 0: `epochs` passes over `mini_batches` mini-batches, an optimizer step each. `accumulate` adds
    /// the gradient of one. The states stay on the device until [`Self::finish`].
    pub fn update(
        &mut self,
        step: u64,
        epochs: usize,
        mini_batches: usize,
        mut accumulate: impl FnMut(&mut Zero<M>, MiniBatch) -> Result<()>,
    ) -> Result<Update> {
        let mut update = self.begin(step);
        for epoch in 0..epochs {
            for index in 0..mini_batches {
                accumulate(&mut self.model, MiniBatch { epoch, index })?;
                self.step(&mut update)?;
            }
        }
        Ok(update)
    }

    /// Begins step `step` for who accumulates by several models: [`Self::update`] is the rule.
    pub fn begin(&self, step: u64) -> Update {
        let Schedule { optimizer, steps, .. } = &self.schedule;
        Update { steps: Vec::new(), learning_rate: learning_rate(optimizer, step, *steps) }
    }

    /// Takes an optimizer step with the gradients that were accumulated.
    pub fn step(&mut self, update: &mut Update) -> Result<()> {
        update.steps.push(self.model.step(update.learning_rate)?);
        Ok(())
    }

    /// Lets states leave, and waits for the optimizer steps of `update`.
    pub fn finish(&mut self, update: Update) -> Result<Stepped> {
        let allocated_bytes = allocated_bytes(&self.model)?;
        self.start_leaving()?;
        let (mut norms, mut loss_scale) = (Vec::with_capacity(update.steps.len()), None);
        for stats in &update.steps {
            let stepped = self.model.finish_step(stats)?;
            norms.extend(stepped.grad_norm);
            loss_scale = stepped.loss_scale;
        }
        let mut metrics = Metrics::new();
        if !norms.is_empty() {
            metrics.insert("grad_norm", norms.iter().sum::<f64>() / norms.len() as f64);
        }
        if let Some(loss_scale) = loss_scale {
            metrics.insert("loss_scale", loss_scale);
            metrics.insert("skipped_steps", (update.steps.len() - norms.len()) as f64);
        }
        metrics.insert("learning_rate", update.learning_rate);
        Ok(Stepped { metrics, allocated_bytes })
    }

    /// Starts a checkpoint in the new folder `path`, with the run's `position`, what this rank has of its `own`, and what
    /// `others` save into the folder that they are given.
    pub fn save(
        &mut self,
        saver: &mut Saver,
        path: &Path,
        position: serde_json::Value,
        own: Option<Vec<u8>>,
        others: impl FnOnce(&Path) -> anyroll_strategy::Result<()>,
    ) -> Result<()> {
        self.load()?;
        saver.start_with(&mut self.model, path, position, own, others)?;
        self.start_leaving()
    }

    /// Loads weights and moments from the checkpoint `path`.
    pub fn restore(&mut self, path: &Path) -> Result<()> {
        checkpoint::load(&mut self.model, path)?;
        Ok(())
    }
}

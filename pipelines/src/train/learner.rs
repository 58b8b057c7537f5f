//! A trained model: the common part of a step in RLVR, offline training, diffusion and critics.

use std::{path::Path, sync::Arc};

use anyroll_config::OptimizerConfig;
use anyroll_models::{Model, init::WeightSource};
use anyroll_strategy::{
    State, StepStats, Zero,
    checkpoint::{self, Saver},
};

use super::{MicroBatch, Place, adamw, allocated_bytes, hold, learning_rate, offloaded};
use crate::{Result, metrics::Metrics, run::Role};

/// A model with its optimizer, held under a role's strategy.
///
/// States that the role offloads are on the device from [`Self::load`] to [`Self::finish`] or [`Self::offload`].
#[derive(Debug)]
pub struct Learner<M: Model> {
    /// Weights, gradients and moments, sharded over the ranks.
    pub model: Zero<M>,
    /// Limit of a forward and backward pass.
    pub micro_batch: MicroBatch,
    /// States that are offloaded between steps, or while another model needs the memory.
    offloaded: Vec<State>,
    /// The part of `offloaded` that is offloaded after every step.
    leaving: Vec<State>,
    schedule: Schedule,
}

/// Optimizer options of a learner, and the steps of its learning-rate schedule.
#[derive(Clone, Debug)]
pub struct Schedule {
    /// Options of the optimizer.
    pub optimizer: OptimizerConfig,
    /// Steps after the warm-up.
    pub steps: u64,
    /// Optimizer options of the warm-up, which comes first; `None` without a warm-up.
    pub warmup: Option<OptimizerConfig>,
}

/// A mini-batch of [`Learner::update`], for one optimizer step.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct MiniBatch {
    /// Pass over the step's samples, from 0.
    pub epoch: usize,
    /// Index of the mini-batch in the pass.
    pub index: usize,
}

impl MiniBatch {
    /// Returns true if no optimizer step of this step precedes the mini-batch.
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
    /// Metrics of the optimizer steps: the mean norm of the gradients, without skipped ones, and the learning rate.
    /// In fp16 also the last loss scale and the number of skipped steps.
    pub metrics: Metrics,
    /// Metrics of the policy's memory and time, which a critic has none of: bytes that this process had allocated on the
    /// device after the last optimizer step, without libtorch's own memory, and exchanges of rows between experts.
    pub costs: Metrics,
}

impl<M: Model> Learner<M> {
    /// Holds `model` on `place` under the strategy of `role`, with initial `weights`. Every rank must call this.
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
        let micro_batch = MicroBatch::of(strategy);
        Ok(Self { model, micro_batch, leaving: offloaded.clone(), offloaded, schedule })
    }

    /// Keeps the states on the device after a step, since nothing else needs the memory.
    pub fn staying(self) -> Self {
        Self { leaving: Vec::new(), ..self }
    }

    /// The device of the computation.
    pub fn device(&self) -> tch::Device {
        self.model.torch_device()
    }

    /// Starts the optimizer of the steps after the warm-up.
    pub fn end_warm_up(&mut self) -> Result<()> {
        Ok(self.model.reset_optimizer(adamw(&self.schedule.optimizer))?)
    }

    /// Returns an error if the optimizer steps so far have led to weights that are not finite.
    pub fn check_divergence(&mut self) -> Result<()> {
        self.load()?;
        Ok(self.model.check_divergence()?)
    }

    /// Loads all states to the device; compute waits for each state at its first use.
    pub fn load(&mut self) -> anyroll_strategy::Result<()> {
        self.model.load_states(&self.offloaded)
    }

    /// Offloads all states that the role offloads, and waits for the copies.
    pub fn offload(&mut self) -> anyroll_strategy::Result<()> {
        self.model.offload_states(&self.offloaded)?;
        Ok(())
    }

    /// Starts to offload the states that are offloaded after every step.
    pub fn start_leaving(&mut self) -> Result<()> {
        Ok(self.model.start_offload(&self.leaving)?)
    }

    /// Waits for the copies of [`Self::start_leaving`].
    pub fn finish_leaving(&mut self) -> Result<()> {
        self.model.offload_states(&self.leaving)?;
        Ok(())
    }

    /// Runs step `step`, from 0: `epochs` passes over `mini_batches` mini-batches, with an optimizer step each.
    /// `accumulate` adds the gradient of one mini-batch. The states stay on the device until [`Self::finish`].
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

    /// Begins step `step` for callers that accumulate gradients through several models; all others use
    /// [`Self::update`].
    pub fn begin(&self, step: u64) -> Update {
        let Schedule { optimizer, steps, .. } = &self.schedule;
        self.model.measure_exchanges();
        Update { steps: Vec::new(), learning_rate: learning_rate(optimizer, step, *steps) }
    }

    /// Takes an optimizer step with the accumulated gradients.
    pub fn step(&mut self, update: &mut Update) -> Result<()> {
        update.steps.push(self.model.step(update.learning_rate)?);
        Ok(())
    }

    /// Starts to offload states, and waits for the optimizer steps of `update`.
    pub fn finish(&mut self, update: Update) -> Result<Stepped> {
        let mut costs = Metrics::new();
        costs.insert("perf/allocated_bytes", allocated_bytes(&self.model)?);
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
        if let Some(exchanged) = self.model.exchanged()? {
            costs.insert("perf/experts_sent_bytes", exchanged.sent_bytes as f64);
            costs.insert("time/experts_exchange_s", exchanged.waited.as_secs_f64());
        }
        Ok(Stepped { metrics, costs })
    }

    /// Starts a checkpoint in the new folder `path`. The checkpoint has the run's `position`, this rank's `own`
    /// bytes, and the files that `others` saves into the folder that it is given.
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

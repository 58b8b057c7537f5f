//! Groups of completions from prompts. [`Rollout`] has three implementations. [`SyncRollout`] samples in the step,
//! [`InFlightRollout`] leaves unfinished completions to later steps, and [`OwnDevicesRollout`] samples on separate
//! devices during training.

mod devices;
mod engine;
mod in_flight;
mod own_devices;
mod prompts;
mod queue;
mod remote;
mod sampling_device;
mod staleness;
mod sync;

use std::time::{Duration, Instant};

use anyroll_models::{Decoder, generation::Speculated};
use anyroll_reward::Scoring;
use anyroll_strategy::Weights;

pub use devices::Devices;
pub use engine::{Engine, Together, sampled_bytes, sampler};
pub use in_flight::InFlightRollout;
pub use own_devices::OwnDevicesRollout;
pub use prompts::Prompts;
pub use queue::{Group, GroupQueue};
pub use remote::{Door, Served, Trainer, serve};
pub use sampling_device::SamplingDevice;
pub use staleness::Staleness;
pub use sync::SyncRollout;

use super::rewards::Rewards;
use crate::{
    Result,
    inference::SampleRequest,
    train::{Exchange, Learner},
};

/// Samples the groups that a step trains on. Every rank has one, and must call it in the same order.
pub trait Rollout {
    /// The policy's weights in the form that this rollout samples with.
    fn weights(&self, learner: &mut Learner<Decoder>) -> Result<Weights>;

    /// Returns this rank's groups of batch `batch`, on which step `round.step` trains; previous batches must have
    /// been taken. Completions are handed over for scoring as soon as the step is certain to train on them.
    fn groups(&mut self, round: &mut Round, batch: u64) -> Result<Groups>;

    /// Waits for sampling that runs during steps, so that [`Self::in_flight`] is complete.
    fn settle(&mut self) -> Result<()> {
        Ok(())
    }

    /// Groups for later steps, for a checkpoint; `None` if a step leaves none.
    fn in_flight(&self) -> Option<&GroupQueue> {
        None
    }

    /// Continues with the groups of a checkpoint.
    fn restore(&mut self, _groups: GroupQueue) {}

    /// Tells rollout hosts that the run has ended without a failure.
    fn end(&mut self) -> Result<()> {
        Ok(())
    }
}

/// Inputs of a step's sampling and scoring.
pub struct Round<'a> {
    /// The step, from 0.
    pub step: u64,
    /// This rank's request to end the run after the step.
    pub stop: bool,
    /// The ranks.
    pub exchange: &'a Exchange,
    /// The policy's weights, as [`Rollout::weights`] returns them.
    pub weights: &'a Weights,
    /// The policy, whose states may still be copied to the host.
    pub learner: &'a mut Learner<Decoder>,
    /// The rewards.
    pub rewards: &'a mut Rewards,
    /// Time and work so far.
    pub spent: Spent,
}

/// Time and work of sampling and scoring on a rank.
#[derive(Clone, Copy, Debug, Default)]
pub struct Spent {
    /// Work of the rank's engine.
    pub effort: Effort,
    /// Time spent waiting for states to be offloaded.
    pub waited: Duration,
    /// Time spent sampling.
    pub generating: Duration,
    /// Additional time spent scoring.
    pub rewarding: Duration,
}

impl Round<'_> {
    /// Waits for offloads in flight until there is memory for the KV cache, and for the reserved rest. The cache then
    /// has the same size as after all offloads.
    fn make_room(&mut self, engine: &Engine, asked: &[SampleRequest]) -> Result<()> {
        let started = Instant::now();
        // Each of several ranks that sample together has a cache of the same size, for the requests of all.
        if engine.together.is_some() {
            self.learner.finish_leaving()?;
        }
        let policy = &mut self.learner.model;
        let leaving_bytes = policy.leaving_bytes();
        if leaving_bytes > 0 {
            let free_bytes = policy.group().stream().device().memory_info()?.free_bytes + leaving_bytes;
            let wanted_bytes =
                engine.sampler.capacity(asked).wanted_bytes(&engine.sampler.model, self.weights, free_bytes);
            policy.make_room(wanted_bytes)?;
        }
        self.spent.waited += started.elapsed();
        Ok(())
    }

    /// Waits until the policy's states are offloaded, if reward models need the memory.
    pub fn make_room_to_score(&mut self) -> Result<()> {
        let started = Instant::now();
        if self.rewards.grader.has_models() {
            self.learner.finish_leaving()?;
        }
        self.spent.waited += started.elapsed();
        Ok(())
    }
}

/// This rank's groups of a step.
pub struct Groups {
    /// Whole groups, in the order of their prompts.
    pub taken: Vec<Group>,
    /// Scoring of the groups' completions: those of the groups in order, then greedy ones.
    pub scoring: Scoring,
    /// Work of the engine.
    pub effort: Effort,
    /// Staleness of the groups; `None` for rollout in the step.
    pub staleness: Option<Staleness>,
}

/// Work of sampling.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Effort {
    /// Passes through the model.
    pub passes: usize,
    /// Tokens that were not recomputed between turns.
    pub kept_tokens: u64,
    /// Proposals, and what became of them.
    pub speculated: Speculated,
    /// Sampling time of separate rollout devices; `None` without such devices.
    pub own_devices: Option<Duration>,
    /// Time for which the rank has waited until such devices had the weights.
    pub sent: Duration,
    /// Number of such devices that began the step's completions.
    pub engines: usize,
}

impl Effort {
    /// Sums this work and the `other` one.
    pub fn joined(self, other: Self) -> Self {
        Self {
            passes: self.passes + other.passes,
            kept_tokens: self.kept_tokens + other.kept_tokens,
            speculated: self.speculated + other.speculated,
            own_devices: match (self.own_devices, other.own_devices) {
                (Some(own), Some(other)) => Some(own + other),
                (own, other) => own.or(other),
            },
            sent: self.sent + other.sent,
            engines: self.engines.max(other.engines),
        }
    }
}

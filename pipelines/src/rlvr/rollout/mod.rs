//! From prompts to groups of completions. [`Rollout`] has three implementations: [`SyncRollout`] samples in the step what the
//! step trains on, [`InFlightRollout`] leaves unfinished completions to later steps, and [`OwnDevicesRollout`] samples on devices of
//! its own while the step trains.

mod devices;
mod engine;
mod in_flight;
mod own_devices;
mod prompts;
mod queue;
mod staleness;
mod sync;

use std::time::{Duration, Instant};

use anyroll_models::Decoder;
use anyroll_reward::Scoring;
use anyroll_strategy::Weights;

pub use devices::Devices;
pub use engine::{Engine, sampler};
pub use in_flight::InFlightRollout;
pub use own_devices::OwnDevicesRollout;
pub use prompts::Prompts;
pub use queue::{Group, GroupQueue};
pub use staleness::Staleness;
pub use sync::SyncRollout;

use super::rewards::Rewards;
use crate::{
    Result,
    inference::Room,
    train::{Exchange, Learner},
};

/// Samples the groups that a step trains on. Every rank has one, and calls it in the same order.
pub trait Rollout {
    /// The policy's weights as this samples with them.
    fn weights(&self, learner: &mut Learner<Decoder>) -> Result<Weights>;

    /// This rank's groups of batch `batch`, which step `round.step` trains on; batches before it are taken. Completions are
    /// handed over to be scored as soon as it is certain that the step trains on them.
    fn groups(&mut self, round: &mut Round, batch: u64) -> Result<Groups>;

    /// Waits for what is sampled beside the steps, so that [`Self::in_flight`] is all of it.
    fn settle(&mut self) -> Result<()> {
        Ok(())
    }

    /// Groups that later steps will train on, for a checkpoint; `None` where a step leaves none.
    fn in_flight(&self) -> Option<&GroupQueue> {
        None
    }

    /// Continues with the groups of a checkpoint.
    fn restore(&mut self, _groups: GroupQueue) {}
}

/// Inputs of a step's sampling and scoring.
pub struct Round<'a> {
    /// The step, from 0.
    pub step: u64,
    /// This rank's wish to end the run after the step.
    pub stop: bool,
    /// The ranks.
    pub exchange: &'a Exchange,
    /// The policy's weights, as [`Rollout::weights`] returns them.
    pub weights: &'a Weights,
    /// The policy, whose states may still be leaving the device.
    pub learner: &'a mut Learner<Decoder>,
    /// The rewards.
    pub rewards: &'a mut Rewards,
    /// Time and work so far.
    pub spent: Spent,
}

/// Time and work of sampling and scoring on a rank.
#[derive(Clone, Copy, Debug, Default)]
pub struct Spent {
    /// Work of its engine.
    pub effort: Effort,
    /// Time spent waiting for states to leave the device.
    pub waited: Duration,
    /// Time spent sampling.
    pub generating: Duration,
    /// Time spent scoring beyond that.
    pub rewarding: Duration,
}

impl Round<'_> {
    /// Waits for states that are leaving until keys and values have room, and what is to stay free beside them. So the
    /// cache is as large as if it had waited for all.
    fn make_room(&mut self, model: &Decoder, room: Room) -> Result<()> {
        let started = Instant::now();
        let policy = &mut self.learner.model;
        let leaving_bytes = policy.leaving_bytes();
        if leaving_bytes > 0 {
            let free_bytes = policy.group().stream().device().memory_info()?.free_bytes + leaving_bytes;
            policy.make_room(room.wanted_bytes(model, self.weights, free_bytes))?;
        }
        self.spent.waited += started.elapsed();
        Ok(())
    }

    /// Waits until the policy's states have left, if reward models need the room.
    pub fn make_room_to_score(&mut self) -> Result<()> {
        let started = Instant::now();
        if self.rewards.has_models() {
            self.learner.finish_leaving()?;
        }
        self.spent.waited += started.elapsed();
        Ok(())
    }
}

/// This rank's groups of a step.
pub struct Groups {
    /// All of them whole, in the order of their prompts.
    pub taken: Vec<Group>,
    /// Scoring of their completions: those of the groups in order, then greedy ones.
    pub scoring: Scoring,
    /// Work of the engine.
    pub effort: Effort,
    /// Staleness of the groups; `None` where a step samples what it trains on.
    pub staleness: Option<Staleness>,
}

/// Work of sampling.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Effort {
    /// Passes through the model.
    pub passes: usize,
    /// Tokens that were not read again from one turn to the next.
    pub kept_tokens: u64,
    /// Time that rollout's own devices sampled; `None` without such.
    pub own_devices: Option<Duration>,
}

impl Effort {
    /// This and the `other` one.
    pub fn joined(self, other: Self) -> Self {
        Self {
            passes: self.passes + other.passes,
            kept_tokens: self.kept_tokens + other.kept_tokens,
            own_devices: match (self.own_devices, other.own_devices) {
                (Some(own), Some(other)) => Some(own + other),
                (own, other) => own.or(other),
            },
        }
    }
}

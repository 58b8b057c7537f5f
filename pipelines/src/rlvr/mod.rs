//! Reinforcement learning with verifiable rewards: the loop, from a resolved config to a trained policy.
//!
//! Read [`train()`] first: it is the loop. `step` is what happens in one turn of it, `collect` and `score` where
//! its samples come from, `targets` what they are trained towards and `loss` by which gradient; `evaluate` is how it is measured, `warmup` what comes before it,
//! `roles` who takes part.

mod collect;
mod evaluate;
mod exchange;
mod loss;
mod roles;
mod rollout;
mod score;
mod share;
mod step;
mod targets;
mod train;
mod warmup;

pub use exchange::Exchange;
pub use roles::{Place, Reference, Roles, Setup};
pub use train::{Ended, Job, train};

use anyroll_models::Decoder;

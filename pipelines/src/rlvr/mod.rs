//! Reinforcement learning with verifiable rewards: a language model as the loop's policy.
//!
//! [`Rlvr`] is what the [loop](crate::train) trains. `step` is what happens in one turn of it, `collect` and `score`
//! where its samples come from, `own_devices` where else they are made, `elsewhere` what comes from there, and `under_way`
//! which of them were begun before it; `targets` is what they are trained towards, `credit` which of their tokens for which
//! reward, and `loss` by which gradient; `evaluate` is how it is measured, `roles` who takes part and `critic` one of them. The
//! warm-up is that of [`crate::offline`].

mod collect;
mod credit;
mod critic;
mod elsewhere;
mod evaluate;
mod loss;
mod own_devices;
mod pipeline;
mod roles;
mod rollout;
mod score;
mod step;
mod targets;
mod under_way;

pub use critic::Critic;
pub use pipeline::Rlvr;
pub use roles::{Roles, Setup};

use anyroll_models::Decoder;

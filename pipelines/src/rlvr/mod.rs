//! Reinforcement learning with verifiable rewards: a language model as the loop's policy.
//!
//! [`Rlvr`] is what the [loop](crate::train) trains. From prompt to gradient, in the order in which a newcomer reads:
//!
//! 1. `step`: one step on a page, prompts -> groups -> scored rows -> advantages -> update;
//! 2. `rollout/mod` and `rollout/sync`: from prompts to groups of completions, sampled in the step
//!    (`rollout/in_flight` and `rollout/own_devices` are the two other implementations of the trait);
//! 3. `rollout/prompts`: which prompts a step has;
//! 4. `collect`: groups, scored, and which of them are trained on;
//! 5. `rewards` and `rows`: what each sample earned, as rows that all ranks have;
//! 6. `prepare`: what the loss reads of a rank's tokens;
//! 7. `advantages/mod`: from rows to advantages, by the estimators of `algorithm/advantages`;
//! 8. `update` and `train/learner`: epochs, mini-batches, micro-batches and optimizer steps;
//! 9. `loss/mod` and `loss/policy`: the gradient of a micro-batch.
//!
//! Beside that: `select` is dynamic sampling, `critic` values tokens, `models` and `setup` say who takes part, `pack` makes
//! batches, `step_metrics` what a step shows, and `evaluate` how the policy is measured. The warm-up is that of
//! [`crate::offline`].

mod advantages;
mod collect;
mod critic;
mod evaluate;
mod loss;
mod models;
mod pack;
mod pipeline;
mod prepare;
mod rewards;
mod rollout;
mod rows;
mod select;
mod setup;
mod step;
mod step_metrics;
mod update;

pub use pipeline::{Carried, Rlvr};

use anyroll_models::Decoder;
use critic::Critic;
use models::Models;
use setup::Task;

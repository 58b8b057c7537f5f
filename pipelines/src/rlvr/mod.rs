//! Reinforcement learning with verifiable rewards: a language model as the loop's policy.
//!
//! [`Rlvr`] is what the [loop](crate::train) trains. From prompt to gradient, in the order in which a newcomer reads:
//!
//! 1. `step`: one step, prompts -> groups -> scored rows -> advantages -> update;
//! 2. `rollout/mod`: the trait `Rollout`, which `step` samples by;
//! 3. `rollout/prompts`: which prompts a step has;
//! 4. `rollout/sync`: groups of completions, sampled in the step (`rollout/in_flight` and `rollout/own_devices` are the
//!    other two implementations);
//! 5. `rewards`: what each completion earned;
//! 6. `rows`: that, as rows that all ranks have;
//! 7. `prepare`: what the loss reads of a rank's tokens;
//! 8. `advantages/mod`: from rows to advantages of tokens;
//! 9. `algorithm/advantages`: the estimators, such as GRPO's;
//! 10. `update`: epochs, mini-batches and micro-batches, by `train/learner`;
//! 11. `loss/mod`: the gradient of a micro-batch;
//! 12. `algorithm/losses/clipped`: the loss of a token, one file of several.
//!
//! Besides: `select` is dynamic sampling, `critic` values tokens, `models` and `setup` say who takes part, `pack` makes
//! batches, `step_metrics` what a step shows, `control` deals rewards at random, and `evaluate` how the policy is measured.
//! The warm-up is that of [`crate::offline`].

mod advantages;
mod control;
mod critic;
mod evaluate;
mod loss;
mod models;
mod pack;
mod pipeline;
mod prepare;
mod reward_model;
mod rewards;
mod rollout;
mod rows;
mod select;
mod setup;
mod step;
mod step_metrics;
mod terms;
mod update;

pub use pipeline::{Carried, Rlvr};

use anyroll_models::Decoder;
use critic::Critic;
use models::Models;
use setup::Task;

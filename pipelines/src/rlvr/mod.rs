//! Reinforcement learning with verifiable rewards: a language model as the loop's policy.
//!
//! [`Rlvr`] is the pipeline of the [loop](crate::train). The modules in reading order, from prompt to gradient:
//!
//! 1. `step`: one step, prompts -> groups -> scored rows -> advantages -> update;
//! 2. `rollout/mod`: the trait `Rollout`, by which `step` samples;
//! 3. `rollout/prompts`: the prompts of a step;
//! 4. `rollout/sync`: groups of completions, sampled in the step;
//! 5. `rollout/in_flight` and `rollout/own_devices`: the other two implementations;
//! 6. `rewards`: the reward of each completion;
//! 7. `rows`: rewards as rows that all ranks have;
//! 8. `prepare`: inputs of the loss for a rank's tokens;
//! 9. `advantages/mod`: advantages of tokens from rows;
//! 10. `algorithm/advantages`: the estimators, such as GRPO's;
//! 11. `balance`: samples dealt anew, if ranks shall have as many tokens;
//! 12. `update`: epochs, mini-batches and micro-batches, by `train/learner`;
//! 13. `loss/mod`: the gradient of a micro-batch;
//! 14. `algorithm/losses/clipped`: the loss of a token, one file of several.
//!
//! Other modules: `select` is dynamic sampling, and `critic` predicts values. `models` and `setup` create the parts
//! of a run, and `pack` creates batches. `step_metrics` has the metrics of a step, `written` has completions for the run
//! folder, `control` permutes rewards at random, and `evaluate` measures the policy through `answers` and `grader`. The
//! warm-up is that of [`crate::offline`].

mod advantages;
mod answers;
mod balance;
mod control;
mod critic;
mod evaluate;
mod grader;
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
mod written;

pub use answers::Verdicts;
pub(crate) use answers::{Answering, Answers, Asking, Measured};
pub(crate) use grader::Grader;
pub use pipeline::{Carried, Rlvr};
pub(crate) use rollout::{Engine, sampled_bytes};
pub use rollout::{Served, Trainer, serve};

use anyroll_models::Decoder;
use critic::Critic;
use models::Models;
use setup::Task;

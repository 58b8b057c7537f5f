//! Offline training on given texts: answers, possibly labelled, or pairs of a better and a worse answer.
//!
//! `written` tokenizes records. `objective` has the losses as functions of an answer's log-prob or scalar,
//! and `learn` differentiates them through a model; RLVR's warm-up uses both. `ilql` has the loss of heads that learn
//! the values of tokens. `teacher` is the model that `distill` learns from. `pipeline` is the loop's pipeline, `step`
//! one step of it, `evaluate` its evaluation.

mod evaluate;
mod ilql;
mod learn;
mod objective;
mod pipeline;
mod step;
mod teacher;
mod written;

pub use learn::{Batch, Pass, learn};
pub use objective::Whole;
pub use pipeline::{MOST_AT_A_TIME, Offline, value_head};
pub use step::Lesson;
pub use written::{Written, read};

//! Offline training on given texts: answers, possibly labelled, or pairs of a better and a worse answer.
//!
//! `tokenized` tokenizes records. `objective` has the losses as functions of an answer's log-prob or scalar,
//! and `gradient` differentiates them through a model; RLVR's warm-up uses both. `ilql` has the loss of heads that learn
//! the values of tokens. `teacher` is the model that `distill` learns from. `pipeline` is the loop's pipeline, `step`
//! one step of it, `evaluate` its evaluation.

mod evaluate;
mod gradient;
mod ilql;
mod objective;
mod pipeline;
mod step;
mod teacher;
mod tokenized;

pub use gradient::{Batch, Pass, learn};
pub use objective::Whole;
pub use pipeline::{MOST_AT_A_TIME, Offline, value_head};
pub use step::Lesson;
pub use tokenized::{Tokenized, read};

//! Learning from texts that are there beforehand: answers, judged or not, or pairs of a better and a worse one.
//!
//! `written` turns records into tokens, `objective` has the losses as functions of an answer's log-prob or number, and
//! `learn` takes them through a model; RLVR's warm-up does the same. `teacher` is what `distill` learns from. `pipeline` is what the loop trains, `step` a turn of it, `evaluate`
//! how it is measured.

mod evaluate;
mod learn;
mod objective;
mod pipeline;
mod step;
mod teacher;
mod written;

pub use learn::{Batch, Pass, learn};
pub use objective::Whole;
pub use pipeline::{MOST_AT_A_TIME, Offline};
pub use step::Lesson;
pub use written::{Written, read};

//! Sampling from a model: shared by training's rollout and `anyroll generate`, `score` and `serve`.

mod episode;
mod format;
mod room;
mod sample;
mod sampler;
mod stop;

pub use episode::{AnswersTurns, Episode, Replies};
pub use format::{Formats, Spec, Vocabulary};
pub use room::Room;
pub use sample::Sample;
pub use sampler::{SampleRequest, Sampled, Sampler, Sampling};
pub use stop::{Texts, cut, stop_condition};

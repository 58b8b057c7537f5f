//! Sampling from a model: shared by training's rollout and `anyroll generate`, `score` and `serve`.

mod capacity;
mod episode;
mod format;
mod sample;
mod sampler;
mod stop;

pub use capacity::Capacity;
pub use episode::{AnswersTurns, Episode, Replies};
pub use format::{Formats, Spec, Vocabulary};
pub use sample::Sample;
pub use sampler::{SampleRequest, Sampled, Sampler, Sampling};
pub use stop::{Texts, cut, stop_condition};

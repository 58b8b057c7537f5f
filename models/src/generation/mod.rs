//! Generation: turns prompts into completions, with a KV cache in blocks and continuous batching.
//!
//! [`Engine`] is the only way to sample text, in training and elsewhere. It runs the same blocks as training,
//! and runs prompts packed with the same forward. Up to the rounding of matrix products of other sizes, a
//! completion depends only on its prompt and its seed, not on its batch.
//!
//! `engine` schedules sequences; `sequence` and `block_pool` place tokens in the cache; `model_runner` builds
//! a pass's inputs and reads its outputs; `prefix_cache` keeps ended samples for reuse. `recorder` replays
//! recorded steps without the host if the device can, and `kept` leaves them to the next engine; `sampling`
//! chooses a token, `format` restricts the choice, and `speculation` proposes tokens that one step checks.

mod block_pool;
mod engine;
mod format;
mod kept;
mod model_runner;
mod prefix_cache;
mod recorder;
mod request;
mod sampling;
mod sequence;
mod speculation;
mod top_logprobs;

pub use engine::{Engine, Limits, Load, SampleId};
pub use format::{Format, FormatTracker};
pub use kept::KeptSteps;
pub use request::{Completion, Ending, PolicySpan, Request, Sample, StopCondition};
pub use sampling::SamplingParams;
pub use speculation::{Speculated, Speculation};

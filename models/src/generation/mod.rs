//! Generation: prompts to completions, with a KV cache in blocks and sequences that come and go.
//!
//! [`Engine`] is the one way in which text is sampled, in training and elsewhere. It runs the blocks that training
//! runs, prompts by the same forward, packed. A completion depends on its prompt and its seed only, not on what shares
//! its batch, up to the rounding of matrix products of other sizes.
//!
//! `engine` says who runs when, `sequence` and `block_pool` where tokens lie, `pass` what a pass reads and what comes
//! out, `kept` what stays of a sample that has ended, `recorder` how steps run without the host where a device can,
//! `sampling` how a token is chosen, `format` among which.

mod block_pool;
mod engine;
mod format;
mod kept;
mod kv_cache;
mod likeliest;
mod pass;
mod recorder;
mod request;
mod sampling;
mod sequence;

pub use engine::{Engine, Limits, Load, SampleId};
pub use format::{Follow, Format};
pub use kv_cache::KvCache;
pub use request::{Completion, Ending, PolicySpan, Request, Sample, StopCondition};
pub use sampling::SamplingParams;

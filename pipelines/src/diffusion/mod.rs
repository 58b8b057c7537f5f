//! Reward training of flow-matching models: an image model is the loop's policy, a denoising step its action.
//!
//! [`Diffusion`] is the [loop](crate::train)'s pipeline. `step` is one step of it by any method, with the
//! common part of the methods; `backpropagation`, `policy_gradient` and `forward_process` are the methods,
//! and `loss` has their formulas. `subject` is the model with its prompts, `setup` has the roles and samples,
//! `decoder` decodes latents, `scorer` scores images (`quadrants`, `function`, `clip` and `aesthetic` are
//! rewards). `evaluate` is the evaluation and `warmup` the warm-up. `embed` encodes prompts, and `prompts`
//! writes their embeddings to a file.

mod aesthetic;
mod backpropagation;
mod clip;
mod decoder;
mod embed;
mod evaluate;
mod forward_process;
mod frames;
mod function;
mod loss;
mod noise;
mod pipeline;
mod policy_gradient;
mod prompts;
mod quadrants;
mod scorer;
mod setup;
mod shapes;
mod stats;
mod step;
mod subject;
mod warmup;

pub use clip::open as open_clip;
pub use embed::{EncoderOptions, PromptEncoders};
pub use pipeline::Diffusion;
pub use prompts::{PromptTexts, Prompts, digest, encode_own, encoded_in, open_encoders};
pub use scorer::load_script;
pub use setup::{Reference, Roles, Samples, Setup};
pub use shapes::{CLASSES, SIZE};
pub use subject::{dit_of, first_adapter, read_records};

//! Reward training of flow-matching models: the policy is an image model, and its action is a denoising step.
//!
//! [`Diffusion`] is the pipeline of the [loop](crate::train). `step` is one step of any method, with the methods'
//! common code. `backpropagation`, `policy_gradient` and `forward_process` are the methods, and `loss` has their
//! formulas. `image_model` is the image model with its prompts, and `task` has the options, divides samples among ranks
//! and draws them. `decoder` converts latents to pixels. `scorer` computes rewards, of which `quadrants`, `function`,
//! `clip` and `aesthetic` are kinds. `evaluate` measures the policy, and `warmup` is the supervised warm-up. `embed`
//! encodes prompts, and `prompts` writes the embeddings to a file.

mod aesthetic;
mod backpropagation;
mod clip;
mod decoder;
mod embed;
mod evaluate;
mod forward_process;
mod frames;
mod function;
mod image_model;
mod loss;
mod noise;
mod opened;
mod pipeline;
mod policy_gradient;
mod prompts;
mod quadrants;
mod scorer;
mod shapes;
mod stats;
mod step;
mod task;
mod warmup;

pub use clip::open as open_clip;
pub use embed::{EncoderOptions, PromptEncoders};
pub use image_model::{dit_of, read_records};
pub use opened::{EncodedTexts, Opened, PaintedTexts, PublishedModel};
pub use pipeline::Diffusion;
pub use prompts::{PromptTexts, Prompts, encode, encoded_in, open_encoders};
pub use scorer::load_script;
pub use shapes::SIZE;
pub use task::{ImageModels, ImageTask, Reference, Samples};

//! Reward training of flow-matching models: an image model is the loop's policy, a denoising step its action.
//!
//! [`Diffusion`] is what the [loop](crate::train) trains. `step` is one turn of it by any method, with what methods
//! have in common; `backpropagation`, `policy_gradient` and `forward_process` are the methods, `loss` has their
//! formulas. `subject` is what is painted and what with, `task` says who takes part and samples, `decoder` makes pixels
//! of what was sampled, `scorer` says what an image earns (`quadrants`, `function`, `clip` and `aesthetic` are rewards),
//! `evaluate` how the policy is measured and `warmup` what comes before. `embed` makes of prompts what is trained on, and
//! `prompts` a file of that.

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
mod opened;
mod pipeline;
mod policy_gradient;
mod prompts;
mod quadrants;
mod scorer;
mod shapes;
mod stats;
mod step;
mod subject;
mod task;
mod warmup;

pub use clip::open as open_clip;
pub use embed::{EncoderOptions, PromptEncoders};
pub use opened::{EncodedTexts, Opened, PaintedTexts, PublishedModel};
pub use pipeline::Diffusion;
pub use prompts::{PromptTexts, Prompts, encode, encoded_in, open_encoders};
pub use scorer::load_script;
pub use shapes::SIZE;
pub use subject::{dit_of, read_records};
pub use task::{ImageModels, ImageTask, Reference, Samples};

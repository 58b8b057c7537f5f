//! Inference: shared by training's rollout and `anyroll generate`, `score`, `serve` and `embed`.

mod device;
mod episode;
mod format;
mod loaded;
mod room;
mod sample;
mod sampler;
mod stop;

pub use device::DeviceChoice;
pub use episode::Episode;
pub use format::{Formats, Spec};
pub use loaded::{LoadedModel, Options, check_numbers};
pub use room::Room;
pub use sample::Sample;
pub use sampler::{Asked, Sampled, Sampler, Sampling};
pub use stop::{Texts, cut, stop_condition};

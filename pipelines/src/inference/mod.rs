//! Models in use: what training's rollout and `anyroll generate`, `score` and `serve` have in common.

mod loaded;
mod room;
mod stop;

pub use loaded::{LoadedModel, Options};
pub use room::Room;
pub use stop::{cut, stop_condition};

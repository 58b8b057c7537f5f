//! The safe types over the raw verbs of [`crate::Device`].

mod buffer;
mod graph;
pub(crate) mod stream;

pub use buffer::{Arena, Buffer, PinnedBuffer};
pub use graph::Graph;
pub use stream::{Event, Stream};

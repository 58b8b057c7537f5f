//! The safe types over the raw verbs of [`crate::Device`].

pub(crate) mod buffer;
pub(crate) mod graph;
pub(crate) mod stream;

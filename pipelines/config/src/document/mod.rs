//! A YAML file as a tree with positions, values that are read from it, and the problems that are reported at its fields.

mod de;
mod error;
mod problem;
mod stand_ins;
mod tree;

pub use de::{Reading, from_node};
pub use error::{Error, Invalid, Origin, Source, list, suggestion};
pub use problem::{Problem, Problems, Section};
pub use tree::{Entry, Node, Value};

//! The fields of a YAML file, their defaults and their ranges: [`Config`], and the tree with the positions of the
//! fields.
//!
//! Nothing here opens a file or queries the machine; `prepare` does both. Every error names the field, points at the
//! line or the `--set` to blame, and has a fix. `fields/schema.rs` has the top level, and most other files of `fields` a
//! section, which reports its problems to the [`Problems`] of the file.

#![forbid(unsafe_code)]

mod document;
pub mod error_chain;
mod fields;
mod include;
mod shorthand;

pub use document::{
    Error, Invalid, Node, Problem, Problems, Reading, Section, Source, from_node, list, suggestion,
};
pub use fields::*;
pub use include::{READY, include_strategies};
pub use shorthand::write_out;

impl Config {
    /// Returns the config as YAML with every field, defaults included; reading the YAML returns the same config.
    pub fn to_yaml(&self) -> String {
        serde_saphyr::to_string(self).expect("plain data can be written as YAML")
    }
}

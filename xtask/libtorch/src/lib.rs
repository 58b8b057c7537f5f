//! Where libtorch lies on a machine, and how the workspace links against it.
//!
//! Three programs ask the same questions and must agree on the answers: `xtask` when it sets up a checkout,
//! the build scripts when they link, and the `anyroll` launcher when it starts. This crate answers them with
//! the standard library alone, so that none of the three needs libtorch to run.

#![forbid(unsafe_code)]

mod link;
mod torch;

pub use link::link;
pub use torch::{Torch, Unusable};

/// The only release of libtorch that the workspace links against: `tch` and the C++ shim are compiled for its
/// headers, and C++ promises nothing across releases.
pub const VERSION: &str = "2.11.0";

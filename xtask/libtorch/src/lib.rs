//! Finds libtorch on a machine, and links the workspace to it.
//!
//! Three programs must agree on the answers: `xtask` when it sets up a checkout, the build scripts when they
//! link, and the `anyroll` launcher when it starts. This crate uses only the standard library, so that none
//! of the three needs libtorch to run.

#![forbid(unsafe_code)]

mod link;
mod torch;

pub use link::{BESIDE, link};
pub use torch::{Torch, Unusable};

/// The only release of libtorch that the workspace links to. `tch` and the C++ shim are compiled for its
/// headers, and C++ has no stable ABI across releases.
pub const VERSION: &str = "2.11.0";

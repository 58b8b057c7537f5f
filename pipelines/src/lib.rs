//! To come.

pub mod algorithm;
pub mod error_chain;
pub mod launch;

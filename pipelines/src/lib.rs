//! To come.

pub mod algorithm;
pub mod config;
pub mod data;
pub mod error_chain;
pub mod launch;
pub mod reward;

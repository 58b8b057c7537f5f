//! Config, data, rewards, algorithms and the loops that train; what a user starts, sees and keeps.
//!
//! Read in this order: [`config`] is what a YAML says and what it comes to on a machine, [`launch`] how its ranks
//! start and end, [`train`] the loop, [`rlvr`], [`offline`] and [`diffusion`] what it trains, with [`data`], [`reward`] and [`algorithm`]
//! beside it, and [`journal`] what it writes and shows. Only this crate reads YAML, environment and arguments.

#![forbid(unsafe_code)]

pub mod algorithm;
pub(crate) mod atomic_file;
mod base_model;
pub mod cli;
pub mod config;
pub mod data;
pub mod diffusion;
pub mod environment;
mod error;
pub mod error_chain;
mod export;
pub(crate) mod format;
pub mod headline;
pub mod import;
pub mod inference;
pub mod journal;
pub(crate) mod json_lines;
pub mod launch;
pub(crate) mod measure;
pub mod metrics;
pub mod offline;
pub mod output_error;
pub mod picture;
pub mod plan;
pub mod progress;
pub(crate) mod prometheus;
pub(crate) mod python;
pub mod report;
pub mod reward;
pub mod rlvr;
pub mod run_dir;
pub mod samples;
pub mod serve;
pub mod tensorboard;
pub mod train;

pub use error::{Error, Result};

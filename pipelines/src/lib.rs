//! Config, data, rewards, algorithms and the training loops, with their command line and output.
//!
//! Read in this order: [`config`] reads a YAML and resolves it on a machine, [`launch`] starts and ends the
//! ranks, [`train`] is the loop. [`rlvr`], [`offline`] and [`diffusion`] are its pipelines, with [`data`],
//! [`reward`] and [`algorithm`]; [`journal`] writes and shows the results. Only this crate reads YAML, the
//! environment and arguments.

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

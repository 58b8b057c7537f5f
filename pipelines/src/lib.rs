//! Config, data, rewards, algorithms and the training loops, with their command line and output.
//!
//! Read from the bottom up, each module uses only earlier ones: [`config`] has the fields of a YAML file, [`launch`] starts
//! ranks, and [`run`] has the types of a run on a machine; [`data`], [`algorithm`], [`reward`] and [`inference`] are parts of a
//! step, and [`journal`] writes its results; [`train`] is the loop, and [`rlvr`], [`offline`] and [`diffusion`] are pipelines;
//! [`opened`] has what a config names, and [`plan`] counts memory; [`prepare`] turns a YAML file into a run, and [`cli`] is the
//! command line. `tests/tidy.rs` refuses a ring. Only this crate reads YAML, environment and arguments.

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
pub mod failure;
pub(crate) mod format;
pub mod headline;
pub mod import;
pub mod inference;
pub mod journal;
pub(crate) mod json_lines;
pub mod launch;
pub mod loaded;
pub(crate) mod measure;
pub mod metrics;
pub mod offline;
pub mod opened;
pub mod output_error;
pub mod picture;
pub mod plan;
pub mod prepare;
pub mod progress;
pub(crate) mod prometheus;
pub(crate) mod python;
pub mod report;
pub mod reward;
pub mod rlvr;
pub mod run;
pub mod run_dir;
pub mod samples;
pub mod serve;
pub mod tensorboard;
pub mod train;

pub use error::{Error, Result};

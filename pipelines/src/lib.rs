//! The training loops over a config's parts: from a YAML file to a run folder.
//!
//! In reading order, each module uses only earlier ones. [`link`] connects processes, [`launch`] starts ranks, and [`run`] has the types of a run
//! on a machine. [`storage`] keeps files elsewhere. [`inference`] and [`environment`] are parts of a step, and [`journal`] writes its results. [`train`]
//! is the loop, and [`rlvr`], [`offline`] and [`diffusion`] are pipelines. [`opened`] has the files that a config
//! names, and [`plan`] computes memory. [`prepare`] turns a YAML file into a run. [`loaded`] opens a trained model, and
//! [`evaluation`] measures it. `tests/tidy.rs` refuses cycles.

#![forbid(unsafe_code)]

pub mod advice;
pub mod atomic_file;
pub mod base_model;
pub mod data_facts;
pub mod diffusion;
pub mod environment;
mod error;
mod error_rates;
pub mod evaluation;
pub mod export;
pub mod follow;
pub mod format;
pub mod headline;
pub mod hub;
pub mod inference;
pub mod journal;
pub mod json_lines;
pub mod launch;
pub mod link;
pub mod loaded;
pub mod measure;
pub mod metrics;
mod no_time;
pub mod offline;
pub mod opened;
pub mod output_error;
pub mod page;
pub mod picture;
pub mod plan;
pub mod prepare;
pub mod process_memory;
pub mod progress;
pub mod prometheus;
pub mod report;
pub mod rlvr;
pub mod run;
pub mod run_dir;
pub mod run_log;
mod sample_text;
pub mod samples;
pub mod storage;
pub mod tensorboard;
pub mod trackers;
pub mod train;

pub use error::{Error, Result};
pub use no_time::NoTime;

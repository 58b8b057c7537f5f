//! To come.
#![forbid(unsafe_code)]

pub(crate) mod atomic_file;
pub(crate) mod format;
pub mod headline;
pub(crate) mod json_lines;
pub mod metrics;
pub mod output_error;
pub mod progress;
pub mod report;
pub mod run_dir;
pub mod samples;
pub mod tensorboard;

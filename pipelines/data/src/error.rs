//! Errors of data.

use std::io;
use std::path::PathBuf;

use arrow_schema::ArrowError;

use super::TokenizerError;

/// Formats of data files, as messages list them.
pub const FORMATS: &str = ".jsonl, .json, .csv, .parquet or .arrow";

/// An error of a data file or of its records.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// The file cannot be read.
    #[error("cannot read the data file {}", path.display())]
    Read {
        /// The file.
        path: PathBuf,
        /// Cause.
        source: io::Error,
    },
    /// A line is not a valid record.
    #[error("{}:{line}: {message}", path.display())]
    Line {
        /// The file.
        path: PathBuf,
        /// The line, from 1.
        line: usize,
        /// The problem with the line.
        message: String,
    },
    /// The file's content does not match its extension.
    #[error("cannot read the table {}", path.display())]
    Table {
        /// The file.
        path: PathBuf,
        /// Cause.
        source: ArrowError,
    },
    /// The file is not fetched yet.
    #[error("{} is a Git LFS pointer, not the file itself: fetch it with `git lfs pull`", path.display())]
    Pointer {
        /// The file.
        path: PathBuf,
    },
    /// The file's extension is unknown.
    #[error("{} is not a data file: its name must end with {FORMATS}", path.display())]
    Format {
        /// The file.
        path: PathBuf,
    },
    /// A file is listed twice.
    #[error("{} is listed twice", path.display())]
    Twice {
        /// The file.
        path: PathBuf,
    },
    /// A record is too long, and `long_prompts: refuse` is set.
    #[error("{}, {row}: {problem}", path.display())]
    LongRecord {
        /// The file.
        path: PathBuf,
        /// The record.
        row: String,
        /// Its length and the limit.
        problem: String,
    },
    /// A prompt cannot be encoded.
    #[error(transparent)]
    Tokens(#[from] TokenizerError),
    /// The files have no record that is used.
    #[error(
        "there is no record in {names}{}",
        match (rows, of_domains) {
            (0, _) => ": empty".to_owned(),
            (_, 0) => format!(" that is of `domains`, of {rows}"),
            (_, read) => format!(" that is as short as allowed, of {read}"),
        }
    )]
    Empty {
        /// The files.
        names: String,
        /// All records, up to the first one that was not needed.
        rows: usize,
        /// Records of the domains that are read.
        of_domains: usize,
    },
    /// The held-out files have all prompts of the training files.
    #[error("`held_out` has all {prompts} prompts of the training files, so nothing is left to train on")]
    AllHeldOut {
        /// Distinct prompts of the training files.
        prompts: usize,
    },
    /// All records are held out, or none although evaluations need some.
    #[error("{held_out} of {records} records are held out: both training and evaluation need some")]
    Split {
        /// All records.
        records: usize,
        /// Held-out records.
        held_out: usize,
    },
    /// More held-out prompts are requested than exist.
    #[error("{asked} held-out prompts are requested, but only {available} exist")]
    TooFewHeldOut {
        /// Distinct prompts requested.
        asked: usize,
        /// Distinct prompts that are held out.
        available: usize,
    },
}

//! What can be wrong with data.

use std::io;
use std::path::PathBuf;

use arrow_schema::ArrowError;

use super::TokenizerError;

/// Data that cannot be used.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// The file cannot be read.
    #[error("cannot read the data file {}", path.display())]
    Read {
        /// The file.
        path: PathBuf,
        /// Why.
        source: io::Error,
    },
    /// A line is no record.
    #[error("{}:{line}: {message}", path.display())]
    Line {
        /// The file.
        path: PathBuf,
        /// The line, from 1.
        line: usize,
        /// What is wrong, and what a record is.
        message: String,
    },
    /// The file is not what its name says.
    #[error("cannot read the table {}", path.display())]
    Table {
        /// The file.
        path: PathBuf,
        /// Why.
        source: ArrowError,
    },
    /// The file's name does not say what it is.
    #[error("{} is neither .jsonl, .parquet nor .arrow", path.display())]
    Format {
        /// The file.
        path: PathBuf,
    },
    /// A file is named twice.
    #[error("{} is named twice", path.display())]
    Twice {
        /// The file.
        path: PathBuf,
    },
    /// A record is too long, and none may be.
    #[error("{}, {row}: {problem}", path.display())]
    LongRecord {
        /// The file.
        path: PathBuf,
        /// The record.
        row: String,
        /// How long it is, and how long it may be.
        problem: String,
    },
    /// A prompt cannot be put to the model.
    #[error(transparent)]
    Tokens(#[from] TokenizerError),
    /// Every record is held out, or none and some should be.
    #[error("of {records} records {held_out} are held out: both training and evaluation need some")]
    Split {
        /// All records.
        records: usize,
        /// Those that are held out.
        held_out: usize,
    },
    /// More held-out prompts are asked for than there are.
    #[error("{asked} held-out prompts are asked for, and there are {available}")]
    TooFewHeldOut {
        /// Distinct prompts asked for.
        asked: usize,
        /// Distinct prompts that are held out.
        available: usize,
    },
}

//! What can go wrong with the files of a run.

use std::io;
use std::path::{Path, PathBuf};

/// A result whose error is an [`OutputError`].
pub type Result<T> = std::result::Result<T, OutputError>;

/// What can go wrong with the files of a run. Each names the path, and what to do where there is a choice.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum OutputError {
    /// A new run would overwrite another.
    #[error(
        "{} already holds a run: continue it with `--resume {}`, or give another `--output`",
        path.display(), path.display()
    )]
    AlreadyARun {
        /// The folder asked for.
        path: PathBuf,
    },
    /// A new run would mix its files with others.
    #[error("{} is not empty and holds no run: give a new or an empty folder as `--output`", path.display())]
    NotEmpty {
        /// The folder asked for.
        path: PathBuf,
    },
    /// A run needs a folder, and there is something else.
    #[error("{} is not a folder: give a new or an empty folder as `--output`", path.display())]
    NotAFolder {
        /// The path asked for.
        path: PathBuf,
    },
    /// There is no run to resume.
    #[error(
        "{} holds no run (there is no {missing} in it): give the folder that a run has as its `--output`",
        path.display()
    )]
    NotARun {
        /// The folder asked for.
        path: PathBuf,
        /// The file that every run has.
        missing: &'static str,
    },
    /// Another process writes the run.
    #[error("another process goes on with the run in {}: wait for it, or end it first", path.display())]
    InUse {
        /// The folder asked for.
        path: PathBuf,
    },
    /// The operating system refused.
    #[error("cannot {action} {}", path.display())]
    Io {
        /// What was tried, as in "cannot write".
        action: &'static str,
        /// On which path.
        path: PathBuf,
        /// Why not.
        source: io::Error,
    },
    /// A line of a log that is not a record, before the last one, so not the mark of a killed process.
    #[error("{}, line {line}: not a record of this log; was the file edited?", path.display())]
    Malformed {
        /// The log.
        path: PathBuf,
        /// Counted from one.
        line: usize,
        /// What the parser says.
        source: serde_json::Error,
    },
}

impl OutputError {
    pub(crate) fn io(action: &'static str, path: &Path, source: io::Error) -> OutputError {
        OutputError::Io { action, path: path.to_owned(), source }
    }
}

//! Errors of reading and writing the files of a run.

use std::io;
use std::path::{Path, PathBuf};

/// A result whose error is an [`OutputError`].
pub type Result<T> = std::result::Result<T, OutputError>;

/// An error of a run's files. It names the path, and the choices to fix it.
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
    /// A new run would mix its files with other files.
    #[error("{} is not empty and holds no run: give a new or an empty folder as `--output`", path.display())]
    NotEmpty {
        /// The folder asked for.
        path: PathBuf,
    },
    /// The path of a run folder is not a folder.
    #[error("{} is not a folder: give a new or an empty folder as `--output`", path.display())]
    NotAFolder {
        /// The path asked for.
        path: PathBuf,
    },
    /// Metrics, reports and Python cannot name it.
    #[error("{} is not valid UTF-8: give another name as `--output`", path.display())]
    NotUtf8 {
        /// The path asked for.
        path: PathBuf,
    },
    /// There is no run to resume.
    #[error(
        "{} holds no run (there is no {missing} in it): give a run's `--output` folder",
        path.display()
    )]
    NotARun {
        /// The folder asked for.
        path: PathBuf,
        /// The file that every run has.
        missing: &'static str,
    },
    /// Another process is writing the run.
    #[error("another process is running the run in {}: wait for it, or stop it first", path.display())]
    InUse {
        /// The folder asked for.
        path: PathBuf,
    },
    /// The operating system refused.
    #[error("cannot {action} {}", path.display())]
    Io {
        /// The attempted action, as in "cannot write".
        action: &'static str,
        /// The path.
        path: PathBuf,
        /// Cause.
        source: io::Error,
    },
    /// A complete line of a log is not a record, so it is not the result of a killed process.
    #[error("{}, line {line}: not a record of this log; was the file edited?", path.display())]
    Malformed {
        /// The log.
        path: PathBuf,
        /// Line number, from 1.
        line: usize,
        /// The parser's error.
        source: serde_json::Error,
    },
}

impl OutputError {
    /// Makes the error of `action` on `path`.
    pub fn io(action: &'static str, path: &Path, source: io::Error) -> OutputError {
        OutputError::Io { action, path: path.to_owned(), source }
    }
}

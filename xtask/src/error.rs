//! Errors of commands. The first line is the reason, the rest is the fix.

use std::fmt;
use std::io;
use std::path::Path;

/// Error that ended a command.
#[derive(Debug)]
pub enum Error {
    /// The command line is wrong.
    Usage(String),
    /// Something is missing or failed.
    Reason(String),
    /// A started program failed and has printed the reason itself.
    Child {
        /// Its command line.
        command: String,
        /// Exit code to pass on.
        code: u8,
    },
}

pub type Result<T> = std::result::Result<T, Error>;

impl Error {
    /// Returns the error of a file operation.
    pub fn io(what: &str, path: &Path, source: io::Error) -> Self {
        Self::Reason(format!("cannot {what} {}: {source}", path.display()))
    }

    /// Returns the exit code of this process.
    pub fn exit_code(&self) -> u8 {
        match self {
            Self::Usage(_) => 2,
            Self::Reason(_) => 1,
            Self::Child { code, .. } => *code,
        }
    }
}

impl fmt::Display for Error {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Usage(message) | Self::Reason(message) => write!(f, "error: {message}"),
            Self::Child { command, code } => write!(f, "error: `{command}` ended with exit code {code}"),
        }
    }
}

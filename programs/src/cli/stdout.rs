//! Writes to standard output, whose reader may have closed it.

use std::{
    fmt::Display,
    io::{self, ErrorKind, Write},
    path::Path,
};

use anyroll_pipelines::{Result, output_error::OutputError};

/// Writes `text` to standard output and flushes it. Returns false if the reader has closed the pipe, as
/// `head` does.
///
/// # Errors
/// If it cannot be written, for example because the disk is full.
pub(super) fn print(text: impl Display) -> Result<bool> {
    let mut out = io::stdout().lock();
    match write!(out, "{text}").and_then(|()| out.flush()) {
        Ok(()) => Ok(true),
        Err(error) if error.kind() == ErrorKind::BrokenPipe => Ok(false),
        Err(source) => Err(OutputError::io("write", Path::new("standard output"), source).into()),
    }
}

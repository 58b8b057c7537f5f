//! Standard output, whose reader may go.

use std::{
    fmt::Display,
    io::{self, ErrorKind, Write},
    path::Path,
};

use crate::{Result, output_error::OutputError};

/// Writes `text` to standard output, at once; whether somebody reads on. Whoever reads may have had enough, as `head` does.
///
/// # Errors
/// If it could not be written, since the disk is full, say.
pub(super) fn print(text: impl Display) -> Result<bool> {
    let mut out = io::stdout().lock();
    match write!(out, "{text}").and_then(|()| out.flush()) {
        Ok(()) => Ok(true),
        Err(error) if error.kind() == ErrorKind::BrokenPipe => Ok(false),
        Err(source) => Err(OutputError::io("write", Path::new("standard output"), source).into()),
    }
}

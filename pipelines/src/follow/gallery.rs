//! Images of an image model, embedded in the page.

use std::fs;

use base64::{Engine as _, engine::general_purpose::STANDARD};
use serde::Serialize;

use crate::output_error::{OutputError, Result};
use crate::run_dir::RunDir;

/// Images of an evaluation.
#[derive(Debug, Serialize)]
pub struct Shot {
    /// Number of updates done.
    step: u64,
    /// The file, in base64.
    png: String,
}

/// The first, the middle and the last of `steps`.
pub(super) fn shown(steps: &[u64]) -> Vec<u64> {
    match steps {
        [first, .., last] if steps.len() > 3 => vec![*first, steps[steps.len() / 2], *last],
        _ => steps.to_vec(),
    }
}

/// Pictures of the evaluations at `steps`.
pub(super) fn read(run: &RunDir, steps: &[u64]) -> Result<Vec<Shot>> {
    let read = |&step: &u64| {
        let path = run.picture(step);
        let png = fs::read(&path).map_err(|source| OutputError::io("read", &path, source))?;
        Ok(Shot { step, png: STANDARD.encode(png) })
    };
    steps.iter().map(read).collect()
}

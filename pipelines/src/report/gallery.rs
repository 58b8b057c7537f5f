//! Images of an image model, embedded in the page.

use std::fs;

use base64::{Engine as _, engine::general_purpose::STANDARD};
use serde::Serialize;

use crate::output_error::{OutputError, Result};
use crate::run_dir::RunDir;

/// Images of an evaluation.
#[derive(Debug, Serialize)]
pub(super) struct Shot {
    /// Number of updates done.
    step: u64,
    /// The file, in base64.
    png: String,
}

/// Pictures of the first, the middle and the last evaluation, as far as they exist.
pub(super) fn gallery(run: &RunDir) -> Result<Vec<Shot>> {
    let mut steps = run.pictured_steps()?;
    if steps.len() > 3 {
        steps = vec![steps[0], steps[steps.len() / 2], steps[steps.len() - 1]];
    }
    let mut shots = Vec::with_capacity(steps.len());
    for step in steps {
        let path = run.picture(step);
        let png = fs::read(&path).map_err(|source| OutputError::io("read", &path, source))?;
        shots.push(Shot { step, png: STANDARD.encode(png) });
    }
    Ok(shots)
}

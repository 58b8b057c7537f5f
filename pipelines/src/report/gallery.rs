//! What a model of images painted, inside of the page.

use std::fs;

use base64::{Engine as _, engine::general_purpose::STANDARD};
use serde::Serialize;

use crate::output_error::{OutputError, Result};
use crate::run_dir::RunDir;

/// The picture of an evaluation.
#[derive(Debug, Serialize)]
pub(super) struct Shot {
    /// How many updates were done.
    step: u64,
    /// The file, in base64.
    png: String,
}

/// The pictures of the first evaluation, of the middle one and of the last one: as many as there are.
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

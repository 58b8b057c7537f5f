//! `anyroll upload`: sends the rest of a run to the trackers that its config names.

use std::path::PathBuf;

use anyroll_config::MetricsConfig;
use anyroll_pipelines::{Error, Result, prepare::Draft, run_dir::RunDir, trackers::Trackers};
use clap::Args;

use super::stdout::print;

/// The user sees that it waits, and may end it.
const TIMEOUT_S: f64 = 86_400.0;

#[derive(Debug, Args)]
pub(super) struct UploadArgs {
    /// A run folder whose config names trackers
    run: PathBuf,
}

pub(super) fn run(args: &UploadArgs) -> Result<u8> {
    let dir = RunDir::open(&args.run)?;
    let draft = Draft::read(&dir.resolved(), &[])?;
    let config = draft.config().filter(|config| config.metrics.has_trackers());
    let Some(config) = config else {
        let problem =
            "its config names no tracker: `anyroll export-wandb` writes a run for wandb without one";
        return Err(Error::Upload { problem: problem.to_owned() });
    };
    let _lock = dir.lock()?;
    let metrics = MetricsConfig { finish_timeout_s: TIMEOUT_S, ..config.metrics.clone() };
    let trackers = Trackers::start(&metrics, &dir, &config.name)?;
    let problems = trackers.finish(None, |line| eprintln!("{line}"));
    if !problems.is_empty() {
        return Err(Error::Upload { problem: problems.join("; ") });
    }
    print(format_args!("everything of {} is sent\n", args.run.display()))?;
    Ok(0)
}

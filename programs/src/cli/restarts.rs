//! Restarts of a run's ranks after a failure.

use std::{ffi::OsString, time::Duration};

use anyroll_config::error_chain::one_line;
use anyroll_pipelines::{
    json_lines,
    launch::{self, Interrupts, LaunchPlan, Outcome},
    run_dir::RunDir,
    run_log::{LogKind, RunLog},
    storage::Storage,
    train,
};

/// Time between a failure and the next start, in which a device's memory is given back.
pub(super) const PAUSE: Duration = Duration::from_secs(1);
const BEGINNING: &str = "the beginning";

/// Starts a job by `start`, and again after each failure, at most `most` times. `resumed` are the arguments of a start that
/// continues the run in `dir`, and the place from which it does, in words. `record` takes each failure.
///
/// A failure that repeats the one before it, at the same step, is not followed by another start.
pub(super) fn launch_with_restarts(
    mut plan: LaunchPlan,
    most: u32,
    dir: &RunDir,
    resumed: impl Fn() -> (Vec<OsString>, String),
    mut start: impl FnMut(&LaunchPlan, &mut Interrupts) -> Result<Outcome, launch::Error>,
    record: impl Fn(&launch::Error),
) -> Result<Outcome, launch::Error> {
    let mut interrupts = Interrupts::catch()?;
    let mut before: Option<Failure> = None;
    for restart in 1.. {
        let error = match start(&plan, &mut interrupts) {
            Ok(outcome) => return Ok(outcome),
            Err(error) => error,
        };
        record(&error);
        if most == 0 || error.is_final() {
            return Err(error);
        }
        let failure = Failure::of(&error, dir);
        if before.as_ref() == Some(&failure) {
            tell(dir, &format!("no restart: the ranks failed in the same way before, {}", failure.place()));
            return Err(error);
        }
        if restart > most {
            tell(dir, &format!("no restart: {most} were made"));
            return Err(error);
        }
        let (args, from) = resumed();
        tell(dir, &format!("{}; restart {restart} of {most}, from {from}", one_line(&error)));
        if interrupts.arrives_within(PAUSE) {
            return Ok(Outcome::Interrupted);
        }
        plan.args = args;
        before = Some(failure);
    }
    unreachable!("restarts end")
}

/// The place from which the next start continues, in words.
pub(super) fn newest(dir: &RunDir) -> String {
    // A folder that cannot be read is told by the ranks.
    let newest = dir.newest_checkpoint().unwrap_or_default();
    let name = newest.as_ref().and_then(|path| path.file_name());
    name.map_or(BEGINNING.to_owned(), |name| format!("checkpoint {}", name.display()))
}

/// The same for a run that continues from a store.
pub(super) fn newest_in(storage: &Storage) -> String {
    match train::newest(storage) {
        Ok(name) => name.map_or(BEGINNING.to_owned(), |name| format!("checkpoint {name}")),
        // A store that cannot be read is told by the ranks.
        Err(_) => "the newest checkpoint".to_owned(),
    }
}

/// Cause and place of a failure, whichever rank it was.
#[derive(PartialEq)]
struct Failure {
    cause: String,
    step: Option<u64>,
}

impl Failure {
    fn of(error: &launch::Error, dir: &RunDir) -> Self {
        // A log that cannot be read is told by the ranks.
        let step = json_lines::last_step(&dir.metrics()).unwrap_or_default();
        Self { cause: error.cause(), step }
    }

    fn place(&self) -> String {
        self.step.map_or("before its first step".to_owned(), |step| format!("after step {step}"))
    }
}

/// Writes a line to the terminal and to the run's log.
pub(super) fn tell(dir: &RunDir, text: &str) {
    tracing::warn!("{text}");
    write_to_log(dir, LogKind::Line, text);
}

/// Writes a line on a failure to the run's log.
pub(super) fn write_to_log(dir: &RunDir, kind: LogKind, text: &str) {
    let written = RunLog::open(&dir.log()).map(|mut log| log.append(kind, text));
    if !matches!(written, Ok(Ok(()))) {
        tracing::warn!(run = %dir.path().display(), "the failure could not be written to the run's log");
    }
}

//! Trackers: Weights & Biases, trackio and MLflow get a run's metrics, samples and advice while the run continues.
//!
//! Each is a Python process that follows the files of the run folder, and calls its package's own interface. Training
//! writes these files anyway, so that it never waits for a tracker: one that fails or hangs is told, and nothing is lost
//! that cannot be sent later. The supervisor of all Python processes ends a tracker with this process.

mod process;

use std::{
    fs,
    path::{Path, PathBuf},
    time::{Duration, Instant},
};

use anyroll_config::{MetricsConfig, WandbConfig};
use serde_json::{Value, json};

use crate::{Error, Result, atomic_file::write_atomic, output_error::OutputError, run_dir::RunDir};
pub use process::missing_packages;
use process::{Asked, Tracker};

/// Time that trackers have if the run fails: the other ranks and the launcher wait for it.
const FAILED_TIMEOUT: Duration = Duration::from_secs(3);

/// Ending of a run, as trackers show it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum State {
    /// All steps are done.
    Finished,
    /// The run was interrupted, and may continue.
    Interrupted,
    /// The run ended with an error.
    Failed,
}

impl State {
    fn name(self) -> &'static str {
        match self {
            Self::Finished => "finished",
            Self::Interrupted => "interrupted",
            Self::Failed => "failed",
        }
    }
}

/// The trackers of a run. Without [`Self::finish`] the run is taken as failed.
#[derive(Debug)]
pub struct Trackers {
    all: Vec<Tracker>,
    timeout: Duration,
    folder: PathBuf,
}

impl Trackers {
    /// Starts the trackers of `config` for the run in `dir` with its `name`. A tracker that does not start is told by
    /// [`Self::news`].
    ///
    /// # Errors
    /// If the resolved config cannot be read, or the folder of the trackers cannot be created.
    pub fn start(config: &MetricsConfig, dir: &RunDir, name: &str) -> Result<Self> {
        let folder = whole(dir.path());
        let resolved = resolved(dir)?;
        if config.has_trackers() {
            let notes = dir.trackers();
            fs::create_dir_all(&notes).map_err(|source| OutputError::io("create", &notes, source))?;
        }
        let fields = json!(config);
        let start = |kind| {
            let notes = folder.join("trackers").join(kind);
            let log = notes.with_extension("log");
            let asked = Asked {
                kind,
                fields: fields[kind].clone(),
                name: name.into(),
                id: None,
                config: &resolved,
                folder: &folder,
                notes: Some(notes),
            };
            Tracker::start(&config.python, &asked, Some(log))
        };
        let all = config.trackers().map(start).collect();
        Ok(Self { all, timeout: Duration::from_secs_f64(config.finish_timeout_s), folder })
    }

    /// Lines to show that came since the last call: addresses, and trackers that failed.
    pub fn news(&mut self) -> Vec<String> {
        self.all.iter_mut().flat_map(Tracker::news).collect()
    }

    /// Lets the trackers send the rest, with a deadline. Without a `state` the run keeps the one it had there. Lines to
    /// show while it waits go to `say`. Returns a line for each tracker that did not get everything.
    pub fn finish(mut self, state: Option<State>, mut say: impl FnMut(&str)) -> Vec<String> {
        let deadline = Instant::now() + self.timeout;
        for line in self.end(state, deadline) {
            say(&line);
        }
        let folder = self.folder.display();
        let failed = self.all.drain(..).filter_map(|it| Some((it.kind(), it.problem()?.to_owned())));
        failed
            .map(|(kind, problem)| {
                format!("{kind} did not get everything: {problem}; `anyroll upload {folder}` sends the rest")
            })
            .collect()
    }

    fn end(&mut self, state: Option<State>, deadline: Instant) -> Vec<String> {
        let state = self.ended(state);
        self.all.iter().for_each(|tracker| tracker.end(&state));
        self.all.iter_mut().flat_map(|tracker| tracker.wait(deadline)).collect()
    }

    /// Keeps the state in a file for a later upload, which has none and reads it.
    fn ended(&self, state: Option<State>) -> String {
        let file = self.folder.join("trackers/ended");
        let Some(state) = state else {
            return fs::read_to_string(&file).unwrap_or_else(|_| State::Interrupted.name().to_owned());
        };
        if let Err(error) = write_atomic(&file, state.name().as_bytes()) {
            tracing::warn!(%error, "a later `anyroll upload` will not know how the run ended");
        }
        state.name().to_owned()
    }
}

impl Drop for Trackers {
    fn drop(&mut self) {
        // After `finish` none is left.
        if !self.all.is_empty() {
            self.end(Some(State::Failed), Instant::now() + FAILED_TIMEOUT);
        }
    }
}

/// Writes a run for Weights & Biases as a whole, with `fields`, by the interpreter `python`. Its id is the folder's name,
/// so that a second call continues the same run. Returns lines to show.
///
/// # Errors
/// If the run cannot be read, or the tracker fails.
pub fn export_wandb(dir: &RunDir, python: &str, fields: &WandbConfig) -> Result<Vec<String>> {
    /// The user sees its output, and may end it.
    const TIMEOUT: Duration = Duration::from_secs(86_400);
    let (folder, config) = (whole(dir.path()), resolved(dir)?);
    let id = folder.file_name().unwrap_or_default().to_string_lossy();
    let id: String = id.chars().map(|it| if it.is_ascii_alphanumeric() { it } else { '-' }).collect();
    let asked = Asked {
        kind: "wandb",
        fields: json!(fields),
        name: config["name"].clone(),
        id: Some(id),
        config: &config,
        folder: &folder,
        notes: None,
    };
    let mut tracker = Tracker::start(python, &asked, None);
    tracker.end(State::Finished.name());
    let told = tracker.wait(Instant::now() + TIMEOUT);
    match tracker.problem() {
        None => Ok(told),
        Some(problem) => Err(Error::Wandb { python: python.into(), problem: problem.to_owned() }),
    }
}

/// The run's resolved config. It is not validated, since its data may be gone.
fn resolved(dir: &RunDir) -> Result<Value> {
    let path = dir.resolved();
    let broken = |problem: String| Error::Resume { run: path.clone(), problem };
    let text = fs::read_to_string(&path).map_err(|error| broken(error.to_string()))?;
    serde_saphyr::from_str(&text).map_err(|error| broken(error.to_string()))
}

fn whole(path: &Path) -> PathBuf {
    path.canonicalize().unwrap_or_else(|_| path.to_owned())
}

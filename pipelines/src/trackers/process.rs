//! The Python process of a tracker.

use std::{
    fs::File,
    io::{Read, Seek, SeekFrom},
    path::{Path, PathBuf},
    sync::mpsc::{self, Receiver, RecvTimeoutError},
    time::{Duration, Instant},
};

use anyroll_reward::process::Process;
use serde::{Deserialize, Serialize};
use serde_json::{Value, json};

const PROGRAM: &str = include_str!("tracker.py");

/// Program that tells which of the packages in its arguments are missing. A folder of the same name, such as `wandb/` with
/// offline runs, is no package.
const PACKAGES: &str = "
_, say = messages()
specs = {name: importlib.util.find_spec(name) for name in sys.argv[1:]}
say(missing=[name for name, spec in specs.items() if spec is None or spec.origin is None])
";

/// Wait for Python to look for packages.
const PACKAGES_TIMEOUT: Duration = Duration::from_secs(60);

/// A tracker's process and its messages.
#[derive(Debug)]
pub(super) struct Tracker {
    kind: &'static str,
    /// `None` if it did not start.
    process: Option<Process>,
    /// Messages; `None` for the end of the process.
    heard: Receiver<Option<String>>,
    /// File of its output.
    log: Option<PathBuf>,
    status: Status,
}

#[derive(Debug, PartialEq)]
enum Status {
    Sends,
    Done,
    Failed(String),
}

/// First message to a tracker, which tells it what to follow.
#[derive(Serialize)]
pub(super) struct Asked<'a> {
    /// Name of the tracker.
    pub kind: &'static str,
    /// Its fields in the config.
    pub fields: Value,
    /// Name of the run.
    pub name: Value,
    /// Id of the run there; `None` for the one in the notes, or a new one.
    pub id: Option<String>,
    /// The resolved config.
    pub config: &'a Value,
    /// The run folder.
    pub folder: &'a Path,
    /// Path of the tracker's own file without its ending; `None` to keep nothing.
    pub notes: Option<PathBuf>,
}

/// A message of a tracker.
#[derive(Deserialize)]
#[serde(rename_all = "snake_case")]
enum Message {
    Told(String),
    Error(String),
    Done(()),
}

impl Tracker {
    /// Starts a tracker with its first message. Its output is in the file `log`, or in this process's own.
    pub(super) fn start(python: &str, asked: &Asked, log: Option<PathBuf>) -> Self {
        let (told, heard) = mpsc::channel();
        let failed = told.clone();
        let process = Process::start(python, PROGRAM, &[], move |line| drop(told.send(line)));
        let process = match process {
            Ok(process) => {
                process.say(json!(asked).to_string());
                Some(process)
            }
            Err(failure) => {
                let _ = failed.send(Some(json!({"error": failure.to_string()}).to_string()));
                None
            }
        };
        Self { kind: asked.kind, process, heard, log, status: Status::Sends }
    }

    pub(super) fn kind(&self) -> &'static str {
        self.kind
    }

    /// The reason why it did not get everything.
    pub(super) fn problem(&self) -> Option<&str> {
        if let Status::Failed(problem) = &self.status { Some(problem) } else { None }
    }

    /// Lines to show that came since the last call.
    pub(super) fn news(&mut self) -> Vec<String> {
        let mut news = Vec::new();
        while self.status == Status::Sends
            && let Ok(line) = self.heard.try_recv()
        {
            news.extend(self.take(line));
        }
        news
    }

    /// Says that the files have all their lines.
    pub(super) fn end(&self, state: &str) {
        if let Some(process) = &self.process {
            process.say(json!({"end": state}).to_string());
        }
    }

    /// Waits until it is done, has failed or the deadline has passed. Returns lines to show.
    pub(super) fn wait(&mut self, deadline: Instant) -> Vec<String> {
        let started = Instant::now();
        let mut news = Vec::new();
        while self.status == Status::Sends {
            match self.heard.recv_timeout(deadline.saturating_duration_since(Instant::now())) {
                Ok(line) => news.extend(self.take(line)),
                Err(RecvTimeoutError::Disconnected) => news.extend(self.take(None)),
                Err(RecvTimeoutError::Timeout) => {
                    let waited = deadline.saturating_duration_since(started).as_secs_f64();
                    self.status = Status::Failed(format!("it was not done within {waited:.0} s"));
                }
            }
        }
        news
    }

    /// Takes a message, and returns the line to show.
    fn take(&mut self, line: Option<String>) -> Option<String> {
        let kind = self.kind;
        let problem = match line.as_deref().map(serde_json::from_str) {
            Some(Ok(Message::Told(text))) => return Some(format!("{kind}: {text}")),
            Some(Ok(Message::Done(()))) => {
                self.status = Status::Done;
                return None;
            }
            Some(Ok(Message::Error(error))) => error,
            Some(Err(error)) => format!("it wrote `{}`: {error}", line.unwrap_or_default()),
            None => match self.log.as_deref().and_then(last_line) {
                Some(words) => format!("its process ended: {words}"),
                None => "its process ended".to_owned(),
            },
        };
        let log = self.log.iter().map(|log| format!("; its output is in {}", log.display()));
        let told = format!("warning: {kind} gets no more of this run: {problem}{}", log.collect::<String>());
        self.status = Status::Failed(problem);
        Some(told)
    }
}

/// Names of `packages` that the environment of `python` lacks.
///
/// # Errors
/// If Python does not start, or does not answer.
pub fn missing_packages(python: &str, packages: &[&str]) -> Result<Vec<String>, String> {
    #[derive(Deserialize)]
    struct Answer {
        missing: Vec<String>,
    }
    let (told, heard) = mpsc::channel();
    let args: Vec<_> = packages.iter().map(std::ffi::OsStr::new).collect();
    let process = Process::start(python, PACKAGES, &args, move |line| drop(told.send(line)));
    let mut process = process.map_err(|failure| failure.to_string())?;
    match heard.recv_timeout(PACKAGES_TIMEOUT) {
        Ok(Some(line)) => {
            serde_json::from_str(&line).map(|it: Answer| it.missing).map_err(|it| it.to_string())
        }
        Ok(None) | Err(RecvTimeoutError::Disconnected) => Err(process.how_it_ended().to_string()),
        Err(RecvTimeoutError::Timeout) => {
            Err(format!("`{python}` did not answer within {} s", PACKAGES_TIMEOUT.as_secs()))
        }
    }
}

/// The last line of a log that is not empty.
fn last_line(log: &Path) -> Option<String> {
    const TAIL: u64 = 4096;
    let mut file = File::open(log).ok()?;
    let length = file.metadata().ok()?.len();
    file.seek(SeekFrom::Start(length.saturating_sub(TAIL))).ok()?;
    let mut bytes = Vec::new();
    file.read_to_end(&mut bytes).ok()?;
    let text = String::from_utf8_lossy(&bytes);
    text.lines().rev().map(str::trim).find(|line| !line.is_empty()).map(str::to_owned)
}

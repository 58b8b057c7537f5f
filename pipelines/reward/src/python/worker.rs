//! A Python process that scores completions, with messages as lines of JSON.

use std::collections::BTreeMap;
use std::ffi::OsStr;
use std::sync::mpsc::{self, Receiver, RecvTimeoutError};
use std::time::Duration;

use anyroll_config::PythonConfig;
use serde::Deserialize;
use serde_json::Value;

use super::{Failure, Logged};
use crate::process::{Process, absolute};

const PROGRAM: &str = include_str!("worker.py");

/// A process that has loaded the user's function.
#[derive(Debug)]
pub(super) struct Worker {
    process: Process,
    lines: Receiver<String>,
    /// Parameters of the function that have no default.
    pub(super) needs: Vec<String>,
}

/// Answer of the function.
#[derive(Debug, PartialEq)]
pub(super) enum Answer {
    Score(f64, Logged),
    /// The function excluded the image.
    Refused,
    /// Message of an exception.
    Error(String),
}

/// A line of a worker's output.
#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct Line {
    #[serde(default)]
    ready: bool,
    #[serde(default)]
    needs: Vec<String>,
    score: Option<f64>,
    #[serde(default)]
    refused: bool,
    #[serde(default)]
    metrics: Vec<(String, f64)>,
    #[serde(default)]
    columns: BTreeMap<String, Value>,
    error: Option<String>,
}

impl Worker {
    /// Starts Python and waits until it has loaded the function.
    pub(super) fn start(config: &PythonConfig) -> Result<Self, Failure> {
        let (path, images) = (absolute(&config.path), config.images.unwrap_or_default().name());
        let words = [config.function.as_str(), config.signature.name(), images].map(OsStr::new);
        let args = [&[path.as_os_str()], &words[..]].concat();
        let (told, lines) = mpsc::channel();
        // The end of the output drops the sender, which ends the receiver.
        let hear = move |line: Option<String>| line.into_iter().for_each(|line| drop(told.send(line)));
        let process = Process::start(&config.python, PROGRAM, &args, hear)?;
        let mut worker = Self { process, lines, needs: Vec::new() };
        let said = worker.line(Duration::from_secs_f64(config.start_timeout_s))?;
        match said {
            Line { ready: true, needs, .. } => Ok(Self { needs, ..worker }),
            Line { error, .. } => {
                let why = error.unwrap_or_default();
                Err(format!("{} does not load: {why}", config.path.display()).into())
            }
        }
    }

    /// Sends a case, a line of JSON, and waits for its score.
    pub(super) fn ask(&mut self, case: String, timeout: Duration) -> Result<Answer, Failure> {
        self.process.say(case);
        match self.line(timeout)? {
            Line { score: Some(score), metrics, columns, .. } => {
                Ok(Answer::Score(score, Logged { metrics, columns }))
            }
            Line { refused: true, .. } => Ok(Answer::Refused),
            Line { error: Some(error), .. } => Ok(Answer::Error(error)),
            _ => Err("the worker answered without a score".into()),
        }
    }

    fn line(&mut self, timeout: Duration) -> Result<Line, Failure> {
        match self.lines.recv_timeout(timeout) {
            Ok(text) => serde_json::from_str(&text)
                .map_err(|error| format!("the worker wrote `{text}`: {error}").into()),
            Err(RecvTimeoutError::Timeout) => Err(Failure::TimedOut(timeout)),
            Err(RecvTimeoutError::Disconnected) => Err(self.process.how_it_ended()),
        }
    }
}

//! A Python process that scores completions, spoken with in lines of JSON.

use std::io::{BufRead, BufReader, Write};
use std::process::{Child, Command, Stdio};
use std::sync::mpsc::{self, Receiver, RecvTimeoutError, Sender};
use std::thread;
use std::time::Duration;

use serde::Deserialize;

use super::{Failure, absolute};
use crate::config::PythonConfig;

const PROGRAM: &str = include_str!("worker.py");

/// A process that has the user's function loaded.
#[derive(Debug)]
pub(super) struct Worker {
    child: Child,
    cases: Sender<String>,
    lines: Receiver<String>,
}

/// What the function made of a completion.
#[derive(Debug, PartialEq)]
pub(super) enum Answer {
    Score(f64),
    /// The image is not to count.
    Refused,
    /// It raised this.
    Error(String),
}

/// A line of a worker's.
#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct Line {
    #[serde(default)]
    ready: bool,
    score: Option<f64>,
    #[serde(default)]
    refused: bool,
    error: Option<String>,
}

impl Worker {
    /// Starts Python and waits until it has the function.
    pub(super) fn start(config: &PythonConfig) -> Result<Self, Failure> {
        let mut child = Command::new(&config.python)
            .args(["-c", PROGRAM])
            .arg(absolute(&config.path))
            .args([config.function.as_str(), config.signature.name()])
            .arg(config.images.unwrap_or_default().name())
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .spawn()
            .map_err(|error| format!("`{}` does not start: {error}", config.python))?;
        let mut input = child.stdin.take().expect("a pipe");
        let output = BufReader::new(child.stdout.take().expect("a pipe"));
        let (line, lines) = mpsc::channel();
        let (cases, waiting) = mpsc::channel::<String>();
        // Both go on until the process ends, so that a wait for it can have a deadline: to read a line, and to be rid of a
        // case that is larger than a pipe.
        thread::spawn(move || output.lines().map_while(Result::ok).try_for_each(|text| line.send(text)));
        thread::spawn(move || waiting.iter().try_for_each(|case| input.write_all(case.as_bytes())));
        let mut worker = Self { child, cases, lines };
        let said = worker.line(Duration::from_secs_f64(config.start_timeout_s))?;
        match said {
            Line { ready: true, .. } => Ok(worker),
            Line { error, .. } => {
                let why = error.unwrap_or_default();
                Err(format!("{} does not load: {why}", config.path.display()).into())
            }
        }
    }

    /// Hands over a case, a line of JSON with its end, and waits for what it scores.
    pub(super) fn ask(&mut self, case: String, timeout: Duration) -> Result<Answer, Failure> {
        // A process that has died reads nothing; why is said below.
        let _ = self.cases.send(case);
        match self.line(timeout)? {
            Line { score: Some(score), .. } => Ok(Answer::Score(score)),
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
            Err(RecvTimeoutError::Disconnected) => {
                // It has ended, or closed its output and does not.
                let _ = self.child.kill();
                let status = self.child.wait().map_err(|error| error.to_string())?;
                Err(format!("the Python process ended with {status}").into())
            }
        }
    }
}

impl Drop for Worker {
    fn drop(&mut self) {
        // Both fail for one that has ended.
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

//! A process in which episodes live, one at a time.

use std::ffi::OsStr;
use std::sync::mpsc::Sender;
use std::time::Duration;

use serde::{Deserialize, Serialize};
use serde_json::{Map, Value};

use crate::config::EnvironmentConfig;
use crate::data::Record;
use crate::failure::Failure;
use crate::python::{Process, absolute};

const PROGRAM: &str = include_str!("worker.py");

/// A line of a worker's, by its number; nothing once there will be no more.
pub(super) type Heard = (u64, Option<String>);

/// A process that has the user's class, or is about to.
#[derive(Debug)]
pub(super) struct Worker {
    /// Of no other one, ever.
    pub number: u64,
    process: Process,
    /// It has not said yet that it has the class.
    is_starting: bool,
    /// It said that it says no more.
    is_gone: bool,
}

/// What a worker is told.
#[derive(Serialize)]
#[serde(rename_all = "snake_case")]
enum Told<'a> {
    Reset { prompt: &'a str, answer: &'a str, messages: &'a [Value], columns: &'a Map<String, Value> },
    Step(&'a str),
}

/// What it says of that.
#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct Said {
    #[serde(default)]
    ready: bool,
    error: Option<String>,
    /// What the model reads next.
    pub observation: Option<String>,
    /// Whether the episode has ended.
    #[serde(default)]
    pub done: bool,
    /// What the turn earned.
    pub reward: Option<f64>,
}

impl Worker {
    /// Starts Python. What it writes goes to `heard`, behind its `number`.
    pub fn start(config: &EnvironmentConfig, number: u64, heard: Sender<Heard>) -> Result<Self, Failure> {
        let path = absolute(&config.path);
        let args = [path.as_os_str(), OsStr::new(&config.class)];
        // Who listened may have gone.
        let hear = move |line| drop(heard.send((number, line)));
        let process = Process::start(&config.python, PROGRAM, &args, hear)?;
        Ok(Self { number, process, is_starting: true, is_gone: false })
    }

    /// Begins an episode.
    pub fn reset(&self, Record { prompt, answer, messages, columns, .. }: &Record) {
        self.tell(&Told::Reset { prompt, answer, messages, columns });
    }

    /// Tells the episode what the model wrote.
    pub fn step(&self, text: &str) {
        self.tell(&Told::Step(text));
    }

    fn tell(&self, told: &Told) {
        self.process.say(serde_json::to_string(told).expect("plain data"));
    }

    /// How long it may take for what it says next.
    pub fn patience(&self, config: &EnvironmentConfig) -> Duration {
        let seconds = if self.is_starting { config.start_timeout_s } else { config.timeout_s };
        Duration::from_secs_f64(seconds)
    }

    /// Reads a line: what it says of what it was told, or nothing, if that is still to come.
    ///
    /// # Errors
    /// That it has ended, or what went wrong with what it was told.
    pub fn hear(&mut self, line: Option<&str>) -> Result<Option<Said>, Failure> {
        let Some(line) = line else {
            self.is_gone = true;
            return Err(self.process.how_it_ended());
        };
        let said: Said =
            serde_json::from_str(line).map_err(|error| format!("the process wrote `{line}`: {error}"))?;
        if let Some(error) = said.error {
            return Err(error.into());
        }
        if said.ready {
            self.is_starting = false;
            return Ok(None);
        }
        Ok(Some(said))
    }

    /// Whether it can have another episode.
    pub fn is_of_use(&self) -> bool {
        !self.is_starting && !self.is_gone
    }
}

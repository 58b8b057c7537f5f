//! A process that runs episodes, one at a time.

use std::ffi::OsStr;
use std::sync::mpsc::Sender;
use std::time::Duration;

use anyroll_config::EnvironmentConfig;
use anyroll_data::Record;
use anyroll_reward::Failure;
use anyroll_reward::process::{Process, absolute};
use serde::{Deserialize, Serialize};
use serde_json::{Map, Value};

const PROGRAM: &str = include_str!("worker.py");

/// A worker's number with a line of its output, or `None` once it has ended.
pub(super) type Output = (u64, Option<String>);

/// A process that has loaded the user's class, or is loading it.
#[derive(Debug)]
pub(super) struct Worker {
    /// Unique number.
    pub number: u64,
    process: Process,
    /// The class is not loaded yet.
    is_starting: bool,
    /// Its output has ended.
    is_gone: bool,
    /// Parameters of `reset` that have no default, once the class is loaded.
    pub needs: Vec<String>,
}

/// Message to a worker.
#[derive(Serialize)]
#[serde(rename_all = "snake_case")]
enum Request<'a> {
    Reset { prompt: &'a str, answer: &'a str, messages: &'a [Value], columns: &'a Map<String, Value> },
    Step(&'a str),
}

/// Answer of a worker.
#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct Answer {
    #[serde(default)]
    ready: bool,
    #[serde(default)]
    needs: Vec<String>,
    error: Option<String>,
    /// Text that the model reads next.
    pub observation: Option<String>,
    /// True if the episode has ended.
    #[serde(default)]
    pub done: bool,
    /// Reward of the turn.
    pub reward: Option<f64>,
}

impl Worker {
    /// Starts Python. Its output lines go to `heard`, with its `number`.
    pub fn start(config: &EnvironmentConfig, number: u64, heard: Sender<Output>) -> Result<Self, Failure> {
        let path = absolute(&config.path);
        let args = [path.as_os_str(), OsStr::new(&config.class)];
        // The receiver may be gone.
        let hear = move |line| drop(heard.send((number, line)));
        let process = Process::start(&config.python, PROGRAM, &args, hear)?;
        Ok(Self { number, process, is_starting: true, is_gone: false, needs: Vec::new() })
    }

    /// Starts an episode.
    pub fn reset(&self, Record { prompt, answer, messages, columns, .. }: &Record) {
        self.tell(&Request::Reset { prompt, answer, messages, columns });
    }

    /// Sends the model's text to the episode.
    pub fn step(&self, text: &str) {
        self.tell(&Request::Step(text));
    }

    fn tell(&self, told: &Request) {
        self.process.say(serde_json::to_string(told).expect("plain data"));
    }

    /// Time limit of the next answer.
    pub fn patience(&self, config: &EnvironmentConfig) -> Duration {
        let seconds = if self.is_starting { config.start_timeout_s } else { config.timeout_s };
        Duration::from_secs_f64(seconds)
    }

    /// Parses a line: an answer, or `None` if the line only reports that the class is loaded.
    ///
    /// # Errors
    /// If the process has ended, or failed on the last message.
    pub fn hear(&mut self, line: Option<&str>) -> Result<Option<Answer>, Failure> {
        let Some(line) = line else {
            self.is_gone = true;
            return Err(self.process.how_it_ended());
        };
        let said: Answer =
            serde_json::from_str(line).map_err(|error| format!("the process wrote `{line}`: {error}"))?;
        if let Some(error) = said.error {
            return Err(error.into());
        }
        if said.ready {
            self.is_starting = false;
            self.needs = said.needs;
            return Ok(None);
        }
        Ok(Some(said))
    }

    /// Returns true if it can run another episode.
    pub fn is_of_use(&self) -> bool {
        !self.is_starting && !self.is_gone
    }
}

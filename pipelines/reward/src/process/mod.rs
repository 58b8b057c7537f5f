//! Processes that run the user's Python, with messages as lines of JSON.

use std::ffi::OsStr;
use std::io::{BufRead, BufReader, Write};
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, ExitStatus, Stdio};
use std::sync::mpsc::{self, Sender};
use std::thread;
use std::time::{Duration, Instant};

use nix::sys::signal::{Signal, killpg};
use nix::unistd::Pid;

use crate::Failure;

/// Script that every process starts with: its supervisor, which ends it and all that it has started.
const SUPERVISOR: &str = include_str!("supervisor.py");

/// Script that follows: the user's file and messages.
const USER: &str = include_str!("user.py");

/// Time that the supervisor has to end the user's code.
const END_TIMEOUT: Duration = Duration::from_secs(2);

/// A process, ended with all that it has started when this is dropped, or when this program ends for any reason.
#[derive(Debug)]
pub struct Process {
    child: Child,
    input: Sender<String>,
}

impl Process {
    /// Starts `program`, preceded by `user.py`, with `args`. A thread passes each line of its output to
    /// `hear`, then `None` once it has ended.
    ///
    /// # Errors
    /// If the interpreter `python` does not start.
    pub fn start(
        python: &str,
        program: &str,
        args: &[&OsStr],
        mut hear: impl FnMut(Option<String>) + Send + 'static,
    ) -> Result<Self, Failure> {
        let mut child = Command::new(python)
            .args(["-c", &format!("{SUPERVISOR}\n{USER}\n{program}")])
            .args(args)
            // Signals of a terminal or launcher are for anyroll alone.
            .process_group(0)
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .spawn()
            .map_err(|error| format!("`{python}` does not start: {error}"))?;
        let mut stdin = child.stdin.take().expect("a pipe");
        let stdout = BufReader::new(child.stdout.take().expect("a pipe"));
        let (input, waiting) = mpsc::channel::<String>();
        // Both threads live until the process ends, so that a caller can wait with a deadline: one reads
        // lines, the other writes lines larger than a pipe.
        thread::spawn(move || {
            stdout.lines().map_while(Result::ok).for_each(|line| hear(Some(line)));
            hear(None);
        });
        thread::spawn(move || waiting.iter().try_for_each(|line| stdin.write_all(line.as_bytes())));
        Ok(Self { child, input })
    }

    /// Sends a line, given without its newline. A process that has ended ignores it.
    pub fn say(&self, line: String) {
        let _ = self.input.send(line + "\n");
    }

    /// Ends the process and reports how it ended. It has ended already, or has closed its output.
    pub fn how_it_ended(&mut self) -> Failure {
        let ended = match self.ends_within(END_TIMEOUT) {
            None => self.end(),
            ended => ended,
        };
        match ended {
            Some(status) => format!("the Python process ended with {status}").into(),
            None => "the Python process does not end".into(),
        }
    }

    /// Ends the process, and all that it has started.
    fn end(&mut self) -> Option<ExitStatus> {
        let group = Pid::from_raw(self.child.id().cast_signed());
        for signal in [Signal::SIGTERM, Signal::SIGKILL] {
            // The group is its own as long as nobody has waited for the process.
            if let Ok(Some(status)) = self.child.try_wait() {
                return Some(status);
            }
            let _ = killpg(group, signal);
            if let Some(status) = self.ends_within(END_TIMEOUT) {
                return Some(status);
            }
        }
        None
    }

    fn ends_within(&mut self, timeout: Duration) -> Option<ExitStatus> {
        const LOOK_AGAIN: Duration = Duration::from_millis(2);
        let deadline = Instant::now() + timeout;
        loop {
            if let Ok(Some(status)) = self.child.try_wait() {
                return Some(status);
            }
            if Instant::now() >= deadline {
                return None;
            }
            thread::sleep(LOOK_AGAIN);
        }
    }
}

impl Drop for Process {
    fn drop(&mut self) {
        self.end();
    }
}

/// The file as an absolute path, since processes may start in another folder.
pub fn absolute(path: &Path) -> PathBuf {
    std::path::absolute(path).unwrap_or_else(|_| path.to_owned())
}

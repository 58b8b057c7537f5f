//! Processes that run the user's Python, with messages as lines of JSON.

use std::ffi::OsStr;
use std::io::{BufRead, BufReader, Write};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::sync::mpsc::{self, Sender};
use std::thread;

use crate::Failure;

/// Script that every process starts with.
const USER: &str = include_str!("user.py");

/// A process, killed when this is dropped.
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
            .args(["-c", &format!("{USER}\n{program}")])
            .args(args)
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

    /// Kills the process and reports how it ended. It has ended already, or has closed its output.
    pub fn how_it_ended(&mut self) -> Failure {
        let _ = self.child.kill();
        match self.child.wait() {
            Ok(status) => format!("the Python process ended with {status}").into(),
            Err(error) => error.to_string().into(),
        }
    }
}

impl Drop for Process {
    fn drop(&mut self) {
        // Both fail if it has ended.
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// The file as an absolute path, since processes may start in another folder.
pub fn absolute(path: &Path) -> PathBuf {
    std::path::absolute(path).unwrap_or_else(|_| path.to_owned())
}

//! Processes that run Python of the user's, spoken with in lines of JSON.

use std::ffi::OsStr;
use std::io::{BufRead, BufReader, Write};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::sync::mpsc::{self, Sender};
use std::thread;

use crate::failure::Failure;

/// What every process begins with.
const USER: &str = include_str!("user.py");

/// A process; it ends with this.
#[derive(Debug)]
pub(crate) struct Process {
    child: Child,
    input: Sender<String>,
}

impl Process {
    /// Starts `program`, behind `user.py`, with `args`. A thread tells `hear` each line that it writes, and `None` once there will be no more.
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
        // Both go on until the process ends, so that a wait for it can have a deadline: to read a line, and to be rid of one
        // that is larger than a pipe.
        thread::spawn(move || {
            stdout.lines().map_while(Result::ok).for_each(|line| hear(Some(line)));
            hear(None);
        });
        thread::spawn(move || waiting.iter().try_for_each(|line| stdin.write_all(line.as_bytes())));
        Ok(Self { child, input })
    }

    /// Hands over a line without its end. A process that has ended reads nothing.
    pub fn say(&self, line: String) {
        let _ = self.input.send(line + "\n");
    }

    /// How it ended, which it has, or else closed its output and now does.
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
        // Both fail for one that has ended.
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// The file as an absolute path, since processes may start from elsewhere.
pub(crate) fn absolute(path: &Path) -> PathBuf {
    std::path::absolute(path).unwrap_or_else(|_| path.to_owned())
}

//! The caller's side: starts the helper, feeds it, reads it, and ends it in time.

use std::io::{self, Read, Write};
use std::path::PathBuf;
use std::process::{Child, Command, Stdio};
use std::sync::mpsc::{self, RecvTimeoutError, Sender};
use std::thread;
use std::time::{Duration, Instant};

use crate::helper::REFUSED;
use crate::job::{File, Job, Limits, Protection};

/// A program could not be run at all, which is not the program's doing.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// The helper program did not start, or could not be spoken with.
    #[error("the helper program {} cannot be used", program.display())]
    Helper {
        /// The helper.
        program: PathBuf,
        /// Why.
        source: io::Error,
    },
    /// The machine does not protect itself as was asked.
    #[error("the sandbox refuses: {0}")]
    Refused(String),
}

/// How a program ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Ended {
    /// By itself, with the exit code 0.
    Well,
    /// By itself with another code, or by a signal, such as the one for too much processor time.
    Badly,
    /// It was still there after `wall_s`.
    TimedOut,
    /// It wrote more than `output_bytes`.
    Flooded,
}

/// What a program left.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Finished {
    /// How it ended.
    pub ended: Ended,
    /// Its standard output, at most `output_bytes` of it.
    pub stdout: Vec<u8>,
    /// Its standard error, likewise.
    pub stderr: Vec<u8>,
}

/// Where programs are run.
#[derive(Clone, Debug)]
pub struct Sandbox {
    helper: PathBuf,
    limits: Limits,
    readable: Vec<PathBuf>,
    required: Vec<Protection>,
}

impl Sandbox {
    /// A sandbox of the program `helper`. What it allows is in `limits` and `readable`, see [`Job`].
    pub fn new(helper: PathBuf, limits: Limits, readable: Vec<PathBuf>, required: Vec<Protection>) -> Self {
        Self { helper, limits, readable, required }
    }

    /// What protects this machine, from a trial.
    ///
    /// # Errors
    /// If something that is required does not.
    pub fn probe(&self) -> Result<Vec<Protection>, Error> {
        let Finished { stdout, .. } = self.run(&[], &[], "")?;
        serde_json::from_slice(&stdout).map_err(|error| self.unusable(error.into()))
    }

    /// Runs `command` beside `files` on the input `stdin`, which `/dev/stdin` names as well. A moment after it returns
    /// none of its processes is left.
    ///
    /// # Errors
    /// If it could not be started; whatever it does then is no error.
    pub fn run(&self, command: &[String], files: &[File], stdin: &str) -> Result<Finished, Error> {
        self.run_job(command, files, Some(stdin.to_owned()), "")
    }

    /// As [`Self::run`], on an input that can be read once: nothing names it.
    ///
    /// # Errors
    /// As [`Self::run`].
    pub fn run_on_secret(&self, command: &[String], files: &[File], secret: &str) -> Result<Finished, Error> {
        self.run_job(command, files, None, secret)
    }

    fn run_job(
        &self,
        command: &[String],
        files: &[File],
        input: Option<String>,
        stdin: &str,
    ) -> Result<Finished, Error> {
        let job = Job {
            command: command.to_vec(),
            files: files.to_vec(),
            readable: self.readable.clone(),
            limits: self.limits,
            required: self.required.clone(),
            input,
        };
        // The deadline counts what the kernel needs to make and to end a world, too.
        let deadline = Instant::now() + Duration::from_secs_f64(self.limits.wall_s);
        let mut child = Command::new(&self.helper)
            .env_clear()
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .stderr(Stdio::piped())
            .spawn()
            .map_err(|source| self.unusable(source))?;
        let finished = self.follow(&mut child, &job, stdin, deadline);
        // Process 1 inside ends with the helper, and all others with it.
        let _ = child.kill();
        let status = child.wait().map_err(|source| self.unusable(source))?;
        let finished = finished?;
        if status.code() == Some(i32::from(REFUSED)) {
            let said = String::from_utf8_lossy(&finished.stderr);
            let said = said.trim().trim_start_matches("anyroll-sandbox: ").to_owned();
            return Err(Error::Refused(said));
        }
        let well = finished.ended == Ended::Well && !status.success();
        Ok(Finished { ended: if well { Ended::Badly } else { finished.ended }, ..finished })
    }

    /// Feeds the child and reads it, until it has ended or must be.
    fn follow(
        &self,
        child: &mut Child,
        job: &Job,
        stdin: &str,
        deadline: Instant,
    ) -> Result<Finished, Error> {
        let mut input = child.stdin.take().expect("a pipe");
        let (output, errors) = (child.stdout.take().expect("a pipe"), child.stderr.take().expect("a pipe"));
        let most = self.limits.output_bytes;
        thread::scope(|scope| {
            let (read, parts) = mpsc::channel();
            let other = read.clone();
            // A program may end without reading its input.
            scope.spawn(move || job.write_to(&mut input).and_then(|()| input.write_all(stdin.as_bytes())));
            scope.spawn(move || read_to(output, most, Part::Output, &read));
            scope.spawn(move || read_to(errors, most, Part::Errors, &other));
            let mut finished = Finished { ended: Ended::Well, stdout: Vec::new(), stderr: Vec::new() };
            loop {
                match parts.recv_timeout(deadline.saturating_duration_since(Instant::now())) {
                    Ok(Part::Output(bytes)) => finished.stdout = bytes,
                    Ok(Part::Errors(bytes)) => finished.stderr = bytes,
                    Err(RecvTimeoutError::Timeout) => finished.ended = Ended::TimedOut,
                    // Both pipes are closed, which a program may do and go on.
                    Err(RecvTimeoutError::Disconnected) => break,
                }
                let long = |bytes: &[u8]| bytes.len() as u64 > most;
                if long(&finished.stdout) || long(&finished.stderr) {
                    finished.ended = Ended::Flooded;
                }
                if finished.ended != Ended::Well {
                    // Lets the threads of this scope end, whose pipes are then closed.
                    let _ = child.kill();
                    break;
                }
            }
            if finished.ended == Ended::Well && !ends_before(child, deadline).map_err(|e| self.unusable(e))? {
                finished.ended = Ended::TimedOut;
            }
            finished.stdout.truncate(most as usize);
            finished.stderr.truncate(most as usize);
            Ok(finished)
        })
    }

    fn unusable(&self, source: io::Error) -> Error {
        Error::Helper { program: self.helper.clone(), source }
    }
}

/// What was read of a pipe, up to its end or one byte beyond the most.
enum Part {
    Output(Vec<u8>),
    Errors(Vec<u8>),
}

fn read_to(pipe: impl Read, most: u64, part: fn(Vec<u8>) -> Part, to: &Sender<Part>) {
    let mut bytes = Vec::new();
    // What was read before an error is kept.
    let _ = pipe.take(most + 1).read_to_end(&mut bytes);
    // Nobody listens any more if the other pipe was the reason to end.
    let _ = to.send(part(bytes));
}

fn ends_before(child: &mut Child, deadline: Instant) -> io::Result<bool> {
    const LOOK_AGAIN: Duration = Duration::from_millis(2);
    while child.try_wait()?.is_none() {
        if Instant::now() >= deadline {
            return Ok(false);
        }
        thread::sleep(LOOK_AGAIN);
    }
    Ok(true)
}

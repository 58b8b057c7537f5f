//! The caller's side: starts the helper, feeds its input, reads its output, and ends it in time.

use std::io::{self, Read, Write};
use std::path::PathBuf;
use std::process::{Child, Command, ExitStatus, Stdio};
use std::sync::mpsc::{self, RecvTimeoutError, Sender};
use std::thread;
use std::time::{Duration, Instant};

use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;

use crate::helper::REFUSED;
use crate::job::{File, Job, Limits, Protection};

/// A program could not be run, for a reason other than the program itself.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// The helper program did not start, or communication with it failed.
    #[error("the helper program {} cannot be used", program.display())]
    Helper {
        /// The helper.
        program: PathBuf,
        /// The system's error.
        source: io::Error,
    },
    /// The machine lacks a required protection.
    #[error("the sandbox refuses: {0}")]
    Refused(String),
}

/// End of a program.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Exit {
    /// Exited with code 0.
    Success,
    /// Exited with another code, or by a signal, such as the one for the CPU time limit.
    Failure,
    /// Still running after `wall_s`.
    TimedOut,
    /// Wrote more than `output_bytes`.
    OutputLimit,
}

/// Result of a program.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Finished {
    /// End of the program.
    pub exit: Exit,
    /// Standard output, at most `output_bytes` of it.
    pub stdout: Vec<u8>,
    /// Standard error, at most `output_bytes` of it.
    pub stderr: Vec<u8>,
}

/// Runs programs in a sandbox.
#[derive(Clone, Debug)]
pub struct Sandbox {
    helper: PathBuf,
    limits: Limits,
    readable: Vec<PathBuf>,
    required: Vec<Protection>,
}

impl Sandbox {
    /// Creates a sandbox with the helper program `helper`. `limits` and `readable` define what programs may
    /// use, see [`Job`].
    pub fn new(helper: PathBuf, limits: Limits, readable: Vec<PathBuf>, required: Vec<Protection>) -> Self {
        Self { helper, limits, readable, required }
    }

    /// Returns the protections that work on this machine, found by a trial run.
    ///
    /// # Errors
    /// If a required protection does not work.
    pub fn probe(&self) -> Result<Vec<Protection>, Error> {
        let Finished { stdout, .. } = self.run(&[], &[], "")?;
        serde_json::from_slice(&stdout).map_err(|error| self.unusable(error.into()))
    }

    /// Runs `command` with `files` in its folder and `stdin` as its input, which `/dev/stdin` also names. Shortly
    /// after the return all of its processes have ended.
    ///
    /// # Errors
    /// If it could not be started. A failure of the program itself is no error.
    pub fn run(&self, command: &[String], files: &[File], stdin: &str) -> Result<Finished, Error> {
        self.run_job(command, files, Some(stdin.to_owned()), "")
    }

    /// Does the same with an input that can be read only once: no path names it.
    ///
    /// # Errors
    /// Errors of [`Self::run`].
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
        // The deadline includes the kernel's time to create and destroy the namespaces.
        let deadline = Instant::now() + Duration::from_secs_f64(self.limits.wall_s);
        let mut child = Command::new(&self.helper)
            .env_clear()
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .stderr(Stdio::piped())
            .spawn()
            .map_err(|source| self.unusable(source))?;
        let finished = self.follow(&mut child, &job, stdin, deadline);
        let status = end(&mut child).map_err(|source| self.unusable(source))?;
        let finished = finished?;
        if status.code() == Some(i32::from(REFUSED)) {
            let said = String::from_utf8_lossy(&finished.stderr);
            let said = said.trim().trim_start_matches("anyroll-sandbox: ").to_owned();
            return Err(Error::Refused(said));
        }
        let has_failed = finished.exit == Exit::Success && !status.success();
        Ok(Finished { exit: if has_failed { Exit::Failure } else { finished.exit }, ..finished })
    }

    /// Feeds the child and reads its output, until it ends or must be ended.
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
            // A program may exit without reading its input.
            scope.spawn(move || job.write_to(&mut input).and_then(|()| input.write_all(stdin.as_bytes())));
            scope.spawn(move || read_to(output, most, Part::Output, &read));
            scope.spawn(move || read_to(errors, most, Part::Errors, &other));
            let mut finished = Finished { exit: Exit::Success, stdout: Vec::new(), stderr: Vec::new() };
            loop {
                match parts.recv_timeout(deadline.saturating_duration_since(Instant::now())) {
                    Ok(Part::Output(bytes)) => finished.stdout = bytes,
                    Ok(Part::Errors(bytes)) => finished.stderr = bytes,
                    Err(RecvTimeoutError::Timeout) => finished.exit = Exit::TimedOut,
                    // Both pipes are closed, but the program may still run.
                    Err(RecvTimeoutError::Disconnected) => break,
                }
                let long = |bytes: &[u8]| bytes.len() as u64 > most;
                if long(&finished.stdout) || long(&finished.stderr) {
                    finished.exit = Exit::OutputLimit;
                }
                if finished.exit != Exit::Success {
                    // Lets the threads of this scope end: their pipes are then closed.
                    end(child).map_err(|source| self.unusable(source))?;
                    break;
                }
            }
            if finished.exit == Exit::Success
                && !ends_before(child, deadline).map_err(|e| self.unusable(e))?
            {
                finished.exit = Exit::TimedOut;
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

/// Output read from a pipe, to its end or to one byte past the limit.
enum Part {
    Output(Vec<u8>),
    Errors(Vec<u8>),
}

fn read_to(pipe: impl Read, most: u64, part: fn(Vec<u8>) -> Part, to: &Sender<Part>) {
    let mut bytes = Vec::new();
    // Output read before an error is kept.
    let _ = pipe.take(most + 1).read_to_end(&mut bytes);
    // If the other pipe ended the run, the receiver is gone.
    let _ = to.send(part(bytes));
}

/// Ends the helper, and all that it has started: it ends process 1, with which all others end, and waits for it. So no
/// process is left to whoever waits for orphans, which in a container may be this program.
fn end(child: &mut Child) -> io::Result<ExitStatus> {
    const TIMEOUT: Duration = Duration::from_secs(2);
    if let Some(status) = child.try_wait()? {
        return Ok(status);
    }
    // What it does not hear ends with SIGKILL.
    let _ = kill(Pid::from_raw(child.id().cast_signed()), Signal::SIGTERM);
    if !ends_before(child, Instant::now() + TIMEOUT)? {
        // Process 1 ends with it.
        child.kill()?;
    }
    child.wait()
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

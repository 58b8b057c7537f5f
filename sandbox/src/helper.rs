//! The helper program: outside it sets up the namespaces, inside it is process 1.

use std::ffi::OsString;
use std::fs::File;
use std::io::{self, ErrorKind};
use std::os::fd::AsFd;
use std::path::Path;
use std::process::{Command, ExitStatus};
use std::thread;
use std::time::Duration;

use nix::poll::{PollFd, PollFlags, PollTimeout, poll};
use nix::sys::prctl::set_pdeathsig;
use nix::sys::signal::{SigSet, Signal};
use nix::sys::signalfd::{SfdFlags, SignalFd};
use nix::sys::wait::{WaitStatus, wait};

use crate::filter;
use crate::job::{Job, Protection};
use crate::namespaces;

/// Exit code if nothing was started; the reason is on standard error. The program's own exit code cannot
/// cause it, since the helper then exits with 0 or 1.
pub const REFUSED: u8 = 125;

/// Number of the helper's own processes and threads: the outer one, process 1 and its timer.
const OWN_PROCESSES: u64 = 3;

type Result<T> = std::result::Result<T, Box<dyn std::error::Error>>;

/// Runs the helper with its arguments, and returns its exit code.
pub fn main(args: impl IntoIterator<Item = OsString>) -> u8 {
    let args: Vec<OsString> = args.into_iter().collect();
    let outcome = match args.as_slice() {
        [] => outside(),
        [wall_s, command @ ..] if !command.is_empty() => inside(wall_s, command),
        _ => Err("it is started by anyroll and takes no arguments".into()),
    };
    outcome.unwrap_or_else(|error| {
        let causes = std::iter::successors(Some(&*error), |error| error.source());
        let causes: Vec<String> = causes.map(ToString::to_string).collect();
        eprintln!("anyroll-sandbox: {}", causes.join(": "));
        REFUSED
    })
}

/// Enters the namespaces, drops all privileges, and starts itself inside.
fn outside() -> Result<u8> {
    // Unbuffered, since the input after the job belongs to the program.
    let job = Job::read_from(File::from(io::stdin().as_fd().try_clone_to_owned()?))?;
    let listens = namespaces::enter(&job)?;
    let mut active = vec![
        Protection::User,
        Protection::Processes,
        Protection::Files,
        Protection::Network,
        Protection::Disk,
    ];
    let mut limits = job.limits;
    limits.processes += OWN_PROCESSES;
    filter::limit(&limits)?;
    active.push(Protection::Limits);
    if filter::restrict_files(&[Path::new(namespaces::FOLDER), Path::new(namespaces::SHARED)])? {
        active.push(Protection::Landlock);
    }
    let calls = filter::restrict_calls(listens);
    if calls.is_ok() {
        active.push(Protection::Seccomp);
    }
    if let Some(missing) = job.required.iter().find(|it| !active.contains(it)) {
        let why = calls.err().map_or(String::new(), |error| format!(": {error}"));
        return Err(format!("this machine does not support `{missing}`{why}").into());
    }
    if job.command.is_empty() {
        println!("{}", serde_json::to_string(&active)?);
        return Ok(0);
    }
    let mut command = Command::new(namespaces::HELPER);
    if job.input.is_some() {
        command.stdin(File::open(namespaces::INPUT)?);
    }
    command.arg(limits.wall_s.to_string()).args(&job.command).env_clear();
    let status = follow(command).map_err(|error| format!("cannot start process 1: {error}"))?;
    Ok(status.code().and_then(|code| u8::try_from(code).ok()).unwrap_or(1))
}

/// Starts process 1 and waits for its end, so that nobody else has to. It is ended by SIGTERM, and when the caller is
/// gone: nobody reads the output then.
fn follow(mut command: Command) -> io::Result<ExitStatus> {
    let signals: SigSet = [Signal::SIGTERM, Signal::SIGCHLD].into_iter().collect();
    // Process 1 unblocks them.
    signals.thread_block()?;
    let signals = SignalFd::with_flags(&signals, SfdFlags::SFD_CLOEXEC)?;
    let mut child = command.spawn()?;
    loop {
        let output = io::stdout();
        let mut ready = [
            PollFd::new(signals.as_fd(), PollFlags::POLLIN),
            PollFd::new(output.as_fd(), PollFlags::empty()),
        ];
        poll(&mut ready, PollTimeout::NONE)?;
        let is_alone = ready[1].any() == Some(true);
        let signal = match ready[0].any() {
            Some(true) => signals.read_signal()?,
            _ => None,
        };
        if let Some(status) = child.try_wait()? {
            return Ok(status);
        }
        if is_alone || signal.is_some_and(|signal| signal.ssi_signo == Signal::SIGTERM as u32) {
            child.kill()?;
            return child.wait();
        }
    }
}

/// Acts as process 1: starts the program, waits for it and for orphaned processes, and ends all of them when
/// it exits.
fn inside(wall_s: &OsString, command: &[OsString]) -> Result<u8> {
    set_pdeathsig(Signal::SIGKILL)?;
    SigSet::empty().thread_set_mask()?;
    let wall_s: f64 = wall_s.to_str().unwrap_or_default().parse()?;
    // The caller's timeout is stricter; this one applies if the caller is gone.
    thread::spawn(move || {
        thread::sleep(Duration::from_secs_f64(wall_s + 1.0));
        std::process::exit(1);
    });
    let child = Command::new(&command[0])
        .args(&command[1..])
        .env_clear()
        .envs([
            ("PATH", "/usr/local/bin:/usr/bin:/bin"),
            ("HOME", namespaces::FOLDER),
            ("TMPDIR", namespaces::FOLDER),
            ("LANG", "C.UTF-8"),
            ("OMP_NUM_THREADS", "1"),
            ("OPENBLAS_NUM_THREADS", "1"),
            ("PYTHONDONTWRITEBYTECODE", "1"),
        ])
        .spawn()
        .map_err(|error| {
            // Also where the file is there, and its loader or the folder that a link leads to is not.
            let hint = if error.kind() == ErrorKind::NotFound {
                ": what it needs is not in the sandbox; name the folders in `readable`"
            } else {
                ""
            };
            format!("cannot start {}: {error}{hint}", command[0].display())
        })?;
    loop {
        match wait()? {
            WaitStatus::Exited(pid, code) if pid.as_raw().cast_unsigned() == child.id() => {
                return Ok(u8::from(code != 0));
            }
            WaitStatus::Signaled(pid, ..) if pid.as_raw().cast_unsigned() == child.id() => return Ok(1),
            _ => {}
        }
    }
}

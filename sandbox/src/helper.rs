//! What the helper program does: outside, where it builds the world, and inside, where it is process 1.

use std::ffi::OsString;
use std::fs::File;
use std::io;
use std::os::fd::AsFd;
use std::path::Path;
use std::process::Command;
use std::thread;
use std::time::Duration;

use nix::sys::prctl::set_pdeathsig;
use nix::sys::signal::Signal;
use nix::sys::wait::{WaitStatus, wait};

use crate::filter;
use crate::job::{Job, Protection};
use crate::world;

/// The exit code where nothing was started, with the reason on standard error. The program cannot have it: whatever
/// its own code, the helper's is then 0 or 1.
pub const REFUSED: u8 = 125;

/// Processes and threads that are the helper's: the one outside, process 1 and its clock.
const OWN_PROCESSES: u64 = 3;

type Result<T> = std::result::Result<T, Box<dyn std::error::Error>>;

/// Runs the helper with its arguments, and returns its exit code.
pub fn main(args: impl IntoIterator<Item = OsString>) -> u8 {
    let args: Vec<OsString> = args.into_iter().collect();
    let outcome = match args.as_slice() {
        [] => outside(),
        [wall_s, command @ ..] if !command.is_empty() => inside(wall_s, command),
        _ => Err("it is started by anyroll, and takes no arguments".into()),
    };
    outcome.unwrap_or_else(|error| {
        let causes = std::iter::successors(Some(&*error), |error| error.source());
        let causes: Vec<String> = causes.map(ToString::to_string).collect();
        eprintln!("anyroll-sandbox: {}", causes.join(": "));
        REFUSED
    })
}

/// Builds the world, gives up every right, and starts itself inside.
fn outside() -> Result<u8> {
    // Without a buffer: what follows the job is the program's.
    let job = Job::read_from(File::from(io::stdin().as_fd().try_clone_to_owned()?))?;
    let listens = world::enter(&job)?;
    let mut held = vec![
        Protection::User,
        Protection::Processes,
        Protection::Files,
        Protection::Network,
        Protection::Disk,
    ];
    let mut limits = job.limits;
    limits.processes += OWN_PROCESSES;
    filter::limit(&limits)?;
    held.push(Protection::Limits);
    if filter::restrict_files(&[Path::new(world::FOLDER), Path::new(world::SHARED)])? {
        held.push(Protection::Landlock);
    }
    let calls = filter::restrict_calls(listens);
    if calls.is_ok() {
        held.push(Protection::Seccomp);
    }
    if let Some(missing) = job.required.iter().find(|it| !held.contains(it)) {
        let why = calls.err().map_or(String::new(), |error| format!(": {error}"));
        return Err(format!("this machine has no `{missing}`{why}").into());
    }
    if job.command.is_empty() {
        println!("{}", serde_json::to_string(&held)?);
        return Ok(0);
    }
    let mut command = Command::new(world::HELPER);
    if job.input.is_some() {
        command.stdin(File::open(world::INPUT)?);
    }
    let status = command
        .arg(limits.wall_s.to_string())
        .args(&job.command)
        .env_clear()
        .status()
        .map_err(|error| format!("cannot start process 1: {error}"))?;
    Ok(status.code().and_then(|code| u8::try_from(code).ok()).unwrap_or(1))
}

/// Is process 1: starts the program, waits for it and for whoever lost a parent, and with its own end ends them all.
fn inside(wall_s: &OsString, command: &[OsString]) -> Result<u8> {
    set_pdeathsig(Signal::SIGKILL)?;
    let wall_s: f64 = wall_s.to_str().unwrap_or_default().parse()?;
    // The caller's clock is stricter; this one is for a caller that is gone.
    thread::spawn(move || {
        thread::sleep(Duration::from_secs_f64(wall_s + 1.0));
        std::process::exit(1);
    });
    let child = Command::new(&command[0])
        .args(&command[1..])
        .env_clear()
        .envs([
            ("PATH", "/usr/local/bin:/usr/bin:/bin"),
            ("HOME", world::FOLDER),
            ("TMPDIR", world::FOLDER),
            ("LANG", "C.UTF-8"),
            ("OMP_NUM_THREADS", "1"),
            ("OPENBLAS_NUM_THREADS", "1"),
            ("PYTHONDONTWRITEBYTECODE", "1"),
        ])
        .spawn()
        .map_err(|error| format!("cannot start {}: {error}", command[0].display()))?;
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

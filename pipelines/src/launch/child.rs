//! What a rank does for its parent: it says why it failed, and it does not outlive it.

use std::fs;
use std::io::{self, Read};
use std::path::{Path, PathBuf};
use std::thread;

use nix::sys::signal::{Signal, killpg, raise};
use nix::unistd::{getpgrp, getpid};
use serde::{Deserialize, Serialize};

/// The variable with the file that a rank writes its failure to; only [`launch`](super::launch) sets it.
pub(super) const FAILURE_FILE: &str = "ANYROLL_FAILURE_FILE";

/// Whether a failure began here.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Deserialize, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum FailureKind {
    /// It began in this rank.
    Own,
    /// A collective failed because another rank did.
    Peer,
}

#[derive(Deserialize, Serialize)]
struct Report {
    kind: FailureKind,
    reason: String,
}

/// Whether [`launch`](super::launch) started this process, so that a parent tells the user of its failure.
pub fn is_launched() -> bool {
    std::env::var_os(FAILURE_FILE).is_some()
}

/// Tells the parent why this rank is about to exit with an error, if a parent started it.
///
/// # Errors
///
/// If the report cannot be written; the parent then knows the exit code alone.
pub fn report_failure(reason: &str, kind: FailureKind) -> io::Result<()> {
    let Some(path) = std::env::var_os(FAILURE_FILE).map(PathBuf::from) else { return Ok(()) };
    let report = serde_json::to_vec(&Report { kind, reason: reason.to_owned() })?;
    // Written aside: the parent never reads half of it.
    let aside = path.with_extension("part");
    fs::write(&aside, report)?;
    fs::rename(&aside, &path)
}

/// What [`report_failure`] wrote, if it did.
pub(super) fn read_failure(path: &Path) -> Option<(FailureKind, String)> {
    let Report { kind, reason } = serde_json::from_slice(&fs::read(path).ok()?).ok()?;
    Some((kind, reason))
}

/// Kills this rank and all that it started as soon as its parent is gone, however that ended. Does nothing
/// in a process that [`launch`](super::launch) has not started.
///
/// The parent holds the other end of this process's standard input, which therefore ends with it. The
/// kernel's own way (`PR_SET_PDEATHSIG`) follows the parent's *thread*, and needs unsafe code between fork
/// and exec.
pub fn watch_parent() {
    if !is_launched() {
        return;
    }
    thread::spawn(|| {
        let mut byte = [0];
        while let Ok(1) = io::stdin().read(&mut byte) {}
        // SIGKILL, since exit handlers of a library may wait for threads that wait for other ranks.
        let _ =
            if getpgrp() == getpid() { killpg(getpgrp(), Signal::SIGKILL) } else { raise(Signal::SIGKILL) };
    });
}

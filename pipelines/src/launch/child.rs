//! A rank's duties to its parent: it reports its failure, and dies with the parent.

use std::fs;
use std::io::{self, Read};
use std::net::TcpListener;
use std::path::{Path, PathBuf};
use std::sync::LazyLock;
use std::thread;

use anyroll_backends::Listener;
use listenfd::ListenFd;
use nix::fcntl::{FcntlArg, FdFlag, fcntl};
use nix::sys::signal::{Signal, killpg, raise};
use nix::unistd::{getpgrp, getpid};
use serde::{Deserialize, Serialize};

/// Environment variable with the file for a rank's failure report; only [`launch`](super::launch) sets it.
pub(super) const FAILURE_FILE: &str = "ANYROLL_FAILURE_FILE";

/// Environment variable with the number of inherited sockets, which begin at [`FIRST_SOCKET`], as systemd has it.
pub(super) const SOCKETS: &str = "LISTEN_FDS";
/// Descriptor of the first inherited socket.
pub(super) const FIRST_SOCKET: i32 = 3;

/// The socket that the parent bound for rank 0; empty in other ranks and under other launchers.
pub(super) fn listener() -> Listener {
    static INHERITED: LazyLock<Listener> =
        LazyLock::new(|| inherited().map(Listener::from).unwrap_or_default());
    INHERITED.clone()
}

fn inherited() -> Option<TcpListener> {
    // Another program's launcher may hand over sockets of its own.
    if !is_launched() {
        return None;
    }
    let socket = ListenFd::from_env().take_tcp_listener(0).ok()??;
    // Not for this rank's own child processes.
    fcntl(&socket, FcntlArg::F_SETFD(FdFlag::FD_CLOEXEC)).ok()?;
    Some(socket)
}

/// Origin of a failure.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Deserialize, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum FailureKind {
    /// It started in this rank.
    Own,
    /// A collective failed because another rank did.
    Peer,
}

#[derive(Deserialize, Serialize)]
struct Report {
    kind: FailureKind,
    reason: String,
}

/// Returns true if [`launch`](super::launch) started this process, so that the parent reports its failure.
pub fn is_launched() -> bool {
    std::env::var_os(FAILURE_FILE).is_some()
}

/// Reports to the parent, if there is one, why this rank is about to exit with an error.
///
/// # Errors
/// If the report cannot be written; the parent then has only the exit code.
pub fn report_failure(reason: &str, kind: FailureKind) -> io::Result<()> {
    let Some(path) = std::env::var_os(FAILURE_FILE).map(PathBuf::from) else { return Ok(()) };
    let report = serde_json::to_vec(&Report { kind, reason: reason.to_owned() })?;
    // Written under another name, so that the parent never reads a part.
    let aside = path.with_extension("part");
    fs::write(&aside, report)?;
    fs::rename(&aside, &path)
}

/// The report of [`report_failure`], if there is one.
pub(super) fn read_failure(path: &Path) -> Option<(FailureKind, String)> {
    let Report { kind, reason } = serde_json::from_slice(&fs::read(path).ok()?).ok()?;
    Some((kind, reason))
}

/// Kills this rank and its child processes when its parent ends, for whatever reason. Does nothing in a
/// process that [`launch`](super::launch) has not started.
///
/// The parent holds the other end of this process's standard input, which closes with it. The kernel's
/// mechanism (`PR_SET_PDEATHSIG`) follows the parent's *thread*, and needs unsafe code between fork and exec.
pub fn watch_parent() {
    if !is_launched() {
        return;
    }
    // Taken while there is one thread, since it removes the variable from the environment.
    listener();
    thread::spawn(|| {
        let mut byte = [0];
        while let Ok(1) = io::stdin().read(&mut byte) {}
        // SIGKILL, since a library's exit handlers may wait for threads that wait for other ranks.
        let _ =
            if getpgrp() == getpid() { killpg(getpgrp(), Signal::SIGKILL) } else { raise(Signal::SIGKILL) };
    });
}

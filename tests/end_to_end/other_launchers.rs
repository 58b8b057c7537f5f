//! Ranks started by another launcher: torchrun, srun, a Kubernetes operator.

use std::fs;
use std::io::{self, Write};
use std::iter;
use std::net::{Ipv4Addr, TcpListener};
use std::path::Path;
use std::process::{self, Command};
use std::sync::atomic::{AtomicU16, Ordering::Relaxed};
use std::time::{Duration, Instant};

use nix::sys::signal::Signal;

use super::{Process, TWO_RANKS, assert_same, fail, run_tiny, succeed, tiny, wait_until};

/// A port that no other call returns and the system does not assign, as the user of a launcher picks one.
pub(super) fn free_port() -> u16 {
    static NEXT: AtomicU16 = AtomicU16::new(0);
    const FIRST: u16 = 20_000;
    // Apart from those of another process of these tests.
    let mut ports = iter::repeat_with(|| {
        FIRST + (process::id() as u16).wrapping_add(NEXT.fetch_add(1, Relaxed)) % 10_000
    });
    ports.find(|port| TcpListener::bind((Ipv4Addr::LOCALHOST, *port)).is_ok()).expect("a port of many")
}

pub(super) fn as_rank(mut command: Command, rank: usize, port: u16) -> Command {
    let rank = rank.to_string();
    command.env("RANK", &rank).env("LOCAL_RANK", &rank).env("WORLD_SIZE", "2");
    command.env("MASTER_ADDR", "127.0.0.1").env("MASTER_PORT", port.to_string());
    command
}

#[test]
fn ranks_of_another_launcher_are_a_job() {
    let folder = tempfile::tempdir().unwrap();
    let ours = run_tiny(&folder, "ours", TWO_RANKS, &[]);
    let run = folder.path().join("theirs");
    let port = free_port();
    let ranks = [0, 1].map(|rank| Process::start(as_rank(tiny(TWO_RANKS, &run, &[]), rank, port)));
    for ended in ranks.map(Process::finish) {
        assert_eq!(ended.code, Some(0), "{ended:#?}");
    }
    assert_same(&ours, &run);
}

/// Each machine has its own file, and starts its own ranks.
#[test]
fn machines_of_accelerate_start_their_ranks() {
    let folder = tempfile::tempdir().unwrap();
    let ours = run_tiny(&folder, "ours", TWO_RANKS, &[]);
    let port = free_port();
    let on_machine = |index: usize, run: &Path| {
        let file = folder.path().join(format!("machine_{index}.yaml"));
        let text = format!(
            "num_machines: 2\nnum_processes: 2\nuse_cpu: true\nmachine_rank: {index}\n\
             main_process_ip: 127.0.0.1\nmain_process_port: {port}\nrdzv_backend: static\n"
        );
        fs::write(&file, text).unwrap();
        let mut command = tiny(TWO_RANKS, run, &[]);
        command.arg("--accelerate-config").arg(file);
        command
    };
    let run = folder.path().join("theirs");
    for ended in [0, 1].map(|index| Process::start(on_machine(index, &run))).map(Process::finish) {
        assert_eq!(ended.code, Some(0), "{ended:#?}");
        // They have their meaning, and are no difference to report.
        assert!(!ended.stderr.contains("num_machines"), "{ended:#?}");
    }
    assert_same(&ours, &run);
}

/// Open MPI's launcher, which Debian has in `openmpi-bin`.
#[test]
fn mpirun_starts_the_ranks_of_a_job() {
    if Command::new("mpirun").arg("--version").output().is_err() {
        return io::stderr().write_all(b"SKIPPED: mpirun: it is not installed\n").unwrap();
    }
    let folder = tempfile::tempdir().unwrap();
    let ours = run_tiny(&folder, "ours", TWO_RANKS, &[]);
    let run = folder.path().join("theirs");
    let rank = tiny(TWO_RANKS, &run, &[]);
    let mut command = Command::new("mpirun");
    command.args(["--allow-run-as-root", "--oversubscribe", "-np", "2"]);
    command.arg(rank.get_program()).args(rank.get_args());
    command.current_dir(rank.get_current_dir().unwrap_or(Path::new(".")));
    for (name, value) in rank.get_envs() {
        assert_eq!(value, None, "{name:?} is set");
        command.env_remove(name);
    }
    command.env("MASTER_ADDR", "127.0.0.1").env("MASTER_PORT", free_port().to_string());
    succeed(command);
    assert_same(&ours, &run);
}

/// Each host may have its own files.
#[test]
fn ranks_with_different_configs_are_refused() {
    let folder = tempfile::tempdir().unwrap();
    let run = folder.path().join("run");
    let port = free_port();
    let ranks = ["seed=0", "seed=1"].into_iter().enumerate();
    let ranks: Vec<Process> =
        ranks.map(|(rank, set)| Process::start(as_rank(tiny(TWO_RANKS, &run, &[set]), rank, port))).collect();
    for ended in ranks.into_iter().map(Process::finish) {
        assert_eq!(ended.code, Some(1), "{ended:#?}");
        let first = ended.stderr.lines().next().unwrap_or_default();
        assert!(first.contains("rank 1 has `seed: 1` where rank 0 has `seed: 0`"), "{}", ended.stderr);
    }
}

/// Detected before training, and not only at the first checkpoint.
#[test]
fn hosts_that_do_not_share_the_run_folder_are_refused() {
    let folder = tempfile::tempdir().unwrap();
    let port = free_port();
    let run = folder.path().join("run");
    // Rank 1 has an empty file system, like another host that lacks the files.
    let hidden = |rank: &Command| {
        let mut command = Command::new("unshare");
        let mount = format!("mount -t tmpfs none '{}' && exec \"$@\"", folder.path().display());
        command.args(["--user", "--map-root-user", "--mount", "sh", "-c", &mount, "sh"]);
        command.arg(rank.get_program()).args(rank.get_args());
        command.envs(rank.get_envs().filter_map(|(name, value)| Some((name, value?))));
        command.current_dir(rank.get_current_dir().unwrap_or(Path::new(".")));
        command
    };
    if !hidden(&Command::new("true")).status().is_ok_and(|status| status.success()) {
        let words =
            "SKIPPED: hosts that do not share a folder: `unshare --user --mount` is not allowed here\n";
        return io::stderr().write_all(words.as_bytes()).unwrap();
    }
    let tiny = tiny(TWO_RANKS, &run, &[]);
    let second = as_rank(hidden(&tiny), 1, port);
    for ended in [as_rank(tiny, 0, port), second].map(Process::start).map(Process::finish) {
        assert_eq!(ended.code, Some(1), "{ended:#?}");
        let first = ended.stderr.lines().next().unwrap_or_default();
        assert!(first.contains("rank 1 does not see the run folder"), "{}", ended.stderr);
        assert!(first.contains("put --output on a file system that all hosts share"), "{}", ended.stderr);
    }
}

/// Other launchers end a job after a failure with SIGTERM, and wait long for a rank that ignores it.
#[test]
fn a_rank_that_waits_for_the_others_ends_by_a_signal() {
    let folder = tempfile::tempdir().unwrap();
    // Takes the place of rank 0, and does not answer.
    let listener = TcpListener::bind(("127.0.0.1", 0)).unwrap();
    listener.set_nonblocking(true).unwrap();
    let port = listener.local_addr().unwrap().port();
    let waiting = Process::start(as_rank(tiny(TWO_RANKS, &folder.path().join("run"), &[]), 1, port));
    let mut connection = None;
    wait_until("rank 1 has come to the meeting place", || {
        connection = listener.accept().ok();
        connection.is_some()
    });
    waiting.send(Signal::SIGTERM);
    let sent = Instant::now();
    assert_eq!(waiting.finish().code, None);
    assert!(sent.elapsed() < Duration::from_secs(5), "it took {:?}", sent.elapsed());
}

#[test]
fn half_a_launcher_is_refused() {
    let run = Path::new("nowhere/run");
    let check = |variables: &[(&str, &str)], words: &str| {
        let mut command = tiny(TWO_RANKS, run, &[]);
        command.envs(variables.iter().copied());
        let error = fail(command);
        assert!(error.contains(words), "no {words:?} in {error}");
    };
    check(&[("RANK", "0")], "RANK is set but WORLD_SIZE is not");
    let place = [("RANK", "0"), ("WORLD_SIZE", "3"), ("LOCAL_RANK", "0")];
    let meeting = [("MASTER_ADDR", "127.0.0.1"), ("MASTER_PORT", "1")];
    check(&[&place[..], &meeting].concat(), "each host has 2 ranks");
}

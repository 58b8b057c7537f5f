//! Jobs of several processes, with shell scripts for ranks. The launcher is a process of its own, this test
//! binary started again, since it catches signals and owns its output.

use std::io::Read;
use std::path::Path;
use std::process::{Child, Command, Output, Stdio};
use std::thread;
use std::time::{Duration, Instant};

use anyroll_pipelines::launch::{FailureKind, Interrupts, LaunchPlan, launch, report_failure, watch_parent};
use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;

/// Role of a process that this test starts.
const ROLE: &str = "ANYROLL_TEST_ROLE";
const SCRIPT: &str = "ANYROLL_TEST_SCRIPT";
const WORLD_SIZE: &str = "ANYROLL_TEST_WORLD_SIZE";

/// Not a test of its own: what the other tests start.
#[test]
fn process() {
    let plan = |program, args: &[&str]| LaunchPlan {
        program,
        args: args.iter().map(Into::into).collect(),
        local_ranks: std::env::var(WORLD_SIZE).unwrap().parse().unwrap(),
        threads: 3,
        env: vec![("EXTRA".into(), "more".into()), (ROLE.into(), "rank".into())],
    };
    let plan = match std::env::var(ROLE).as_deref() {
        // Ranks that run a shell script.
        Ok("launcher") => plan("/bin/sh".into(), &["-c", &std::env::var(SCRIPT).unwrap()]),
        // Ranks that are this binary.
        Ok("launcher of itself") => {
            plan(std::env::current_exe().unwrap(), &["process", "--exact", "--nocapture"])
        }
        Ok("rank") => return rank(),
        _ => return,
    };
    match launch(&plan, &mut Interrupts::catch().unwrap()) {
        Ok(outcome) => std::process::exit(outcome.exit_code().into()),
        Err(error) => {
            eprintln!("{error}");
            std::process::exit(1);
        }
    }
}

/// Rank 0 says that another is to blame. Rank 1 fails by itself half a second later, or sleeps.
fn rank() {
    watch_parent();
    match (std::env::var("RANK").as_deref(), std::env::var(SCRIPT).as_deref()) {
        (Ok("0"), Ok("peer first" | "peer stalls")) => {
            report_failure("all_reduce failed", FailureKind::Peer).unwrap();
            std::process::exit(1);
        }
        (Ok("1"), Ok("peer first")) => {
            thread::sleep(Duration::from_millis(500));
            report_failure("the disk is full", FailureKind::Own).unwrap();
            std::process::exit(1);
        }
        _ => thread::sleep(Duration::from_secs(60)),
    }
}

fn start(role: &str, world_size: usize, script: &str) -> Child {
    Command::new(std::env::current_exe().unwrap())
        .args(["process", "--exact", "--nocapture"])
        .env(ROLE, role)
        .env(WORLD_SIZE, world_size.to_string())
        .env(SCRIPT, script)
        .env_remove("OMP_WAIT_POLICY")
        .stdin(Stdio::null())
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()
        .unwrap()
}

struct Ended {
    code: Option<i32>,
    stdout: String,
    /// Without what ranks printed: the launcher's own message.
    message: String,
    took: Duration,
}

fn finish(launcher: Child) -> Ended {
    let start = Instant::now();
    let Output { status, stdout, stderr } = launcher.wait_with_output().unwrap();
    let stderr = String::from_utf8(stderr).unwrap();
    let message = stderr.lines().filter(|line| !line.starts_with("[rank ")).collect::<Vec<_>>().join("\n");
    Ended { code: status.code(), stdout: String::from_utf8(stdout).unwrap(), message, took: start.elapsed() }
}

fn run(world_size: usize, script: &str) -> Ended {
    finish(start("launcher", world_size, script))
}

#[track_caller]
fn check_failure(ended: &Ended, message: &str, most_s: f64) {
    assert_eq!((ended.code, ended.message.as_str()), (Some(1), message));
    assert!(ended.took.as_secs_f64() < most_s, "it took {:?}", ended.took);
}

/// Waits until `path` has `lines` lines, and gives them as process ids.
fn wait_for_pids(path: &Path, lines: usize) -> Vec<Pid> {
    let deadline = Instant::now() + Duration::from_secs(20);
    loop {
        let text = std::fs::read_to_string(path).unwrap_or_default();
        if text.lines().count() == lines && text.ends_with('\n') {
            return text.lines().map(|line| Pid::from_raw(line.parse().unwrap())).collect();
        }
        assert!(Instant::now() < deadline, "{lines} ranks have not started: {text:?}");
        thread::sleep(Duration::from_millis(10));
    }
}

/// Returns true if the process exists and is no zombie.
fn is_alive(pid: Pid) -> bool {
    let Ok(stat) = std::fs::read_to_string(format!("/proc/{pid}/stat")) else { return false };
    !stat.rsplit(')').next().is_some_and(|rest| rest.trim_start().starts_with(['Z', 'X']))
}

#[track_caller]
fn check_all_die(pids: &[Pid], within: Duration) {
    let deadline = Instant::now() + within;
    while pids.iter().any(|&pid| is_alive(pid)) {
        assert!(Instant::now() < deadline, "still alive after {within:?}");
        thread::sleep(Duration::from_millis(10));
    }
}

#[test]
fn ranks_find_their_place_and_their_output_is_prefixed() {
    let script = r#"echo "$RANK/$WORLD_SIZE local $LOCAL_RANK at $MASTER_ADDR threads $OMP_NUM_THREADS $OMP_WAIT_POLICY $EXTRA"
        [ "$MASTER_PORT" -gt 1023 ] && echo "port ok"; printf "no newline""#;
    let ended = run(3, script);
    assert_eq!(ended.code, Some(0), "{}", ended.message);
    for (rank, prefix) in ["", "[rank 1] ", "[rank 2] "].iter().enumerate() {
        let place =
            format!("{prefix}{rank}/3 local {rank} at 127.0.0.1 threads 3 passive more\n{prefix}port ok\n");
        for line in place.lines() {
            assert!(ended.stdout.lines().any(|found| found.ends_with(line)), "{line} in {}", ended.stdout);
        }
    }
    // Rank 0 has the terminal itself; the others' unfinished line is finished.
    assert!(ended.stdout.contains("[rank 1] no newline\n"), "{}", ended.stdout);
    assert!(!ended.stdout.contains("[rank 0]"), "{}", ended.stdout);
}

#[test]
fn standard_error_is_prefixed_as_well() {
    let output = start("launcher", 2, "echo oops >&2").wait_with_output().unwrap();
    let stderr = String::from_utf8(output.stderr).unwrap();
    assert!(stderr.contains("[rank 1] oops\n") && stderr.lines().any(|line| line == "oops"), "{stderr}");
}

#[test]
fn a_rank_that_fails_takes_the_others_down() {
    let ended = run(3, "if [ $RANK = 1 ]; then exit 7; fi; exec sleep 60");
    check_failure(&ended, "rank 1 failed: it ended with exit code 7 and gave no reason; see its output", 9.0);
}

#[test]
fn a_rank_that_is_killed_is_named_with_its_signal() {
    let ended = run(2, "if [ $RANK = 1 ]; then kill -9 $$; fi; exec sleep 60");
    check_failure(&ended, "rank 1 was killed by signal 9 (SIGKILL)", 5.0);
}

#[test]
fn the_killed_rank_is_blamed_and_not_its_victims() {
    // Rank 0 sees its peer go and fails a little earlier than the parent looks, or a little later.
    for pause in ["0", "0.05"] {
        let ended =
            run(2, &format!("if [ $RANK = 0 ]; then exit 1; fi; sleep {pause}; kill -SEGV $$; sleep 60"));
        check_failure(&ended, "rank 1 was killed by signal 11 (SIGSEGV)", 9.0);
    }
}

#[test]
fn the_rank_that_failed_by_itself_is_blamed() {
    let ended = finish(start("launcher of itself", 2, "peer first"));
    check_failure(&ended, "rank 1 failed: the disk is full", 9.0);
}

#[test]
fn the_rank_that_others_gave_up_on_is_blamed() {
    let ended = finish(start("launcher of itself", 2, "peer stalls"));
    let message = "rank 1 stalled: it was still running after rank 0 failed: all_reduce failed";
    check_failure(&ended, message, 9.0);
}

#[test]
fn ranks_that_ignore_sigterm_are_killed_with_all_they_started() {
    let folder = tempfile::tempdir().unwrap();
    let pids = folder.path().join("pids");
    let script = format!(
        "trap '' TERM; if [ $RANK = 0 ]; then while [ ! -s {0} ]; do sleep 0.02; done; exit 3; fi
         sleep 61 & echo $! >> {0}; while true; do sleep 0.1; done",
        pids.display()
    );
    let ended = run(2, &script);
    check_failure(
        &ended,
        "rank 0 failed: it ended with exit code 3 and gave no reason; see its output",
        12.0,
    );
    check_all_die(&wait_for_pids(&pids, 1), Duration::from_secs(1));
}

#[test]
fn output_held_open_by_a_process_left_behind_does_not_hang_the_end() {
    // Of rank 1, whose output is a pipe to the launcher.
    let ended = run(2, "if [ $RANK = 1 ]; then sleep 20 & fi; exit 0");
    assert_eq!(ended.code, Some(0));
    assert!(ended.took < Duration::from_secs(4), "{:?}", ended.took);
}

/// A launcher whose ranks are ready, and their process ids.
fn start_and_wait(script: &str) -> (Child, Vec<Pid>, tempfile::TempDir) {
    let folder = tempfile::tempdir().unwrap();
    let pids = folder.path().join("pids");
    let script = script.replace("READY", &format!("echo $$ >> {}", pids.display()));
    let launcher = start("launcher", 2, &script);
    let pids = wait_for_pids(&pids, 2);
    (launcher, pids, folder)
}

fn send(process: &Child, signal: Signal) {
    kill(Pid::from_raw(process.id().cast_signed()), signal).unwrap();
}

#[test]
fn an_interrupt_is_forwarded_and_waited_for() {
    // A rank that had just done its last step ends as if nobody had asked.
    for (signal, code, expected) in
        [(Signal::SIGINT, 0, 0), (Signal::SIGTERM, 130, 130), (Signal::SIGHUP, 143, 130)]
    {
        let script = format!(
            "trap 'sleep 0.3; echo saved $RANK; exit {code}' INT TERM HUP; READY; while true; do sleep 0.05; done"
        );
        let (launcher, _, _folder) = start_and_wait(&script);
        send(&launcher, signal);
        let ended = finish(launcher);
        assert_eq!((ended.code, ended.message.as_str()), (Some(expected), ""), "{signal}");
        assert!(
            ended.stdout.contains("saved 0\n") && ended.stdout.contains("[rank 1] saved 1\n"),
            "{signal}"
        );
    }
}

#[test]
fn a_second_interrupt_kills() {
    let (launcher, pids, _folder) = start_and_wait("trap '' INT; READY; while true; do sleep 0.05; done");
    send(&launcher, Signal::SIGINT);
    thread::sleep(Duration::from_millis(300));
    assert!(pids.iter().all(|&pid| is_alive(pid)), "they save");
    send(&launcher, Signal::SIGINT);
    let ended = finish(launcher);
    assert_eq!((ended.code, ended.message.as_str()), (Some(130), ""));
    assert!(ended.took < Duration::from_secs(2), "{:?}", ended.took);
    check_all_die(&pids, Duration::from_secs(1));
}

#[test]
fn a_failure_while_saving_is_a_failure() {
    let script = "trap 'exit 4' INT; READY; while true; do sleep 0.05; done";
    let (launcher, _, _folder) = start_and_wait(script);
    send(&launcher, Signal::SIGINT);
    let ended = finish(launcher);
    assert_eq!(ended.code, Some(1));
    assert!(ended.message.ends_with("failed: it ended with exit code 4 and gave no reason; see its output"));
}

#[test]
fn ranks_do_not_outlive_a_parent_that_is_killed() {
    let mut launcher = start("launcher of itself", 2, "sleep");
    let launcher_pid = launcher.id().to_string();
    let deadline = Instant::now() + Duration::from_secs(20);
    let ranks = loop {
        let ranks = children_of(&launcher_pid);
        // The second thread is the one that watches the parent.
        let watching =
            |pid: &Pid| std::fs::read_dir(format!("/proc/{pid}/task")).is_ok_and(|t| t.count() >= 3);
        if ranks.len() == 2 && ranks.iter().all(watching) {
            break ranks;
        }
        assert!(Instant::now() < deadline, "the ranks have not started");
        thread::sleep(Duration::from_millis(10));
    };
    launcher.kill().unwrap();
    check_all_die(&ranks, Duration::from_secs(2));
    // They held its output open: it ends with them.
    let mut rest = String::new();
    launcher.stdout.take().unwrap().read_to_string(&mut rest).unwrap();
    launcher.wait().unwrap();
}

fn children_of(pid: &str) -> Vec<Pid> {
    let is_child = |entry: &std::fs::DirEntry| {
        let status = std::fs::read_to_string(entry.path().join("status")).unwrap_or_default();
        status.lines().any(|line| line.split_once(":\t") == Some(("PPid", pid)))
    };
    let processes = std::fs::read_dir("/proc").unwrap().filter_map(Result::ok);
    let pids = processes.filter(is_child).filter_map(|entry| entry.file_name().to_str()?.parse().ok());
    pids.map(Pid::from_raw).collect()
}

#[test]
fn a_program_that_is_not_there_is_named() {
    let plan = LaunchPlan {
        program: "/nowhere/anyroll".into(),
        args: Vec::new(),
        local_ranks: 2,
        threads: 1,
        env: Vec::new(),
    };
    let error = launch(&plan, &mut Interrupts::catch().unwrap()).unwrap_err();
    assert_eq!(error.to_string(), "rank 0 failed: cannot start /nowhere/anyroll");
    assert!(std::error::Error::source(&error).unwrap().to_string().contains("No such file"));
}

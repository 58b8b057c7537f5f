//! Tests of the programs as a user runs them: started as processes, and judged by their output, files and
//! exit codes.
//!
//! Every run writes to a temporary folder, sorts three digits and takes a second or two. Every wait has a
//! deadline.

mod advice;
mod asynchronous;
mod balance;
mod code_reward;
mod commands;
mod critic;
mod diffusers;
mod diffusion;
mod distillation;
mod eight_bits;
mod environments;
mod epochs;
mod evaluation;
mod experts;
mod expressed;
mod failures;
mod first_model;
mod foreign_bytes;
mod formats;
mod four_bits;
mod gguf;
mod guides;
mod hosts;
mod ilql;
mod image_rewards;
mod inference;
mod init;
mod layers;
mod learning;
mod merged_adapters;
mod mistakes;
mod moments;
mod offline;
mod other_launchers;
mod other_tools;
mod own_devices;
mod paths;
mod plan;
mod plan_time;
mod prm;
mod prompts;
mod published_model;
mod reference;
mod reproducibility;
mod restarts;
mod resume;
mod rewards;
mod rollout_hosts;
mod routing;
mod run_folder;
mod sequence;
mod serve;
mod shard_groups;
mod shims;
mod slurm;
mod speculation;
mod storage;
mod strict;
mod tensor;
mod trackers;
mod videos;
mod watch;
mod written_samples;

use std::collections::BTreeMap;
use std::fs::{self, File};
use std::io::{self, Write};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::thread;
use std::time::{Duration, Instant};

use anyroll_pipelines::metrics::declared;
use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;
use serde_json::{Map, Value};
use tempfile::TempDir;

const ANYROLL: &str = env!("CARGO_BIN_EXE_anyroll");
const ONE_RANK: &str = "configs/rlvr_sort_cpu.yaml";
const TWO_RANKS: &str = "configs/rlvr_sort_cpu_2ranks.yaml";

/// Deadline of a process in these tests, even on a busy machine; tests that need more pass their own.
const DEADLINE: Duration = Duration::from_secs(120);

/// Changes that make a run of a published config take about a second. Later changes of the same field win.
const TINY: [&str; 12] = [
    "pipeline.rlvr.data.sort.digits=3",
    "pipeline.rlvr.warmup.steps=60",
    "pipeline.rlvr.warmup.optimizer.schedule.constant.warmup_steps=5",
    "pipeline.rlvr.steps=12",
    "pipeline.rlvr.prompts_per_step=8",
    "pipeline.rlvr.group_size=4",
    "pipeline.rlvr.optimizer.schedule.linear.warmup_steps=2",
    "pipeline.rlvr.rollout.max_new_tokens=4",
    "pipeline.rlvr.evaluation.every=4",
    "pipeline.rlvr.evaluation.prompts=20",
    "pipeline.rlvr.checkpoint.every=4",
    "strategy.micro_batch_size=8",
];

/// Returns anyroll in the checkout's root, without a launcher's variables.
fn anyroll<A: AsRef<str>>(args: impl IntoIterator<Item = A>) -> Command {
    let mut command = Command::new(ANYROLL);
    command.current_dir(Path::new(env!("CARGO_MANIFEST_DIR")).parent().unwrap());
    for variable in ["RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT", "ANYROLL_LOG"] {
        command.env_remove(variable);
    }
    for arg in args {
        command.arg(arg.as_ref());
    }
    command
}

/// Returns a run of `config` with changes.
fn changed<'a>(config: &str, run: &Path, sets: impl IntoIterator<Item = &'a &'a str>) -> Command {
    let mut command = anyroll(["run", config]);
    for set in sets {
        command.args(["--set", set]);
    }
    command.arg("--output").arg(run);
    command
}

/// Returns a tiny run of `config` with changes.
fn tiny(config: &str, run: &Path, sets: &[&str]) -> Command {
    changed(config, run, TINY.iter().chain(sets))
}

fn resume(run: &Path) -> Command {
    anyroll(["run", "--resume", run.to_str().unwrap()])
}

/// Returns a Python that has these modules: `ANYROLL_TEST_PYTHON` or `python3`. Without one, prints what is
/// `untested`.
fn python_with(modules: &str, untested: &str) -> Option<String> {
    let python = std::env::var("ANYROLL_TEST_PYTHON").unwrap_or_else(|_| "python3".to_owned());
    let found = Command::new(&python).args(["-c", &format!("import {modules}")]).output();
    if found.is_ok_and(|output| output.status.success()) {
        return Some(python);
    }
    let words = format!("SKIPPED: {untested}: set ANYROLL_TEST_PYTHON to a Python that has {modules}\n");
    // Past the harness, which hides the output of passing tests.
    io::stderr().write_all(words.as_bytes()).unwrap();
    None
}

/// A process whose output goes to files, so that a pipe held open by another process cannot block a test.
struct Process {
    child: Child,
    output: TempDir,
    started: Instant,
}

/// Exit of a process.
#[derive(Debug)]
struct Ended {
    code: Option<i32>,
    stdout: String,
    stderr: String,
    took: Duration,
}

impl Process {
    fn start(mut command: Command) -> Self {
        let output = tempfile::tempdir().unwrap();
        let file = |name: &str| File::create(output.path().join(name)).unwrap();
        command.stdin(Stdio::null()).stdout(file("stdout")).stderr(file("stderr"));
        let child = command.spawn().unwrap();
        Self { child, output, started: Instant::now() }
    }

    fn send(&self, signal: Signal) {
        kill(Pid::from_raw(self.child.id().cast_signed()), signal).unwrap();
    }

    fn finish(self) -> Ended {
        self.finish_within(DEADLINE)
    }

    fn finish_within(mut self, most: Duration) -> Ended {
        let mut code = None;
        wait_within(most, "the process has ended", || match self.child.try_wait().unwrap() {
            Some(status) => {
                code = status.code();
                true
            }
            None => false,
        });
        let text = |name| String::from_utf8_lossy(&fs::read(self.output.path().join(name)).unwrap()).into();
        Ended { code, stdout: text("stdout"), stderr: text("stderr"), took: self.started.elapsed() }
    }
}

impl Drop for Process {
    fn drop(&mut self) {
        // For a failed test; ranks end with their parent. Both calls fail if the process has ended.
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

impl Ended {
    /// Returns the line with the reason of a command's failure.
    #[track_caller]
    fn error(&self) -> &str {
        assert_eq!(self.code, Some(1), "{self:#?}");
        let line = self.stderr.lines().find(|line| line.starts_with("error: "));
        line.unwrap_or_else(|| panic!("no error in {}", self.stderr))
    }
}

fn finish(command: Command) -> Ended {
    Process::start(command).finish()
}

#[track_caller]
fn succeed(command: Command) -> Ended {
    let ended = finish(command);
    assert_eq!(ended.code, Some(0), "{ended:#?}");
    ended
}

/// Starts a run, and interrupts it after `steps` steps.
#[track_caller]
fn interrupt(command: Command, run: &Path, steps: usize) -> Ended {
    let process = Process::start(command);
    wait_for_steps(run, steps);
    process.send(Signal::SIGINT);
    let ended = process.finish();
    assert_eq!(ended.code, Some(130), "{ended:#?}");
    ended
}

/// Returns the first line with the reason of a command's failure.
#[track_caller]
fn fail(command: Command) -> String {
    finish(command).error().to_owned()
}

/// Runs a tiny run in a new subfolder of `folder`.
#[track_caller]
fn run_tiny(folder: &TempDir, name: &str, config: &str, sets: &[&str]) -> PathBuf {
    let run = folder.path().join(name);
    succeed(tiny(config, &run, sets));
    run
}

#[track_caller]
fn wait_until(what: &str, condition: impl FnMut() -> bool) {
    wait_within(DEADLINE, what, condition);
}

#[track_caller]
fn wait_within(most: Duration, what: &str, mut condition: impl FnMut() -> bool) {
    let deadline = Instant::now() + most;
    while !condition() {
        assert!(Instant::now() < deadline, "{what}: not within {most:?}");
        thread::sleep(Duration::from_millis(5));
    }
}

/// Returns the complete lines of a run's log; the last line may be incomplete during the run.
fn whole_lines(path: &Path) -> Vec<String> {
    let text = fs::read_to_string(path).unwrap_or_default();
    text.split_inclusive('\n').filter(|line| line.ends_with('\n')).map(str::to_owned).collect()
}

#[track_caller]
fn wait_for_steps(run: &Path, steps: usize) {
    wait_until("steps are recorded", || whole_lines(&run.join("metrics.jsonl")).len() > steps);
}

/// Number of starts that the run's log has.
fn starts(run: &Path) -> usize {
    fs::read_to_string(run.join("log.jsonl")).unwrap_or_default().matches("\"kind\":\"start\"").count()
}

/// A run's metrics, an object a step. Each has a declaration.
#[track_caller]
fn metrics(run: &Path) -> Vec<Map<String, Value>> {
    let lines = whole_lines(&run.join("metrics.jsonl"));
    let steps: Vec<Map<String, Value>> =
        lines.iter().map(|line| serde_json::from_str(line).unwrap()).collect();
    for name in steps.iter().flat_map(Map::keys).filter(|name| *name != "step") {
        assert!(declared(name).is_some(), "`{name}` is not in pipelines/src/metrics/declared.rs");
    }
    steps
}

/// Returns the metrics that do not depend on the clock, which must be bitwise equal between runs.
fn lasting_metrics(run: &Path) -> Vec<Map<String, Value>> {
    let mut steps = metrics(run);
    for step in &mut steps {
        step.retain(|name, _| !name.starts_with("time/") && !name.starts_with("perf/"));
    }
    steps
}

/// Returns the values of a metric, for the steps that have it.
fn series(run: &Path, name: &str) -> Vec<f64> {
    metrics(run).iter().filter_map(|step| step.get(name)?.as_f64()).collect()
}

/// Returns the names of a run's checkpoints, oldest first.
fn checkpoints(run: &Path) -> Vec<String> {
    let Ok(entries) = fs::read_dir(run.join("checkpoints")) else { return Vec::new() };
    let mut names: Vec<_> = entries.map(|it| it.unwrap().file_name().into_string().unwrap()).collect();
    names.sort();
    names
}

/// Returns the name of a run's last checkpoint, and its files' names and bytes. Models other than the policy
/// have subfolders.
fn last_checkpoint(run: &Path) -> (String, BTreeMap<String, Vec<u8>>) {
    let name = checkpoints(run).pop().expect("a checkpoint");
    let mut files = BTreeMap::new();
    read_files(&run.join("checkpoints").join(&name), "", &mut files);
    (name, files)
}

/// Copies a folder into one that may exist.
fn copy_folder(from: &Path, to: &Path) {
    fs::create_dir_all(to).unwrap();
    for entry in fs::read_dir(from).unwrap().map(Result::unwrap) {
        let target = to.join(entry.file_name());
        match entry.file_type().unwrap().is_dir() {
            true => copy_folder(&entry.path(), &target),
            false => drop(fs::copy(entry.path(), target).unwrap()),
        }
    }
}

fn read_files(folder: &Path, prefix: &str, files: &mut BTreeMap<String, Vec<u8>>) {
    for entry in fs::read_dir(folder).unwrap().map(Result::unwrap) {
        let name = format!("{prefix}{}", entry.file_name().into_string().unwrap());
        match entry.file_type().unwrap().is_dir() {
            true => read_files(&entry.path(), &format!("{name}/"), files),
            false => drop(files.insert(name, fs::read(entry.path()).unwrap())),
        }
    }
}

/// Asserts that two runs left the same files, except for values of the clock and folder names.
#[track_caller]
fn assert_same(a: &Path, b: &Path) {
    assert_same_steps(&lasting_metrics(a), &lasting_metrics(b));
    assert_eq!(whole_lines(&a.join("samples.jsonl")), whole_lines(&b.join("samples.jsonl")));
    // Not with assert_eq, which would print megabytes.
    assert!(last_checkpoint(a) == last_checkpoint(b), "the last checkpoints differ");
}

/// Asserts that two runs have the same metrics, and names the first difference.
#[track_caller]
fn assert_same_steps(a: &[Map<String, Value>], b: &[Map<String, Value>]) {
    for (a, b) in a.iter().zip(b) {
        assert_eq!(a, b, "step {}", a["step"]);
    }
    assert_eq!(a.len(), b.len(), "steps");
    // Runs that learn nothing would agree trivially.
    let learned = a.iter().filter(|step| step.get("grad_norm").and_then(Value::as_f64) > Some(0.0));
    assert!(learned.count() > 2, "nothing was learned");
}

/// Returns the processes with this path among their arguments: a run's launcher and its ranks.
fn processes_of(run: &Path) -> Vec<Pid> {
    let pids = fs::read_dir("/proc").unwrap().filter_map(|it| it.ok()?.file_name().to_str()?.parse().ok());
    let names_run = |pid: &i32| {
        // A process that ended in between has no arguments, and neither has a zombie.
        let arguments = fs::read(format!("/proc/{pid}/cmdline")).unwrap_or_default();
        arguments.split(|&byte| byte == 0).any(|argument| argument == run.to_str().unwrap().as_bytes())
    };
    pids.filter(names_run).map(Pid::from_raw).collect()
}

/// Returns the process of a rank.
fn rank_of(run: &Path, rank: usize) -> Pid {
    let variable = format!("RANK={rank}");
    let is_rank = |pid: &Pid| {
        let variables = fs::read(format!("/proc/{pid}/environ")).unwrap_or_default();
        variables.split(|&byte| byte == 0).any(|it| it == variable.as_bytes())
    };
    processes_of(run).into_iter().find(is_rank).unwrap_or_else(|| panic!("no rank {rank}"))
}

/// Asserts that shortly after its launcher's exit, no process of a run is left.
#[track_caller]
fn assert_nothing_left(run: &Path) {
    let deadline = Instant::now() + Duration::from_secs(10);
    while !processes_of(run).is_empty() {
        assert!(Instant::now() < deadline, "still running: {:?}", processes_of(run));
        thread::sleep(Duration::from_millis(10));
    }
}

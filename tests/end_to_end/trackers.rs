//! Trackers: Weights & Biases, trackio and MLflow get a run's metrics while it goes on.

use std::fs;
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::Duration;

use nix::sys::signal::{Signal, kill};
use serde_json::{Map, Value};
use tempfile::TempDir;

use super::{
    Ended, ONE_RANK, Process, TWO_RANKS, anyroll, fail, interrupt, metrics, processes_of, python_with,
    rank_of, resume, run_tiny, succeed, tiny, wait_for_steps, wait_until, wait_within, whole_lines,
};

/// Replacement of the package wandb, which writes its calls into the file TOLD. MOOD makes it fail. Its child process
/// stands for wandb's service.
const WANDB: &str = r#"
import json, os, subprocess, sys, time

def note(**call):
    with open(os.environ["TOLD"], "a") as file:
        file.write(json.dumps(call) + "\n")

def act(place):
    mood = os.environ.get("MOOD", "")
    if mood == place + " hangs":
        time.sleep(600)
    if mood == place + " raises":
        raise RuntimeError("no room left")
    if mood == place + " exits":
        print("a wild pointer", file=sys.stderr)
        os._exit(7)

class AlertLevel:
    WARN = "warn"

def Table(columns, data, **_):
    return {"columns": columns, "data": data}

class Run:
    url = "http://fake.example/run"
    def __init__(self, mode):
        self.offline, self.summary = mode == "offline", {}
    def log(self, row, step, commit):
        if step == 3:
            act("log")
        note(step=step, row=row)
    def alert(self, title, text, level):
        note(alert=[title, text, level])
    def finish(self, exit_code):
        act("finish")
        note(finish=exit_code, summary=self.summary)

def init(mode=None, **asked):
    service = subprocess.Popen(["sleep", "97"], start_new_session=True)
    note(init=asked, mode=mode, processes=[os.getpid(), os.getppid(), service.pid])
    act("init")
    return Run(mode)
"#;

/// A folder with the replacement.
struct Fake {
    folder: TempDir,
}

impl Fake {
    fn new() -> Self {
        let folder = tempfile::tempdir().unwrap();
        fs::create_dir(folder.path().join("package")).unwrap();
        fs::write(folder.path().join("package/wandb.py"), WANDB).unwrap();
        Self { folder }
    }

    fn at(&self, name: &str) -> PathBuf {
        self.folder.path().join(name)
    }

    fn with(&self, mut command: Command, mood: &str) -> Command {
        command.env("PYTHONPATH", self.at("package")).env("TOLD", self.at("told")).env("MOOD", mood);
        command
    }

    /// A tiny run that tells the replacement.
    fn run(&self, name: &str, config: &str, sets: &[&str], mood: &str) -> Command {
        let sets = [&["metrics.wandb={project: sorting, tags: [a]}"], sets].concat();
        self.with(tiny(config, &self.at(name), &sets), mood)
    }

    /// All calls so far.
    fn told(&self) -> Vec<Value> {
        whole_lines(&self.at("told")).iter().map(|line| serde_json::from_str(line).unwrap()).collect()
    }

    fn told_of(&self, call: &str) -> Vec<Value> {
        self.told().into_iter().filter_map(|mut it| Some(it.get_mut(call)?.take())).collect()
    }

    /// Waits until the processes of all starts have ended.
    #[track_caller]
    fn assert_nothing_left(&self) {
        let all = self.told_of("processes");
        assert!(!all.is_empty());
        let own = self.at("told").into_os_string().into_encoded_bytes();
        for pid in all.iter().flat_map(|it| it.as_array().unwrap()) {
            let environment = Path::new("/proc").join(pid.to_string()).join("environ");
            // Another process may have the number by now, with another environment.
            let is_own =
                || fs::read(&environment).is_ok_and(|all| all.windows(own.len()).any(|part| part == own));
            wait_within(Duration::from_secs(20), "a process of the tracker has ended", || !is_own());
        }
    }
}

/// The metrics of the steps that a replacement was told; its rows have samples too.
fn steps(told: &[Value]) -> Vec<Map<String, Value>> {
    let of_step = |call: &Value| {
        let mut row = call.get("row")?.as_object()?.clone();
        row.retain(|name, _| !name.starts_with("samples/"));
        row.insert("step".to_owned(), call["step"].clone());
        Some(row)
    };
    told.iter().filter_map(of_step).collect()
}

#[test]
fn wandb_follows_a_run_and_its_resumption() {
    let fake = Fake::new();
    let sets = ["pipeline.rlvr.reward=[regex: {pattern: never}]", "pipeline.rlvr.steps=40"];
    let run = fake.at("run");
    let first = interrupt(fake.run("run", TWO_RANKS, &sets, ""), &run, 12);
    assert!(first.stderr.contains("wandb: http://fake.example/run"), "{}", first.stderr);
    assert_eq!(fake.told().last().unwrap()["summary"]["ended"], "interrupted");
    let second = succeed(fake.with(resume(&run), ""));
    assert!(!second.stderr.contains("warning"), "{}", second.stderr);

    let told = fake.told();
    assert_eq!(told.last().unwrap()["summary"]["ended"], "finished");
    let starts = fake.told_of("init");
    let [first, second] = &starts[..] else { panic!("rank 0 alone starts it, once a start: {starts:#?}") };
    assert_eq!((&first["id"], &first["resume"]), (&second["id"], &"allow".into()));
    assert_eq!((&first["project"], &first["name"]), (&"sorting".into(), &"rlvr_sort_cpu_2ranks".into()));
    assert_eq!((&first["tags"][0], first.get("entity")), (&"a".into(), None));
    assert_eq!(first["config"]["pipeline"]["rlvr"]["reward"][0]["regex"]["pattern"], "never");
    let (sent, own) = (steps(&told), metrics(&run));
    assert_eq!((sent.len(), own.len()), (41, 41));
    for (sent, own) in sent.iter().zip(&own) {
        assert_eq!(sent, own);
    }
    let alerts = fake.told_of("alert");
    let own = whole_lines(&run.join("advice.jsonl"));
    assert_eq!(alerts.len(), own.len());
    assert!(alerts.iter().any(|it| it[0] == "all_wrong at step 10" && it[2] == "warn"), "{alerts:#?}");
    assert_samples(&told, &run);
    fake.assert_nothing_left();
}

/// Asserts that each sample of the run was told at its step, with its completion and reward.
#[track_caller]
fn assert_samples(told: &[Value], run: &Path) {
    let own: Vec<Value> = whole_lines(&run.join("samples.jsonl"))
        .iter()
        .map(|line| serde_json::from_str(line).unwrap())
        .collect();
    let mut sent = Vec::new();
    for call in told.iter().filter(|call| call.get("row").is_some()) {
        for name in ["samples/evaluation", "samples/training"] {
            let Some(table) = call["row"].get(name) else { continue };
            let columns = table["columns"].as_array().unwrap();
            let at = |column: &str| columns.iter().position(|it| it == column).unwrap();
            for row in table["data"].as_array().unwrap() {
                sent.push((call["step"].clone(), row[at("completion")].clone(), row[at("reward")].clone()));
            }
        }
    }
    let key = |it: &(Value, Value, Value)| (it.0.as_u64(), it.1.to_string(), it.2.to_string());
    let mut own: Vec<_> =
        own.iter().map(|it| (it["step"].clone(), it["completion"].clone(), it["reward"].clone())).collect();
    own.sort_by_key(key);
    sent.sort_by_key(key);
    assert!(!own.is_empty());
    assert_eq!(sent, own);
}

/// The words of the failure come once while the run goes on, and once at its end.
#[test]
fn a_tracker_that_fails_is_told_and_the_rest_is_sent_later() {
    let fake = Fake::new();
    for (mood, words) in [
        ("log raises", "RuntimeError: no room left"),
        ("log exits", "its process ended: a wild pointer"),
        ("init raises", "RuntimeError: no room left"),
        ("log hangs", "it was not done within 5 s"),
        ("init hangs", "it was not done within 5 s"),
        ("finish hangs", "it was not done within 5 s"),
    ] {
        let _ = fs::remove_file(fake.at("told"));
        let run = fake.at(&mood.replace(' ', "_"));
        // A tracker that is only slow to start, on a busy machine, is not meant here.
        let timeout = if mood.ends_with("hangs") { "metrics.finish_timeout_s=5" } else { "seed=0" };
        let ended = succeed(fake.run(run.file_name().unwrap().to_str().unwrap(), ONE_RANK, &[timeout], mood));
        assert_told(&ended, words, !mood.ends_with("hangs"));
        assert_eq!(metrics(&run).len(), 13, "{mood}");
        fake.assert_nothing_left();

        let sent = succeed(fake.with(anyroll(["upload", run.to_str().unwrap()]), ""));
        assert!(sent.stdout.contains("everything"), "{sent:#?}");
        let starts = fake.told_of("init");
        assert!(starts.iter().all(|it| it["id"] == starts[0]["id"]), "{mood}: one run");
        let told = steps(&fake.told());
        assert_eq!(told, metrics(&run), "{mood}");
        assert_eq!(fake.told().last().unwrap()["summary"]["ended"], "finished");
        fake.assert_nothing_left();
    }
}

#[track_caller]
fn assert_told(ended: &Ended, words: &str, at_once: bool) {
    let lines: Vec<&str> = ended.stderr.lines().filter(|line| line.starts_with("warning: wandb")).collect();
    let at_end = "warning: wandb did not get everything: ";
    let [.., last] = lines[..] else { panic!("{}", ended.stderr) };
    assert!(last.starts_with(at_end) && last.contains(words) && last.contains("`anyroll upload "), "{last}");
    assert_eq!(lines.len(), 1 + usize::from(at_once), "{}", ended.stderr);
    assert!(lines[0].contains(words), "{}", lines[0]);
    // It comes after the table of results.
    assert!(ended.stderr.find("tensorboard --logdir") < ended.stderr.find(at_end), "{}", ended.stderr);
}

#[test]
fn a_tracker_ends_with_its_run() {
    let fake = Fake::new();
    let start = |name: &str| {
        let _ = fs::remove_file(fake.at("told"));
        let sets = ["pipeline.rlvr.steps=20000", "metrics.finish_timeout_s=1"];
        let process = Process::start(fake.run(name, TWO_RANKS, &sets, "log hangs"));
        wait_for_steps(&fake.at(name), 2);
        wait_until("the tracker has started", || !fake.told_of("processes").is_empty());
        process
    };
    let rank_0 = start("rank_0");
    kill(rank_of(&fake.at("rank_0"), 0), Signal::SIGKILL).unwrap();
    assert_eq!(rank_0.finish().code, Some(1));
    fake.assert_nothing_left();

    let rank_1 = start("rank_1");
    kill(rank_of(&fake.at("rank_1"), 1), Signal::SIGKILL).unwrap();
    assert_eq!(rank_1.finish().code, Some(1));
    fake.assert_nothing_left();

    let parent = start("parent");
    parent.send(Signal::SIGKILL);
    fake.assert_nothing_left();
    let run = fake.at("parent");
    wait_until("the ranks have ended", || processes_of(&run).is_empty());

    for (name, signal) in [("int", Signal::SIGINT), ("term", Signal::SIGTERM)] {
        let process = start(name);
        process.send(signal);
        assert_eq!(process.finish().code, Some(130));
        fake.assert_nothing_left();
    }
}

#[test]
fn a_run_that_fails_is_marked_as_failed() {
    let fake = Fake::new();
    let file = fake.at("reward.py");
    let late = "import os\ndef f(completions):\n    open('{}', 'a').write('x')\n    n = os.path.getsize('{}')\n    return [1 / max(0, 200 - n) * 0]\n";
    fs::write(&file, late.replace("{}", fake.at("count").to_str().unwrap())).unwrap();
    let reward = format!("pipeline.rlvr.reward=[{{python: {{path: {}, function: f}}}}]", file.display());
    let error = fail(fake.run("run", ONE_RANK, &[&reward], ""));
    assert!(error.contains("ZeroDivisionError"), "{error}");
    let last = fake.told().pop().unwrap();
    assert_eq!((&last["finish"], &last["summary"]["ended"]), (&1.into(), &"failed".into()));
    fake.assert_nothing_left();
}

#[test]
fn a_missing_package_is_told_before_the_run() {
    let folder = tempfile::tempdir().unwrap();
    // A Python without any packages.
    let bare = folder.path().join("python");
    fs::write(&bare, "#!/bin/sh\nexec python3 -I -S \"$@\"\n").unwrap();
    fs::set_permissions(&bare, fs::Permissions::from_mode(0o755)).unwrap();
    let python = format!("metrics.python={}", bare.display());
    let run = folder.path().join("run");
    for (name, fields) in
        [("wandb", "{project: a}"), ("trackio", "{project: a}"), ("mlflow", "{experiment: a}")]
    {
        let tracker = format!("metrics.{name}={fields}");
        let check = anyroll(["check", ONE_RANK, "--set", &tracker, "--set", &python]);
        for command in [check, tiny(ONE_RANK, &run, &[&tracker, &python])] {
            let ended = super::finish(command);
            assert_eq!(ended.code, Some(1), "{ended:#?}");
            for words in [&format!("metrics.{name}"), "has no package", &format!("-m pip install {name}")] {
                assert!(ended.stderr.contains(words), "no {words:?} in {}", ended.stderr);
            }
        }
    }
    assert!(!run.exists(), "the run has begun");
    let alone = fail(anyroll(["check", ONE_RANK, "--set", &python]));
    assert!(alone.contains("metrics.python"), "{alone}");
}

#[test]
fn export_wandb_sends_every_metric_and_the_config() {
    let fake = Fake::new();
    let run = run_tiny(&fake.folder, "a-run", ONE_RANK, &["pipeline.rlvr.steps=3"]);
    let export = |sets: &[&str], mood: &str| {
        let mut command = anyroll(["export-wandb", run.to_str().unwrap()]);
        command.args(sets);
        fake.with(command, mood)
    };
    assert!(fail(export(&[], "init raises")).contains("could not write the run for wandb: RuntimeError"));
    assert!(fail(export(&["--python", "no-such-python"], "")).contains("no-such-python"));
    assert!(fail(anyroll(["upload", run.to_str().unwrap()])).contains("names no tracker"));
    fs::remove_file(fake.at("told")).unwrap();

    let ended = succeed(export(&["--project", "sorting"], ""));
    assert!(ended.stdout.contains("wandb sync"), "{ended:#?}");
    let told = fake.told();
    let asked = &told[0]["init"];
    assert_eq!((&asked["project"], &told[0]["mode"]), (&"sorting".into(), &"offline".into()));
    assert_eq!((&asked["id"], &asked["name"]), (&"a-run".into(), &"rlvr_sort_cpu".into()));
    assert_eq!(asked["config"]["pipeline"]["rlvr"]["steps"], 3);
    assert_eq!(steps(&told), metrics(&run));
    assert_samples(&told, &run);
}

/// Reads a run back from the packages themselves, as far as they are installed.
#[test]
fn the_packages_have_every_metric() {
    let folder = tempfile::tempdir().unwrap();
    let store = format!("sqlite:///{}", folder.path().join("mlflow.db").display());
    let kinds = [
        ("wandb", "{project: sorting, mode: offline}".to_owned()),
        ("trackio", "{project: sorting}".to_owned()),
        ("mlflow", format!("{{experiment: sorting, tracking_uri: \"{store}\"}}")),
    ];
    for (kind, fields) in kinds {
        let Some(python) = python_with(kind, &format!("a run was not read back from {kind}")) else {
            continue;
        };
        let run = folder.path().join(kind);
        let tracker = format!("metrics.{kind}={fields}");
        let python_of = format!("metrics.python={python}");
        let sets = [&*tracker, &python_of, "metrics.finish_timeout_s=100"];
        let config = concat!(env!("CARGO_MANIFEST_DIR"), "/../", "configs/rlvr_sort_cpu.yaml");
        let here = |mut command: Command| {
            command.current_dir(folder.path()).env("TRACKIO_DIR", folder.path().join("trackio"));
            command
        };
        interrupt(here(tiny(config, &run, &sets)), &run, 5);
        let ended = succeed(here(resume(&run)));
        assert!(!ended.stderr.contains("warning"), "{}", ended.stderr);
        let script = concat!(env!("CARGO_MANIFEST_DIR"), "/../tests/python/read_tracker.py");
        let mut command = Command::new(&python);
        command.arg(script).arg(kind).arg(&run).arg(&store);
        let read: Value = serde_json::from_str(&succeed(here(command)).stdout).unwrap();
        for own in metrics(&run) {
            let found = &read["steps"][own["step"].to_string()];
            for (name, value) in own.iter().filter(|(name, _)| *name != "step") {
                let name = if kind == "mlflow" { name.replace('@', "_at_") } else { name.clone() };
                assert_eq!(found[&name].as_f64(), value.as_f64(), "{kind}: {name} of step {}", own["step"]);
            }
        }
        assert_eq!(read["steps"].as_object().unwrap().len(), metrics(&run).len(), "{kind}");
        assert_eq!(read["name"], "rlvr_sort_cpu", "{kind}: the config");
    }
}

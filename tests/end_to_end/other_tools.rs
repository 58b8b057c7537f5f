//! Other tools that read a run: Prometheus while it runs, Weights & Biases afterwards.

use std::fs;
use std::net::TcpListener;

use serde_json::Value;

use super::{
    ONE_RANK, Process, TWO_RANKS, anyroll, fail, metrics, run_tiny, succeed, tiny, wait_for_steps, wait_until,
};

#[test]
fn prometheus_reads_the_metrics_while_the_run_goes_on() {
    let folder = tempfile::tempdir().unwrap();
    let run = folder.path().join("run");
    let taken = TcpListener::bind("127.0.0.1:0").unwrap();
    let port = taken.local_addr().unwrap().port();
    let sets =
        [format!("metrics.prometheus={port}"), "pipeline.rlvr.steps=2000".into(), "name=watched".into()];
    let sets: Vec<&str> = sets.iter().map(String::as_str).collect();

    let error = fail(tiny(TWO_RANKS, &run, &sets));
    assert!(error.contains("metrics.prometheus") && error.contains(&port.to_string()), "{error}");
    drop(taken);

    let run = folder.path().join("watched");
    let process = Process::start(tiny(TWO_RANKS, &run, &sets));
    wait_for_steps(&run, 2);
    let mut page = String::new();
    wait_until("the page has a step", || {
        let answer = ureq::get(format!("http://127.0.0.1:{port}/metrics")).call();
        page = answer.ok().and_then(|mut it| it.body_mut().read_to_string().ok()).unwrap_or_default();
        page.contains("anyroll_step{run=\"watched\"} ")
    });
    for line in
        ["# TYPE anyroll_reward_mean gauge\nanyroll_reward_mean{run=\"watched\"} ", "\nanyroll_eval_pass_1{"]
    {
        assert!(page.contains(line), "no {line:?} in\n{page}");
    }
    process.send(nix::sys::signal::Signal::SIGINT);
    assert_eq!(process.finish().code, Some(130));

    let refused = fail(tiny(ONE_RANK, &folder.path().join("none"), &["metrics.prometheus=somewhere"]));
    assert!(refused.contains("metrics.prometheus"), "{refused}");
}

/// Replacement of the package, which records its calls.
const WANDB: &str = r#"
import json, os

class Board:
    def __init__(self, **asked):
        self.told = {"asked": asked, "steps": []}
    def __enter__(self):
        return self
    def __exit__(self, *_):
        with open(os.environ["TOLD"], "w") as file:
            json.dump(self.told, file)
    def log(self, metrics, step):
        self.told["steps"].append([step, metrics])

def init(**asked):
    return Board(**asked)
"#;

#[test]
fn wandb_gets_every_metric_and_the_config() {
    let folder = tempfile::tempdir().unwrap();
    let run = run_tiny(&folder, "a-run", ONE_RANK, &["pipeline.rlvr.steps=3"]);
    let (package, told) = (folder.path().join("package"), folder.path().join("told.json"));
    fs::create_dir(&package).unwrap();
    let export = |sets: &[&str]| {
        let mut command = anyroll(["export-wandb", run.to_str().unwrap()]);
        command.args(sets).env("PYTHONPATH", &package).env("TOLD", &told);
        command
    };
    // The machine's own wandb, if any, must not be found first.
    fs::write(package.join("wandb.py"), "raise ImportError\n").unwrap();
    assert!(fail(export(&[])).contains("could not write the run for wandb"));
    assert!(fail(export(&["--python", "no-such-python"])).contains("no-such-python"));

    fs::write(package.join("wandb.py"), WANDB).unwrap();
    let ended = succeed(export(&["--project", "sorting"]));
    assert!(ended.stdout.contains("wandb sync"), "{ended:#?}");
    let told: Value = serde_json::from_slice(&fs::read(&told).unwrap()).unwrap();
    let asked = &told["asked"];
    assert_eq!((&asked["project"], &asked["mode"]), (&"sorting".into(), &"offline".into()));
    assert_eq!((&asked["id"], &asked["name"]), (&"a-run".into(), &"rlvr_sort_cpu".into()));
    assert_eq!(asked["config"]["pipeline"]["rlvr"]["steps"], 3);
    let steps = told["steps"].as_array().unwrap();
    let own = metrics(&run);
    assert_eq!((steps.len(), own.len()), (4, 4));
    for (step, mut own) in steps.iter().zip(own) {
        assert_eq!(own.shift_remove("step").as_ref(), Some(&step[0]));
        assert_eq!(step[1], Value::Object(own));
    }
}

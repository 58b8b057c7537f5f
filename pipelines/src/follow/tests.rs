//! A run that is followed while its files grow.

use std::fs::{self, OpenOptions};
use std::io::Write;
use std::path::Path;

use serde_json::{Value, json};

use super::*;
use crate::metrics::{Metrics, MetricsLog};
use crate::run_log::{LogKind, RunLog};
use crate::sample_text::tests::sample;
use crate::samples::SamplesLog;

const CONFIG: &str = "name: sort\nbackend: cpu\npipeline:\n  rlvr:\n    steps: 20\n";

fn run_at(path: &Path) -> RunDir {
    let run = RunDir::create(path, CONFIG, CONFIG).unwrap();
    MetricsLog::create(&run.metrics()).unwrap();
    SamplesLog::create(&run.samples()).unwrap();
    run
}

fn append(path: &Path, text: &str) {
    OpenOptions::new().append(true).open(path).unwrap().write_all(text.as_bytes()).unwrap();
}

fn step(run: &RunDir, step: u64, reward: f64) {
    append(&run.metrics(), &format!("{{\"step\":{step},\"reward/mean\":{reward},\"time/step_s\":2.0}}\n"));
}

fn update(follower: &Follower, cursor: &mut Cursor) -> Value {
    serde_json::to_value(follower.update(cursor)).unwrap()
}

#[test]
fn an_update_has_the_changes_since_the_last_one() {
    let folder = tempfile::tempdir().unwrap();
    let run = run_at(&folder.path().join("run"));
    let lock = run.lock().unwrap();
    let mut follower = Follower::open(run.path()).unwrap();
    let mut cursor = Cursor::default();
    follower.poll().unwrap();
    let first = update(&follower, &mut cursor);
    assert_eq!((&first["reset"], &first["head"]["state"]), (&json!(true), &json!("running")));
    assert_eq!((&first["head"]["steps"], &first["head"]["step"]), (&json!(20), &Value::Null));
    assert!(!follower.poll().unwrap(), "nothing was written");

    for number in 1..=4 {
        step(&run, number, number as f64 / 10.0);
    }
    append(&run.metrics(), "{\"step\":5,\"rew");
    assert!(follower.poll().unwrap());
    let second = update(&follower, &mut cursor);
    assert_eq!(second["reset"], false);
    assert_eq!(
        second["curves"]["of"]["reward/mean"],
        json!({"at": [1, 2, 3, 4], "mean": [0.1, 0.2, 0.3, 0.4]})
    );
    assert_eq!((&second["head"]["step"], &second["head"]["left_s"]), (&json!(4), &json!(32.0)));

    append(&run.metrics(), "ard/mean\":0.5}\n");
    let mut samples = SamplesLog::resume(&run.samples(), 99).unwrap();
    samples.append(&sample(5, 0, "</script>", 1.0)).unwrap();
    assert!(follower.poll().unwrap());
    let third = update(&follower, &mut cursor);
    // The last stretch comes again, since it may have grown.
    assert_eq!(third["curves"]["of"]["reward/mean"]["at"], json!([4, 5]));
    assert_eq!(third["rows"][0]["completion"], "</script>");
    assert_eq!(third["training"]["rows"][0]["step"], 5);
    drop(lock);
    assert!(follower.poll().unwrap() && follower.state() == State::Stopped);
}

#[test]
fn a_resumed_run_is_read_anew_and_the_end_is_told() {
    let folder = tempfile::tempdir().unwrap();
    let run = run_at(&folder.path().join("run"));
    (1..=6).for_each(|number| step(&run, number, 1.0));
    let mut log = RunLog::open(&run.log()).unwrap();
    log.append(LogKind::Start, "GRPO on sorting").unwrap();
    log.append(LogKind::Failed, "rank 0 died").unwrap();
    let mut follower = Follower::open(run.path()).unwrap();
    let mut cursor = Cursor::default();
    follower.poll().unwrap();
    let failed = update(&follower, &mut cursor);
    assert_eq!(
        (&failed["head"]["state"], &failed["head"]["reason"]),
        (&json!("failed"), &json!("rank 0 died"))
    );
    assert_eq!(failed["head"]["description"], "GRPO on sorting");

    let mut metrics = MetricsLog::resume(&run.metrics(), 3).unwrap();
    log.append(LogKind::Start, "GRPO on sorting").unwrap();
    let mut values = Metrics::new();
    values.insert("reward/mean", 0.25);
    metrics.append(3, &values).unwrap();
    let lock = run.lock().unwrap();
    assert!(follower.poll().unwrap());
    let resumed = update(&follower, &mut cursor);
    assert_eq!((&resumed["reset"], &resumed["head"]["state"]), (&json!(true), &json!("running")));
    assert_eq!(resumed["curves"]["of"]["reward/mean"], json!({"at": [1, 2, 3], "mean": [1.0, 1.0, 0.25]}));
    drop(lock);
}

#[test]
fn a_whole_line_that_is_no_record_is_named_and_read_again_once_mended() {
    let folder = tempfile::tempdir().unwrap();
    let run = run_at(&folder.path().join("run"));
    step(&run, 1, 1.0);
    append(&run.metrics(), "{broken\n");
    let mut follower = Follower::open(run.path()).unwrap();
    for _ in 0..2 {
        let error = follower.poll().unwrap_err();
        assert!(matches!(&error, OutputError::Malformed { line: 2, .. }), "{error}");
    }
    fs::write(run.metrics(), "{\"step\":1}\n{\"step\":2}\n").unwrap();
    follower.poll().unwrap();
    assert_eq!(update(&follower, &mut Cursor::default())["head"]["step"], 2);
}

#[test]
fn a_long_run_takes_bounded_memory_and_a_short_message() {
    let folder = tempfile::tempdir().unwrap();
    let run = run_at(&folder.path().join("run"));
    let line = |step: u64| format!("{{\"step\":{step},\"reward/mean\":{}}}\n", (step % 7) as f64 / 7.0);
    append(&run.metrics(), &(1..=50_000).map(line).collect::<String>());
    let mut follower = Follower::open(run.path()).unwrap();
    follower.poll().unwrap();
    let mut cursor = Cursor::default();
    let whole = update(&follower, &mut cursor);
    let curve = &whole["curves"]["of"]["reward/mean"];
    let count = curve["at"].as_array().unwrap().len();
    assert!((500..=1024).contains(&count), "{count} points");
    assert_eq!(["mean", "low", "high"].map(|it| curve[it].as_array().unwrap().len()), [count; 3]);
    append(&run.metrics(), &line(50_001));
    follower.poll().unwrap();
    assert!(update(&follower, &mut cursor).to_string().len() < 3_000);
}

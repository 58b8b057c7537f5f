//! Advice while a run is in progress.

use std::fs;
use std::path::Path;

use serde_json::Value;

use super::{ONE_RANK, interrupt, resume, succeed, tiny, whole_lines};

fn advice(run: &Path) -> Vec<Value> {
    whole_lines(&run.join("advice.jsonl")).iter().map(|line| serde_json::from_str(line).unwrap()).collect()
}

#[test]
fn a_reward_that_never_pays_is_told_once_also_after_a_resume() {
    let folder = tempfile::tempdir().unwrap();
    let run = folder.path().join("run");
    let sets = [
        "pipeline.rlvr.reward=[regex: {pattern: never}]",
        "pipeline.rlvr.steps=60",
        "pipeline.rlvr.evaluation.every=60",
    ];
    let told = "100 % of the groups of 10 steps were without a right completion";
    let first = interrupt(tiny(ONE_RANK, &run, &sets), &run, 14);
    assert_eq!(first.stderr.matches(told).count(), 1, "{}", first.stderr);
    assert!(first.stderr.contains("advice at step 10: ") && first.stderr.contains("samples.jsonl"));
    let second = succeed(resume(&run));
    assert!(!second.stderr.contains(told), "{}", second.stderr);
    let of_groups: Vec<Value> = advice(&run).into_iter().filter(|it| it["rule"] == "all_wrong").collect();
    assert_eq!(of_groups.len(), 1);
    assert_eq!(of_groups[0]["step"], 10);
    assert!(fs::read_to_string(run.join("report.html")).unwrap().contains(told));

    // A run that learns is left alone by this rule.
    let well = folder.path().join("well");
    let ended = succeed(tiny(ONE_RANK, &well, &[]));
    assert!(!ended.stderr.contains(told) && advice(&well).iter().all(|it| it["rule"] != "all_wrong"));
}

//! Completions of training in a run's folder.

use std::{collections::BTreeSet, fs, path::Path};

use serde_json::Value;

use super::{
    ONE_RANK, TWO_RANKS, assert_same_steps, interrupt, lasting_metrics, resume, run_tiny, succeed, tiny,
    whole_lines,
};

/// Lines of training steps.
fn trained(run: &Path) -> Vec<Value> {
    let lines = whole_lines(&run.join("samples.jsonl"));
    let lines = lines.iter().map(|line| serde_json::from_str::<Value>(line).unwrap());
    lines.filter(|line| line["phase"] == "train").collect()
}

fn steps(lines: &[Value]) -> Vec<u64> {
    let mut steps: Vec<u64> = lines.iter().map(|line| line["step"].as_u64().unwrap()).collect();
    steps.dedup();
    steps
}

/// Each line has its own prompt, answer and reward: an exact reward is 1 only for the answer.
#[track_caller]
fn assert_belong_together(lines: &[Value]) {
    for line in lines {
        let text = |name: &str| line[name].as_str().unwrap();
        let mut digits: Vec<char> = text("prompt").trim_end_matches('>').chars().collect();
        digits.sort_unstable();
        assert_eq!(text("answer"), digits.iter().collect::<String>());
        let is_right = text("completion") == text("answer") && line["training"]["cut"] == false;
        assert_eq!(line["reward"].as_f64(), Some(f64::from(u8::from(is_right))), "{line}");
        assert_eq!(line["training"]["terms"]["exact"], line["reward"], "{line}");
    }
    assert!(lines.iter().any(|line| line["reward"] == 1.0), "no line is right");
    assert!(lines.iter().any(|line| line["reward"] == 0.0), "no line is wrong");
}

#[test]
fn two_groups_of_some_steps_are_written_and_change_no_result() {
    let folder = tempfile::tempdir().unwrap();
    let run = run_tiny(&folder, "run", ONE_RANK, &["pipeline.rlvr.samples.every=4"]);
    let lines = trained(&run);
    assert_eq!(steps(&lines), [1, 4, 8, 12]);
    assert_eq!(lines.len(), 4 * 2 * 4, "two groups of four");
    assert_belong_together(&lines);
    for group in lines.chunks(4) {
        assert_eq!(group.iter().map(|line| line["prompt"].to_string()).collect::<BTreeSet<_>>().len(), 1);
        // Relative to the group's mean, as GRPO's advantage is.
        let of = |name: fn(&Value) -> &Value| {
            group.iter().map(|line| name(line).as_f64().unwrap()).collect::<Vec<_>>()
        };
        let (rewards, advantages) = (of(|line| &line["reward"]), of(|line| &line["training"]["advantage"]));
        let mean = rewards.iter().sum::<f64>() / 4.0;
        for (reward, advantage) in rewards.iter().zip(&advantages) {
            assert!(
                *advantage == 0.0 || (*advantage > 0.0) == (*reward > mean),
                "{rewards:?}: {advantages:?}"
            );
        }
    }
    for both in lines.chunks(8) {
        let total = |group: &[Value]| group.iter().map(|line| line["reward"].as_f64().unwrap()).sum::<f64>();
        assert!(total(&both[..4]) >= total(&both[4..]), "the best group is first: {both:?}");
    }
    let page = fs::read_to_string(run.join("report.html")).unwrap();
    assert!(page.contains("Completions of training") && page.contains("advantage +"));

    let none = run_tiny(&folder, "none", ONE_RANK, &["pipeline.rlvr.samples.every=0"]);
    assert!(trained(&none).is_empty());
    assert_same_steps(&lasting_metrics(&run), &lasting_metrics(&none));

    // The ranks' lines are in the order of the step.
    let two = run_tiny(&folder, "two", TWO_RANKS, &["pipeline.rlvr.samples.every=4"]);
    assert_eq!(steps(&trained(&two)), [1, 4, 8, 12]);
    assert_belong_together(&trained(&two));
    assert_eq!(trained(&two)[..8].len(), 8);
    let of_first = |lines: &[Value]| {
        lines[..8].iter().map(|line| (line["prompt"].clone(), line["completion"].clone())).collect::<Vec<_>>()
    };
    assert_eq!(of_first(&trained(&two)), of_first(&lines));
}

#[test]
fn a_resumed_run_writes_each_line_once() {
    let folder = tempfile::tempdir().unwrap();
    let sets = [
        "pipeline.rlvr.samples={every: 1, groups: 3}",
        "pipeline.rlvr.steps=30",
        "pipeline.rlvr.evaluation.every=30",
    ];
    let whole = run_tiny(&folder, "whole", ONE_RANK, &sets);
    let part = folder.path().join("part");
    interrupt(tiny(ONE_RANK, &part, &sets), &part, 6);
    let shown = succeed({
        let mut command = resume(&part);
        command.arg("--show");
        command
    });
    assert!(shown.stderr.contains("a completion of training: reward"), "{}", shown.stderr);
    assert_eq!(trained(&part), trained(&whole));
    assert_eq!(trained(&part).len(), 30 * 3 * 4);
}

/// Groups of an earlier step, and groups that replaced others, are written with their own prompts.
#[test]
fn lines_have_the_prompts_of_their_groups_in_any_rollout() {
    let folder = tempfile::tempdir().unwrap();
    let every = "pipeline.rlvr.samples={every: 1, groups: 8}";
    for (name, set) in [
        ("late", "pipeline.rlvr.rollout.async={ahead: 1}"),
        ("mixed", "pipeline.rlvr.selection={mixed_groups: {max_batches: 3}}"),
        ("epochs", "pipeline.rlvr.mini_batches=2"),
    ] {
        let run = run_tiny(&folder, name, TWO_RANKS, &[every, set]);
        let lines = trained(&run);
        assert_eq!(lines.len(), 12 * 8 * 4, "{name}");
        assert_belong_together(&lines);
    }
}

//! The `code` reward on programs that are right, wrong, or that cheat.

mod cheats;
mod tasks;

use std::fs;

use serde_json::{Value, json};

use super::{anyroll, finish};
use cheats::{ASSERTS, CHEATS, PRELUDE};
use tasks::TASKS;

/// Returns the score of each program on its tests; `None`, with a printed message, if the machine cannot
/// create the sandbox.
fn scores(cases: &[(String, Value)], sets: &[&str]) -> Option<Vec<f64>> {
    let folder = tempfile::tempdir().unwrap();
    let file = folder.path().join("cases.jsonl");
    let line = |(program, answer): &(String, Value)| {
        json!({"completion": format!("```python\n{program}\n```\n"), "answer": answer}).to_string() + "\n"
    };
    fs::write(&file, cases.iter().map(line).collect::<String>()).unwrap();
    let mut command = anyroll(["reward", "code", "--file", file.to_str().unwrap()]);
    for set in sets {
        command.args(["--set", set]);
    }
    let ended = finish(command);
    if ended.stderr.contains("the sandbox refuses") {
        eprintln!("SKIPPED: this machine cannot create the sandbox: {}", ended.stderr);
        return None;
    }
    assert_eq!(ended.code, Some(0), "{ended:#?}");
    let score = |line: &str| serde_json::from_str::<Value>(line).unwrap()["score"].as_f64().unwrap();
    Some(ended.stdout.lines().map(score).collect())
}

#[test]
fn right_programs_pass_and_wrong_ones_do_not() {
    let program =
        |task: &tasks::Task, program: &str| (program.to_owned(), json!({"asserts": [task.asserts]}));
    let mut cases = Vec::new();
    for task in TASKS {
        cases.extend(task.right.map(|right| program(task, right)));
        cases.push(program(task, task.wrong));
    }
    let Some(scores) = scores(&cases, &[]) else { return };
    assert_eq!(scores.len(), 3 * TASKS.len());
    for ((program, answer), (index, score)) in cases.iter().zip(scores.into_iter().enumerate()) {
        assert_eq!(score, f64::from(index % 3 < 2), "{program}\n{answer}");
    }
}

#[test]
fn no_cheat_passes_a_single_test() {
    let answer = json!({"asserts": ASSERTS});
    let honest = [("what adds", "add = lambda a, b: a + b")];
    let programs = || honest.iter().chain(CHEATS);
    let cases: Vec<(String, Value)> =
        programs().map(|(_, program)| (format!("{PRELUDE}{program}"), answer.clone())).collect();
    let Some(scores) = scores(&cases, &["credit=share", "timeout_s=20"]) else { return };
    assert!(scores.len() == cases.len() && CHEATS.len() >= 40);
    assert_eq!(scores[0], 1.0);
    let passed: Vec<_> = programs().zip(scores).skip(1).filter(|(_, score)| *score > 0.0).collect();
    assert!(passed.is_empty(), "{passed:#?}");
}

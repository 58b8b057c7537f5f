//! The `code` reward on programs that are right, wrong, or that cheat.

mod cheats;
mod tasks;

use std::fs;
use std::path::Path;
use std::time::{Duration, Instant};

use nix::sys::signal::Signal;
use serde_json::{Value, json};

use super::{DEADLINE, Process, anyroll, finish, wait_until};
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
    // Cheats that wait for their time limit take half a minute on an idle machine.
    let ended = Process::start(command).finish_within(2 * DEADLINE);
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
    let Some(scores) = scores(&cases, &["credit=share", "timeout_s=8"]) else { return };
    assert!(scores.len() == cases.len() && CHEATS.len() >= 40);
    assert_eq!(scores[0], 1.0);
    let passed: Vec<_> = programs().zip(scores).skip(1).filter(|(_, score)| *score > 0.0).collect();
    assert!(passed.is_empty(), "{passed:#?}");
}

#[test]
fn a_prelude_stands_before_programs() {
    let cases = [
        ("print(gcd(4, 6))".to_owned(), json!({"inputs": [""], "outputs": ["2\n"]})),
        (
            "from __future__ import annotations\ndef f(xs: List[int]) -> int: return gcd(*xs)".to_owned(),
            json!({"asserts": ["assert f([4, 6]) == 2"]}),
        ),
    ];
    let Some(without) = scores(&cases, &[]) else { return };
    let prelude = "prelude=\"from math import *\\nfrom typing import *\"";
    assert_eq!((without, scores(&cases, &[prelude]).unwrap()), (vec![0.0, 0.0], vec![1.0, 1.0]));
}

/// A program of any length is scored, whatever the size of its disk.
#[test]
fn a_long_program_is_no_failure() {
    let long = format!("# {}\nprint(2)", "x".repeat(3 << 20));
    let cases = [(long, json!({"inputs": [""], "outputs": ["2\n"]}))];
    let Some(scores) = scores(&cases, &["disk_mib=1"]) else { return };
    assert_eq!(scores, [1.0]);
}

/// Texts of tests in their usual forms: a right program passes each, and a wrong one none.
const FORMS: &[&str] = &[
    "class TestAdd:\n    def test_a(self):\n        assert add(1, 2) == 3\n",
    "import unittest\nclass T(unittest.TestCase):\n    def setUp(self):\n        self.one = 1\n    def test_a(self):\n        \
     self.assertEqual(add(self.one, 2), 3)\nif __name__ == '__main__':\n    unittest.main()\n",
    "import pytest\n@pytest.mark.parametrize('a, b', [(1, 3), (2, 4)])\ndef test_p(a, b):\n    assert add(a, 2) == b\n",
    "import asyncio\nasync def test_a():\n    await asyncio.sleep(0)\n    assert add(1, 2) == 3\n",
    "from solution import add\n\ndef test_a():\n    assert add(1, 2) == 3\n",
    "def expected(a, b):\n    return a + b\nassert add(1, 2) == expected(1, 2)\n",
    "assert (sum_ := add(1, 2)) == 3\n",
    "if add(1, 2) != 3:\n    raise AssertionError\n",
];

/// Texts that test nothing, or that need a missing module.
const BAD: &[&str] = &[
    "",
    "# assert add(1, 2) == 3\n",
    "add(1, 2) == 3\n",
    "print(add(1, 2) == 3)\n",
    "def check(candidate):\n    assert candidate(1, 2) == 3\n",
    "async def verify():\n    assert add(1, 2) == 3\n",
    "def assert_same(a, b):\n    return a == b\nassert_same(add(1, 2), 3)\n",
    "try:\n    assert add(1, 2) == 3\nexcept AssertionError:\n    print('no')\n",
    "assert (add(1, 2) == 3, 'no')\n",
    "assert True\n",
    "if False:\n    assert add(1, 2) == 3\n",
    "import not_installed_xyz\nassert add(1, 2) == 3\n",
    "import pytest\n@pytest.fixture\ndef one():\n    return 1\ndef test_a(one):\n    assert add(one, 2) == 3\n",
];

#[test]
fn a_text_that_tests_nothing_never_pays() {
    let programs = [
        "def add(a, b): return a + b",
        "def add(a, b): return 0",
        "class Any:\n    __eq__ = lambda self, other: True\ndef add(a, b): return Any()",
    ];
    let case = |text: &&str, program: &&str| ((*program).to_owned(), json!({"asserts": [text]}));
    let cases: Vec<_> = FORMS.iter().flat_map(|text| programs.iter().map(move |it| case(text, it))).collect();
    let Some(scores) = scores(&cases, &[]) else { return };
    for ((program, answer), (index, score)) in cases.iter().zip(scores.into_iter().enumerate()) {
        assert_eq!(score, f64::from(index % 3 == 0), "{program}\n{answer}");
    }
    let folder = tempfile::tempdir().unwrap();
    let file = folder.path().join("cases.jsonl");
    for text in BAD {
        let completion = format!("```python\n{}\n```\n", programs[0]);
        fs::write(&file, json!({"completion": completion, "answer": {"asserts": [text]}}).to_string())
            .unwrap();
        let ended = finish(anyroll(["reward", "code", "--file", file.to_str().unwrap()]));
        assert!(!ended.stdout.contains("\"score\""), "{text}: {ended:#?}");
    }
}

/// An interpreter of a virtual environment is a link from a folder that the sandbox does not have.
#[test]
fn an_interpreter_outside_of_the_sandbox_is_told() {
    let Some(_) = scores(&[("def f(): return 1".to_owned(), json!({"asserts": ["assert f() == 1"]}))], &[])
    else {
        return;
    };
    let folder = tempfile::tempdir().unwrap();
    let [python, file] = ["python", "cases.jsonl"].map(|name| folder.path().join(name));
    std::os::unix::fs::symlink("/usr/bin/python3", &python).unwrap();
    fs::write(&file, json!({"completion": "```python\ndef f(): return 1\n```", "answer": {"asserts": ["assert f() == 1"]}}).to_string()).unwrap();
    let set = format!("python={}", python.display());
    let ended = finish(anyroll(["reward", "code", "--set", &set, "--file", file.to_str().unwrap()]));
    assert!(ended.code == Some(1) && ended.stderr.contains("name the folders in `readable`"), "{ended:#?}");
}

/// Nobody ends the sandbox's processes once the command itself was killed; they end by their own clock.
#[test]
fn programs_of_a_killed_command_end_by_their_own_clock() {
    let answer = json!({"asserts": ["assert f() == 1"]});
    if scores(&[("f = lambda: 1".to_owned(), answer.clone())], &[]).is_none() {
        return;
    }
    const TIMEOUT: Duration = Duration::from_secs(3);
    let folder = tempfile::tempdir().unwrap();
    let file = folder.path().join("cases.jsonl");
    let program = "import os, time\nos.fork()\ntime.sleep(60)\nf = lambda: 1";
    let case = json!({"completion": format!("```python\n{program}\n```"), "answer": answer});
    fs::write(&file, case.to_string()).unwrap();
    let timeout = format!("timeout_s={}", TIMEOUT.as_secs());
    let command = ["reward", "code", "--file", file.to_str().unwrap(), "--set", &timeout];
    let process = Process::start(anyroll(command));
    // Two forks of the program, which its supervisor, process 1 and the helper outside started.
    let mut started = Vec::new();
    wait_until("the program runs", || {
        started = descendants(process.child.id());
        started.len() >= 4
    });
    process.send(Signal::SIGKILL);
    let killed = Instant::now();
    wait_until("all has ended", || {
        started.iter().all(|pid| !Path::new("/proc").join(pid.to_string()).exists())
    });
    let most = TIMEOUT + Duration::from_secs(5);
    assert!(killed.elapsed() < most, "they ended after {:?}", killed.elapsed());
    process.finish();
}

/// Returns the children of a process, and theirs.
fn descendants(pid: u32) -> Vec<u32> {
    let threads = fs::read_dir(format!("/proc/{pid}/task")).into_iter().flatten().filter_map(Result::ok);
    let lines = threads.map(|thread| fs::read_to_string(thread.path().join("children")).unwrap_or_default());
    let lines: Vec<String> = lines.collect();
    let pids = lines.iter().flat_map(|line| line.split_whitespace());
    let children: Vec<u32> = pids.map(|pid| pid.parse().unwrap()).collect();
    let theirs: Vec<u32> = children.iter().flat_map(|&child| descendants(child)).collect();
    [children, theirs].concat()
}

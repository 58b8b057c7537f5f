//! Output of the other commands, and runs on a user's own data.

use std::fs::{self, OpenOptions, Permissions};
use std::os::unix::fs::PermissionsExt;
use std::process::Stdio;
use std::time::Duration;

use serde_json::Value;

use super::{
    Ended, ONE_RANK, TWO_RANKS, anyroll, fail, finish, published_model, series, succeed, tiny, whole_lines,
};

#[test]
fn help_teaches_by_examples() {
    let help = succeed(anyroll(["--help"])).stdout;
    for part in ["anyroll run configs/", "--set", "--resume", "anyroll check", "anyroll doctor", "torchrun"] {
        assert!(help.contains(part), "no {part:?} in {help}");
    }
    let short = succeed(anyroll(["-V"])).stdout;
    assert_eq!(short, format!("anyroll {}\n", env!("CARGO_PKG_VERSION")));
    let long = succeed(anyroll(["--version"])).stdout;
    assert!(long.starts_with(short.trim_end()), "{long}");
    for part in ["\ncommit    ", "\ntorch     2.11.0", "\nbackends  ", "cpu"] {
        assert!(long.contains(part), "no {part:?} in {long}");
    }
    // Without arguments, the help; clap's exit code for a wrong command line is 2.
    let ended = finish(anyroll::<&str>([]));
    assert!(ended.code == Some(2) && ended.stderr.contains("Usage: anyroll <"), "{ended:#?}");
    // With the name that users call, and not that of the program that the launcher becomes.
    assert!(help.contains("Usage: anyroll <"), "{help}");
    let run = succeed(anyroll(["run", "--help"])).stdout;
    assert!(run.contains("Usage: anyroll run "), "{run}");
    let mistaken = finish(anyroll(["run", "--nope"]));
    assert!(mistaken.code == Some(2) && mistaken.stderr.contains("Usage: anyroll run "), "{mistaken:#?}");
}

/// A reward's file, an environment's file and a program named as an interpreter: a config is code.
#[test]
fn check_without_code_runs_nothing() {
    let folder = tempfile::tempdir().unwrap();
    let [trace, file, program] = ["trace", "mine.py", "program"].map(|name| folder.path().join(name));
    let traced = format!("open({trace:?}, 'a').write('ran')\n");
    let python = "def f(completion): return 1.0\nclass E:\n    def reset(self): pass\n    def step(self, text): pass\n";
    fs::write(&file, traced + python).unwrap();
    fs::write(&program, format!("#!/bin/sh\necho ran >> '{}'\nexec python3 \"$@\"\n", trace.display()))
        .unwrap();
    fs::set_permissions(&program, Permissions::from_mode(0o755)).unwrap();
    let (file, program) = (file.display(), program.display());
    let configs = [
        format!("pipeline.rlvr.reward=[{{python: {{path: {file}, function: f}}}}]"),
        format!("pipeline.rlvr.reward=[{{python: {{path: {file}, function: f, python: {program}}}}}]"),
        format!(
            "pipeline.rlvr.rollout.environment={{path: {file}, class: E, max_turns: 2, max_turn_tokens: 2}}"
        ),
    ];
    for set in configs {
        let check = |more: &[&str]| finish(anyroll(["check", ONE_RANK, "--set", &set].iter().chain(more)));
        let ended = check(&["--no-code"]);
        assert!(!trace.exists(), "{set} ran: {ended:#?}");
        check(&[]);
        assert!(trace.exists(), "{set} does not run in a full check either");
        fs::remove_file(&trace).unwrap();
    }
    let mistaken = fail(anyroll([
        "check",
        ONE_RANK,
        "--no-code",
        "--set",
        "pipeline.rlvr.reward=[{regex: {pattern: '('}}]",
    ]));
    assert!(mistaken.contains("unclosed group"), "{mistaken}");
}

#[test]
fn check_prints_what_a_config_resolves_to() {
    let folder = tempfile::tempdir().unwrap();
    let resolved = succeed(anyroll(["check", TWO_RANKS, "--set", "pipeline.rlvr.steps=70"])).stdout;
    assert!(resolved.contains("steps: 70\n"), "{resolved}");
    assert!(
        resolved.contains("# 2 ranks on cpu, 1 CPU threads each; a step has 512 sequences"),
        "{resolved}"
    );
    let idle = succeed(anyroll(["check", ONE_RANK, "--set", "roles.critic.strategy.zero_stage=3"])).stderr;
    assert!(idle.contains("this run has no such role") && idle.contains("roles.critic"), "{idle}");
    let path = folder.path().join("resolved.yaml");
    fs::write(&path, &resolved).unwrap();
    assert_eq!(succeed(anyroll(["check", path.to_str().unwrap()])).stdout, resolved);
}

#[test]
fn check_tells_facts_on_the_data() {
    let folder = tempfile::tempdir().unwrap();
    let data = folder.path().join("data.jsonl");
    let line = |number: u32| format!("{{\"prompt\": \"{number:03}>\", \"answer\": \"1\"}}\n");
    fs::write(&data, (0..256).map(line).collect::<String>()).unwrap();
    let held_out = folder.path().join("held_out.jsonl");
    fs::write(&held_out, (900..904).map(line).collect::<String>()).unwrap();
    let file = format!("{{path: {}, held_out: {}}}", data.display(), held_out.display());
    let data = format!("pipeline.rlvr.data={{file: {file}}}");
    let sets = [
        &data,
        "pipeline.rlvr.steps=20",
        "pipeline.rlvr.prompts_per_step=32",
        "pipeline.rlvr.evaluation.prompts=4",
    ];
    let sets = sets.iter().flat_map(|set| ["--set", set]);
    let told = succeed(anyroll(["check", ONE_RANK].into_iter().chain(sets))).stdout;
    for line in [
        "# data: 256 prompts trained on, 4 held out\n",
        "# tokens of a prompt: 4 on average, 4 at most\n",
        "# 20 steps of 32 prompts: 2.5 epochs\n",
    ] {
        assert!(told.contains(line), "{told}");
    }
}

/// A config for a backend that is not here is checked but for its devices, and is not run.
#[test]
fn a_config_for_another_machine_is_checked() {
    const OTHER: &str = "configs/rlvr_sort_ascend.yaml";
    let report: Value = serde_json::from_str(&succeed(anyroll(["doctor", "--json"])).stdout).unwrap();
    let backends = report["backends"].as_array().unwrap();
    assert_eq!(backends.iter().find(|it| it["name"] == "ascend").unwrap()["available"], false);
    let ended = succeed(anyroll(["check", OTHER]));
    assert!(ended.stdout.contains("backend: ascend\n"), "{}", ended.stdout);
    assert!(ended.stderr.contains("note: `ascend` is not on this machine"), "{}", ended.stderr);
    let wrong = fail(anyroll(["check", OTHER, "--set", "pipeline.rlvr.prompts_per_step=0"]));
    assert!(wrong.contains("prompts_per_step"), "{wrong}");
    let folder = tempfile::tempdir().unwrap();
    let run = folder.path().join("run");
    let error = fail(anyroll(["run", OTHER, "--output", run.to_str().unwrap()]));
    assert!(error.contains("`ascend` cannot be used on this machine") && !run.exists(), "{error}");
}

#[test]
fn the_schema_is_printed_for_editors() {
    let schema: Value = serde_json::from_str(&succeed(anyroll(["schema"])).stdout).unwrap();
    assert_eq!(schema["$schema"], "https://json-schema.org/draft/2020-12/schema");
    assert_eq!(schema["$defs"]["AdamWConfig"]["properties"]["learning_rate"]["exclusiveMinimum"], 0);
}

#[test]
fn a_bad_config_is_refused_before_anything_starts() {
    let folder = tempfile::tempdir().unwrap();
    let run = folder.path().join("run");
    let check = |set: &str, words: &[&str]| {
        let ended = finish(tiny(ONE_RANK, &run, &[set]));
        assert!(ended.error().contains(set), "{ended:#?}");
        for word in words {
            assert!(ended.stderr.contains(word), "no {word:?} in {}", ended.stderr);
        }
        assert!(!run.exists(), "a folder was made for {set}");
    };
    check("pipeline.rlvr.group_sise=4", &["group_sise", "group_size"]);
    check("strategy.micro_batch_size=many", &["a whole number"]);
    check("backend=vulkan", &["backend: `vulkan` has memory", "train on one of cuda, rocm, ascend, cpu"]);
    // A conflict between values is shown at the other value, if the file contains it.
    let ended = finish(tiny(ONE_RANK, &run, &["devices=3"]));
    assert!(ended.error().contains("pipeline.rlvr.warmup.batch_size"), "{ended:#?}");
    assert!(ended.stderr.contains("a multiple of 3") && !run.exists(), "{ended:#?}");
}

/// Output closed early, like by `head`, and output to a full disk.
#[test]
fn output_that_nobody_wants_is_no_failure_and_output_that_is_lost_is_one() {
    let folder = tempfile::tempdir().unwrap();
    let prompts = folder.path().join("prompts.jsonl");
    fs::write(&prompts, "{\"prompt\": \"12 + 34\"}\n".repeat(3)).unwrap();
    let model = published_model::model();
    let generate = ["generate", model.to_str().unwrap(), "--chat", "--max-new-tokens", "2"];
    let of_file = [&generate[..], &["--file", prompts.to_str().unwrap()]].concat();
    let of_text = [&generate[..], &["--prompt", "12 + 34"]].concat();
    for args in [&["check", ONE_RANK][..], &["plan", ONE_RANK], &of_file, &of_text] {
        let mut unread = anyroll(args).stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap();
        drop(unread.stdout.take());
        let ended = unread.wait_with_output().unwrap();
        let said = String::from_utf8_lossy(&ended.stderr);
        assert!(ended.status.success() && said.is_empty(), "{args:?}: {said}");

        let full = OpenOptions::new().write(true).open("/dev/full").unwrap();
        let ended = anyroll(args).stdout(full).output().unwrap();
        let said = String::from_utf8_lossy(&ended.stderr);
        assert_eq!(ended.status.code(), Some(1), "{args:?}: {said}");
        assert!(said.starts_with("error: cannot write standard output: No space left"), "{args:?}: {said}");
    }
}

#[test]
fn doctor_measures_copies_products_and_collectives() {
    let text = succeed(anyroll(["doctor", "--bench", "--backend", "cpu", "--json"])).stdout;
    let report: Value = serde_json::from_str(&text).unwrap();
    assert_eq!((&report["backend"], &report["ranks"]), (&"cpu".into(), &2.into()));
    let figures = report["figures"].as_array().unwrap();
    let names: Vec<&str> = figures.iter().map(|figure| figure["what"].as_str().unwrap()).collect();
    for name in ["pinned copy to the host, 2 at once", "device copy", "product of", "all_gather, 1 MB"] {
        assert!(names.iter().any(|what| what.starts_with(name)), "no {name:?} in {names:?}");
    }
    // The host sums only in rank order, and its limits are unknown.
    assert!(!names.iter().any(|what| what.contains("by the library")), "{names:?}");
    for figure in figures {
        let is_measured = ["seconds", "per_s"].iter().all(|key| figure[key].as_f64().unwrap() > 0.0);
        assert!(is_measured && figure["limit"].is_null(), "{figure}");
    }
}

#[test]
fn doctor_says_what_is_there_and_why_not() {
    let Ended { stdout: text, took, .. } = succeed(anyroll(["doctor"]));
    // Takes a quarter of a second on an idle machine.
    assert!(took < Duration::from_secs(5), "doctor took {took:?}");
    let report: Value = serde_json::from_str(&succeed(anyroll(["doctor", "--json"])).stdout).unwrap();
    assert_eq!(report["anyroll"], env!("CARGO_PKG_VERSION"));
    assert!(report["torch"]["version"].as_str().unwrap().starts_with("2.11.0"), "{report}");
    let backends = report["backends"].as_array().unwrap();
    for backend in backends {
        let name = backend["name"].as_str().unwrap();
        let available = backend["available"].as_bool().unwrap();
        let reason = backend["reason"].as_str();
        assert!(available || reason.is_some_and(|reason| !reason.is_empty()), "{backend}");
        assert!(!available || !backend["devices"].as_array().unwrap().is_empty(), "{backend}");
        let verdict = if available { "available" } else { "not available: " };
        let line = text.lines().find(|line| line.split_whitespace().next() == Some(name));
        assert!(line.is_some_and(|line| line.contains(verdict)), "{name} in {text}");
    }
    let cpu = backends.iter().find(|backend| backend["name"] == "cpu").unwrap();
    assert_eq!(cpu["available"], true);
}

#[test]
fn a_conformance_report_says_what_ran_and_on_what() {
    let folder = tempfile::tempdir().unwrap();
    let file = folder.path().join("report.json");
    let mut command =
        anyroll(["conformance", "--backend", "cpu", "--world-size", "1", "--filter", "memory: fill"]);
    command.arg("--report").arg(&file);
    succeed(command);
    let report: Value = serde_json::from_slice(&fs::read(&file).unwrap()).unwrap();
    assert_eq!(report["counts"], serde_json::json!({"passed": 4, "failed": 0, "skipped": 0}));
    assert_eq!(report["outcomes"].as_array().unwrap().len(), 4);
    assert_eq!(report["backend"]["name"], "cpu");
    assert!(
        report["backend"]["devices"][0]["name"].as_str().is_some_and(|name| !name.is_empty()),
        "{report}"
    );
    assert!(report["torch"]["version"].as_str().unwrap().starts_with("2.11.0"), "{report}");
    assert!(report["system"]["kernel"].as_str().is_some_and(|kernel| kernel.contains('.')), "{report}");
    assert!(report["command"].as_array().unwrap().contains(&"--filter".into()), "{report}");
}

#[test]
fn a_jsonl_file_is_data() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("sort.jsonl");
    // Odd numbers, with the user's own keys.
    let line = |number: u32| {
        let prompt = format!("{number:03}>");
        let mut digits: Vec<char> = prompt.chars().take(3).collect();
        digits.sort_unstable();
        serde_json::json!({"question": prompt, "gold": String::from_iter(digits)}).to_string() + "\n"
    };
    fs::write(&path, (0..400).map(|number| line(number * 2 + 1)).collect::<String>()).unwrap();
    let keys = "columns: {prompt: question, answer: gold}";
    let data = format!("pipeline.rlvr.data={{file: {{path: \"{}\", {keys}}}}}", path.display());
    let run = folder.path().join("run");
    succeed(tiny(ONE_RANK, &run, &[&data]));
    assert_eq!(series(&run, "reward/mean").len(), 12);
    assert!(series(&run, "grad_norm").iter().any(|&norm| norm > 0.0), "nothing was learned");
    for sample in whole_lines(&run.join("samples.jsonl")) {
        let sample: Value = serde_json::from_str(&sample).unwrap();
        let number: u32 = sample["prompt"].as_str().unwrap().trim_end_matches('>').parse().unwrap();
        assert_eq!(number % 2, 1, "{sample}");
    }

    fs::write(&path, "{\"question\": \"1>\"}\n").unwrap();
    let error = fail(tiny(ONE_RANK, &folder.path().join("none"), &[&data]));
    assert!(error.contains("sort.jsonl") && error.contains("gold"), "{error}");
}

/// The last line names the refused keys, and what is left is a config that `check` takes.
#[test]
fn an_import_ends_with_what_it_refuses() {
    let folder = tempfile::tempdir().unwrap();
    let file = folder.path().join("accelerate.yaml");
    let known = "distributed_type: DEEPSPEED\ndeepspeed_config: {zero_stage: 2}\nmixed_precision: bf16\nnum_processes: 1\n";
    fs::write(&file, format!("{known}foo_bar: 3\n")).unwrap();
    let path = file.to_str().unwrap();
    let refused = finish(anyroll(["import", path]));
    let last = refused.stderr.lines().last().unwrap_or_default();
    assert!(last.contains("1 of 5 keys are refused") && last.ends_with("foo_bar"), "{refused:#?}");
    let error = fail(anyroll(["check", ONE_RANK, "--accelerate-config", path]));
    assert!(error.contains("foo_bar"), "{error}");
    fs::write(&file, known).unwrap();
    let checked = succeed(anyroll(["check", ONE_RANK, "--accelerate-config", path])).stdout;
    assert!(checked.contains("zero_stage: 2\n") && checked.contains("precision: bf16\n"), "{checked}");
}

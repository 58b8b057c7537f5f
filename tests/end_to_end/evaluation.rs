//! Evaluations: within a run, and alone.

use serde_json::Value;

use super::{ONE_RANK, anyroll, checkpoints, fail, lasting_metrics, run_tiny, series, succeed, whole_lines};

const NO_WARMUP: &str = "pipeline.rlvr.warmup=null";

/// Completions of the evaluations of a run.
fn completions(run: &std::path::Path) -> Vec<String> {
    let lines = whole_lines(&run.join("samples.jsonl"));
    let samples = lines.iter().map(|line| serde_json::from_str::<Value>(line).unwrap());
    let evaluated = samples.filter(|sample| sample["phase"] != "train");
    evaluated.map(|sample| sample["completion"].as_str().unwrap().to_owned()).collect()
}

#[test]
fn without_steps_a_run_is_the_evaluation_before_training() {
    let folder = tempfile::tempdir().unwrap();
    let trained = run_tiny(&folder, "trained", ONE_RANK, &[NO_WARMUP, "pipeline.rlvr.steps=3"]);
    // `keep_best` would keep a checkpoint of an evaluation.
    let sets = [NO_WARMUP, "pipeline.rlvr.steps=0", "pipeline.rlvr.checkpoint.keep_best=true"];
    let alone = run_tiny(&folder, "alone", ONE_RANK, &sets);
    assert_eq!(lasting_metrics(&alone), lasting_metrics(&trained)[..1]);
    let before = completions(&alone);
    assert_eq!(before, completions(&trained)[..before.len()]);
    assert!(before.len() > 10 && checkpoints(&alone).is_empty() && !alone.join("best").exists());
    let report = std::fs::read_to_string(alone.join("report.html")).unwrap();
    assert!(report.contains("before training") && report.contains("finished"), "{report}");
}

#[test]
fn evaluations_sample_as_the_config_says() {
    let folder = tempfile::tempdir().unwrap();
    let alone = |name: &str, sets: &[&str]| {
        run_tiny(&folder, name, ONE_RANK, &[&["pipeline.rlvr.steps=3"], sets].concat())
    };
    let value = |run: &std::path::Path, name: &str| series(run, name)[0];
    let usual = alone("usual", &[]);
    assert!(value(&usual, "eval/pass@1") != value(&usual, "eval/greedy"), "both would be alike in any case");
    // At a temperature near 0, or from the likeliest token alone, each sample is the greedy completion.
    let cold = alone("cold", &["pipeline.rlvr.evaluation.temperature=0.001"]);
    let narrow = alone("narrow", &["pipeline.rlvr.evaluation.top_p=1.0e-9"]);
    for run in [&cold, &narrow] {
        assert_eq!(value(run, "eval/greedy"), value(&usual, "eval/greedy"));
        assert_eq!(value(run, "eval/pass@1"), value(&usual, "eval/greedy"));
        assert_eq!(series(run, "reward/mean"), series(&usual, "reward/mean"), "the rollout is another");
    }
    // The untrained model goes on for as long as it may.
    let longest = |run: &std::path::Path| completions(run).iter().map(String::len).max().unwrap();
    let sets = [NO_WARMUP, "pipeline.rlvr.evaluation.max_new_tokens=9"];
    let (short, long) = (alone("short", &[NO_WARMUP]), alone("long", &sets));
    assert_eq!((longest(&short), longest(&long)), (4, 9));
    assert_eq!(series(&long, "response_length/max"), series(&short, "response_length/max"));
}

/// Writes `count` sums with their answers, and returns the file.
fn sums(folder: &std::path::Path, count: usize) -> std::path::PathBuf {
    let path = folder.join("sums.jsonl");
    let line = |number: usize| {
        let digits = [number / 10 % 10, number % 10, 7];
        let mut sorted = digits;
        sorted.sort_unstable();
        let text = |digits: [usize; 3]| digits.map(|digit| digit.to_string()).concat();
        format!("{{\"q\": \"{}>\", \"a\": \"{}\", \"level\": {number}}}\n", text(digits), text(sorted))
    };
    std::fs::write(&path, (0..count).map(line).collect::<String>()).unwrap();
    path
}

fn json_of(path: &std::path::Path) -> Value {
    serde_json::from_str(&std::fs::read_to_string(path).unwrap()).unwrap()
}

/// An estimate of `--json` by its name.
fn estimate<'a>(numbers: &'a Value, name: &str) -> &'a Value {
    let estimates = numbers["all"]["estimates"].as_array().unwrap();
    estimates.iter().find(|it| it["name"] == name).unwrap_or_else(|| panic!("no {name} in {numbers}"))
}

#[test]
fn the_command_repeats_a_runs_own_evaluation() {
    let folder = tempfile::tempdir().unwrap();
    let run = run_tiny(&folder, "run", ONE_RANK, &["pipeline.rlvr.evaluation.temperature=0.8"]);
    let json = folder.path().join("numbers.json");
    let ended = succeed(anyroll(["evaluate", run.to_str().unwrap(), "--json", json.to_str().unwrap()]));
    let numbers = json_of(&json);
    for (name, metric) in [
        ("greedy", "eval/greedy"),
        ("pass@1", "eval/pass@1"),
        ("pass@4", "eval/pass@4"),
        ("maj@4", "eval/maj@4"),
    ] {
        let (it, last) = (estimate(&numbers, name), *series(&run, metric).last().unwrap());
        assert_eq!(it["value"].as_f64(), Some(last), "{name}");
        assert!(it["low"].as_f64().unwrap() <= last && last <= it["high"].as_f64().unwrap(), "{it}");
    }
    assert_eq!(
        (&numbers["all"]["prompts"], &numbers["temperature"], &numbers["step"]),
        (&20.into(), &0.8.into(), &12.into())
    );
    for part in ["step 12", "pass@2", "95 % interval   of 20 prompts", "cut", "wrong: "] {
        assert!(ended.stdout.contains(part), "no {part:?} in {}", ended.stdout);
    }
    // A checkpoint is another policy.
    let first = run.join("checkpoints/step_000008");
    succeed(anyroll([
        "evaluate",
        first.to_str().unwrap(),
        "--samples",
        "0",
        "--json",
        json.to_str().unwrap(),
    ]));
    let numbers = json_of(&json);
    assert_eq!(estimate(&numbers, "greedy")["value"].as_f64(), Some(series(&run, "eval/greedy")[2]));
    assert_eq!(numbers["all"]["estimates"].as_array().unwrap().len(), 1);
}

#[test]
fn completions_of_a_file_can_be_scored_again() {
    let folder = tempfile::tempdir().unwrap();
    let run = run_tiny(&folder, "run", ONE_RANK, &["pipeline.rlvr.warmup.steps=100"]);
    let data = sums(folder.path(), 30);
    let [json, output] = ["numbers.json", "completions.jsonl"].map(|name| folder.path().join(name));
    let evaluate = |more: &[&str]| {
        let [run, data] = [&run, &data].map(|path| path.to_str().unwrap());
        let args = ["evaluate", run, "--data", data, "--columns", "prompt=q,answer=a"];
        anyroll(args.into_iter().chain(more.iter().copied()))
    };
    let files = ["--json", json.to_str().unwrap(), "--output", output.to_str().unwrap()];
    succeed(evaluate(
        &[&files[..], &["--reward", "exact", "--samples", "2", "--max-new-tokens", "4"]].concat(),
    ));
    let lines: Vec<Value> =
        whole_lines(&output).iter().map(|line| serde_json::from_str(line).unwrap()).collect();
    assert_eq!(lines.len(), 30 * 3);
    assert!(lines.iter().all(|line| line["level"].is_u64() && line["evaluation"]["record"].is_string()));
    let rewards = |sample: Value| {
        let of = lines.iter().filter(|line| line["evaluation"]["sample"] == sample);
        of.map(|line| line["evaluation"]["reward"].as_f64().unwrap()).collect::<Vec<f64>>()
    };
    let mean = |values: &[f64]| values.iter().sum::<f64>() / values.len() as f64;
    let numbers = json_of(&json);
    let value = |name: &str| estimate(&numbers, name)["value"].as_f64().unwrap();
    assert_eq!(value("greedy"), mean(&rewards("greedy".into())));
    let drawn = [rewards(0.into()), rewards(1.into())];
    assert!((value("pass@1") - mean(&drawn.concat())).abs() < 1e-12);
    let either: Vec<f64> = drawn[0].iter().zip(&drawn[1]).map(|(a, b)| a.max(*b)).collect();
    assert!((value("pass@2") - mean(&either)).abs() < 1e-12);
    assert!(value("greedy") > 0.0, "it has learned nothing");
    // The reward finds the same on the written lines.
    let scored = succeed(anyroll(["reward", "exact", "--file", output.to_str().unwrap()])).stdout;
    for (line, scored) in lines.iter().zip(scored.lines()) {
        let scored: Value = serde_json::from_str(scored).unwrap();
        assert_eq!(scored["score"], line["evaluation"]["reward"], "{line}");
    }
    // Three of the prompts, the first ones of the same order, with a reward that has no answers to vote on.
    let ended =
        succeed(evaluate(&["--reward", "[regex: {pattern: '7'}]", "--prompts", "3", "--samples", "2"]));
    assert!(ended.stdout.contains("of 3 prompts") && ended.stdout.contains("no maj@k"), "{}", ended.stdout);
    for (more, message) in [
        (&["--reward", "maths"][..], "reward: there is no `maths` here"),
        (&["--reward", "[math: {tol: 1}]"], "no such field"),
        (&["--temperature", "0"], "temperature: 0.0 is out of range"),
        (&["--max-new-tokens", "400"], "the model's 32"),
        (&["--prompts", "31"], "30"),
    ] {
        let error = fail(evaluate(&more[..2]));
        assert!(error.contains(message), "{more:?}: {error}");
    }
}

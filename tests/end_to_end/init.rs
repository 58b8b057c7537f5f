//! `anyroll init`: every config that it writes passes `anyroll check`, and nothing is overwritten or left unsaid.

use std::fs;
use std::path::Path;
use std::process::Command;

use serde_json::{Value, json};

use super::{anyroll, fail, published_model, succeed};

/// Writes 200 records in the form of each method, in several formats.
fn data(folder: &Path) {
    let rows = |row: &dyn Fn(u32) -> Value| (0..200).map(row).collect::<Vec<Value>>();
    let lines = |rows: &[Value]| rows.iter().map(|row| format!("{row}\n")).collect::<String>();
    let write = |name: &str, text: String| fs::write(folder.join(name), text).unwrap();
    let csv: String = (0..200).map(|n| format!("\"{n} + 1, is?\",{}\n", n + 1)).collect();
    write("sums.csv", format!("question,answer\n{csv}"));
    let written = rows(&|n| json!({"instruction": format!("{n} + 1"), "output": (n + 1).to_string()}));
    write("written.json", Value::from(written).to_string());
    let pairs = rows(&|n| json!({"prompt": format!("{n} + 1"), "chosen": "2", "rejected": "3"}));
    write("pairs.jsonl", lines(&pairs));
    let judged: String = (0..200).map(|n| format!("{n} + 1,2,{}\n", ["True", "False"][n % 2])).collect();
    write("judged.csv", format!("prompt,completion,label\n{judged}"));
}

/// The command in `folder`, without a terminal.
fn in_folder<'a>(folder: &Path, args: impl IntoIterator<Item = &'a str>) -> Command {
    let mut command = anyroll(args);
    command.current_dir(folder);
    command
}

fn yaml(text: &str) -> Value {
    serde_saphyr::from_str(text).unwrap()
}

#[test]
fn the_config_of_each_method_passes_check() {
    let folder = tempfile::tempdir().unwrap();
    data(folder.path());
    let model = published_model::model();
    let model = model.canonicalize().unwrap();
    for (method, data, pipeline) in [
        ("grpo", "sums.csv", "rlvr"),
        ("rloo", "sums.csv", "rlvr"),
        ("sft", "written.json", "offline"),
        ("dpo", "pairs.jsonl", "offline"),
        ("kto", "judged.csv", "offline"),
        ("reward-model", "pairs.jsonl", "offline"),
    ] {
        for (backend, devices) in [("cpu", "1"), ("cuda", "2")] {
            let file = format!("{method}_{backend}.yaml");
            let args =
                ["init", &file, "--model", model.to_str().unwrap(), "--data", data, "--method", method];
            let more = ["--backend", backend, "--devices", devices, "--yes"];
            let told = succeed(in_folder(folder.path(), args.into_iter().chain(more))).stdout;
            assert!(told.contains("recognized by their names"), "{told}");
            let text = fs::read_to_string(folder.path().join(&file)).unwrap();
            assert!(text.starts_with("# yaml-language-server: $schema=anyroll.schema.json\n"), "{text}");
            assert!(
                text.contains("# The learning rate is measured in recipes/") || method == "kto",
                "{text}"
            );
            let written = yaml(&text);
            assert_eq!((&written["backend"], &written["devices"]), (&json!(backend), &yaml(devices)));
            let resolved = succeed(in_folder(folder.path(), ["check", &file, "--no-code"])).stdout;
            let resolved = yaml(&resolved);
            let of =
                |config: &Value| config["pipeline"][pipeline]["optimizer"]["adamw"]["learning_rate"].clone();
            assert!(of(&resolved).as_f64().unwrap() > 0.0 && of(&resolved) == of(&written), "{text}");
            assert_eq!(resolved["strategy"]["micro_batch_size"], written["strategy"]["micro_batch_size"]);
        }
    }
    let schema = fs::read_to_string(folder.path().join("anyroll.schema.json")).unwrap();
    assert_eq!(schema, succeed(anyroll(["schema"])).stdout);
}

/// Methods, columns and rewards that follow from the data.
#[test]
fn what_is_not_said_follows_from_the_data() {
    let folder = tempfile::tempdir().unwrap();
    data(folder.path());
    let model = published_model::model().canonicalize().unwrap();
    let cases = [
        ("sums.csv", "grpo", "{prompt: question, answer: answer}"),
        ("pairs.jsonl", "dpo", "{prompt: prompt, answer: chosen, rejected: rejected}"),
        ("judged.csv", "kto", "{prompt: prompt, answer: completion, label: label}"),
    ];
    for (data, method, columns) in cases {
        let args = ["init", "--model", model.to_str().unwrap(), "--data", data, "--backend", "cpu", "--yes"];
        let told = succeed(in_folder(folder.path(), args)).stdout;
        assert!(told.contains(&format!("by {method} on")) && told.contains(columns), "{told}");
        let text = fs::read_to_string(folder.path().join(format!("{method}.yaml"))).unwrap();
        assert!(text.contains(&format!("columns: {columns}\n")), "{text}");
        assert_eq!(text.contains("reward: math"), method == "grpo", "{text}");
    }
    // A file that is there already is the user's.
    let kept = folder.path().join("dpo.yaml");
    fs::write(&kept, "mine").unwrap();
    let args =
        ["init", "--model", model.to_str().unwrap(), "--data", "pairs.jsonl", "--backend", "cpu", "--yes"];
    let error = fail(in_folder(folder.path(), args));
    assert!(error.contains("dpo.yaml exists") && error.contains("--force"), "{error}");
    assert_eq!(fs::read_to_string(&kept).unwrap(), "mine");
    succeed(in_folder(folder.path(), args.into_iter().chain(["--force"])));
    assert!(fs::read_to_string(&kept).unwrap().contains("objective: {dpo: {beta: 0.1}}"));
}

#[test]
fn what_is_missing_is_named_and_what_would_not_run_is_not_written() {
    let folder = tempfile::tempdir().unwrap();
    data(folder.path());
    let model = published_model::model().canonicalize().unwrap();
    let model = model.to_str().unwrap();
    for (args, expected) in [
        (
            &[][..],
            "standard input is no terminal: pass --model, --data, --method, --backend, or `--yes` for the defaults",
        ),
        (&["--yes"], "there is no default: pass --model, --data"),
        (&["--model", model, "--method", "sft"], "pass --data, --backend, or `--yes`"),
        (&["--model", model, "--data", "none.csv", "--yes"], "none.csv"),
        (&["--model", "org/none", "--data", "sums.csv", "--yes"], "org/none is not in the hub's cache"),
        (
            &["--model", model, "--data", "sums.csv", "--method", "dpo", "--yes"],
            "is named as a chosen answer",
        ),
        (
            &["--model", model, "--data", "sums.csv", "--columns", "prompt=q,answer=answer", "--yes"],
            "there is no column `q`, only `question`, `answer`",
        ),
        (&["--model", model, "--data", "sums.csv", "--reward", "maths", "--yes"], "no `maths` here"),
        (&["--model", model, "--data", "pairs.jsonl", "--reward", "math", "--yes"], "`dpo` has none"),
    ] {
        let all = ["init", "out.yaml"].into_iter().chain(args.iter().copied());
        let error = fail(in_folder(folder.path(), all));
        assert!(error.contains(expected), "{args:?}: {error}, not {expected}");
        assert!(!folder.path().join("out.yaml").exists(), "{args:?}");
    }
}

//! `anyroll init`: every config that it writes passes `anyroll check`, and nothing is overwritten or left unsaid.

use std::fs;
use std::io::Write;
use std::path::Path;
use std::process::{Command, Stdio};

use serde_json::{Value, json};

use super::{ANYROLL, anyroll, fail, published_model, succeed};

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

/// Runs `anyroll init` in `folder` on a terminal, with a text to type after each text that it shows. Returns the exit
/// code, minus the signal that ended it, and all that was shown.
fn on_terminal(folder: &Path, args: &[&str], typed: &[(&str, &str)]) -> (i64, String) {
    let script = Path::new(env!("CARGO_MANIFEST_DIR")).join("../tests/python/terminal.py");
    let mut command = Command::new("python3");
    command.arg(script).arg(ANYROLL).arg("init").args(args).current_dir(folder);
    let mut child = command.stdin(Stdio::piped()).stdout(Stdio::piped()).spawn().unwrap();
    child.stdin.take().unwrap().write_all(json!(typed).to_string().as_bytes()).unwrap();
    let output = child.wait_with_output().unwrap();
    let told: Value = serde_json::from_slice(&output.stdout).unwrap();
    (told["code"].as_i64().unwrap(), told["shown"].as_str().unwrap().to_owned())
}

fn files(folder: &Path) -> Vec<String> {
    let names = fs::read_dir(folder).unwrap().map(|entry| entry.unwrap().file_name().into_string().unwrap());
    let mut names: Vec<String> = names.collect();
    names.sort();
    names
}

const MODEL: &str = "model, a folder or a name on the hub: ";
const DATA: &str = "data, a file of records: ";
const METHODS: &str = "method, one of grpo, rloo, sft, dpo, kto, reward-model [grpo]: ";
const REWARD: &str = "reward, such as math, exact, choice, code or ifeval [math]: ";
const DEVICES: &str = "devices, one for each rank [1]: ";

/// The config is the one that the same answers as options write.
#[test]
fn questions_on_a_terminal_are_asked_until_they_are_answered() {
    let folder = tempfile::tempdir().unwrap();
    data(folder.path());
    let model = published_model::model().canonicalize().unwrap();
    let model = model.to_str().unwrap();
    fs::write(folder.path().join("taken.yaml"), "mine").unwrap();
    let typed = [
        (MODEL, "\n"),
        ("write a path or a name", "none\n"),
        (MODEL, &format!("{model}\n")),
        (DATA, "none.csv\n"),
        (DATA, "sums.csv\n"),
        (METHODS, "ppo\n"),
        ("there is no method `ppo`", "\n"),
        (REWARD, "maths\n"),
        ("did you mean `math`?", "\n"),
        ("backend [", "nowhere\n"),
        ("there is no backend `nowhere`", "cpu\n"),
        (DEVICES, "0\n"),
        (DEVICES, "\n"),
        ("file to write [grpo.yaml]: ", "taken.yaml\n"),
        ("taken.yaml exists: name another file", "\n"),
    ];
    let (code, shown) = on_terminal(folder.path(), &[], &typed);
    assert!(code == 0 && shown.contains("anyroll run grpo.yaml"), "{code}: {shown}");
    assert_eq!(fs::read_to_string(folder.path().join("taken.yaml")).unwrap(), "mine");
    let answered = fs::read_to_string(folder.path().join("grpo.yaml")).unwrap();
    let options = ["init", "--model", model, "--data", "sums.csv", "--method", "grpo", "--reward", "math"];
    let more = ["--backend", "cpu", "--devices", "1", "--force", "--yes"];
    succeed(in_folder(folder.path(), options.into_iter().chain(more)));
    assert_eq!(answered, fs::read_to_string(folder.path().join("grpo.yaml")).unwrap());
    // Without a default, since the usual name is taken.
    let all = ["--model", model, "--data", "sums.csv", "--method", "grpo", "--reward", "math"];
    let all = [&all[..], &["--backend", "cpu", "--devices", "1"]].concat();
    let typed = [("file to write: ", "\n"), ("write the file's name", "other.yaml\n")];
    let (code, shown) = on_terminal(folder.path(), &all, &typed);
    assert!(code == 0, "{shown}");
    // The file names itself.
    let other = fs::read_to_string(folder.path().join("other.yaml")).unwrap();
    assert_eq!(answered, other.replace("other.yaml", "grpo.yaml"));
}

#[test]
fn an_interrupt_or_the_end_of_input_leaves_no_file() {
    let folder = tempfile::tempdir().unwrap();
    data(folder.path());
    let model = published_model::model().canonicalize().unwrap();
    let model = format!("{}\n", model.to_str().unwrap());
    let before = files(folder.path());
    let started = [(MODEL, &*model), (DATA, "sums.csv\n"), (METHODS, "\n"), (REWARD, "\n")];
    for answered in 0..=started.len() {
        let next = [MODEL, DATA, METHODS, REWARD, "backend ["][answered];
        for (key, ends_with, words) in
            [("\u{3}", -2, ""), ("\u{4}", 1, "standard input ended before the last question")]
        {
            let typed = [&started[..answered], &[(next, key)]].concat();
            let (code, shown) = on_terminal(folder.path(), &[], &typed);
            assert!(code == ends_with && shown.contains(words), "{answered}, {key:?}: {code}: {shown}");
            assert_eq!(files(folder.path()), before);
        }
    }
}

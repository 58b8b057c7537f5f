//! The same records as JSON lines, a JSON array, CSV and Parquet, for every command that reads records.

use std::fs;
use std::path::{Path, PathBuf};

use serde_json::{Value, json};

use super::{anyroll, fail, published_model, succeed};

/// Writes records of texts as JSON lines, an array and CSV.
fn write(folder: &Path, columns: &[&str], rows: &[Vec<String>]) -> [PathBuf; 3] {
    let [lines, array, csv] = ["a.jsonl", "a.json", "a.csv"].map(|name| folder.join(name));
    let object = |row: &Vec<String>| -> Value {
        columns.iter().zip(row).map(|(column, text)| ((*column).to_owned(), json!(text))).collect()
    };
    let objects: Vec<Value> = rows.iter().map(object).collect();
    fs::write(&lines, objects.iter().map(|it| format!("{it}\n")).collect::<String>()).unwrap();
    fs::write(&array, serde_json::to_string_pretty(&objects).unwrap()).unwrap();
    let quoted = |text: &String| format!("\"{}\"", text.replace('"', "\"\""));
    let record = |row: &Vec<String>| row.iter().map(quoted).collect::<Vec<_>>().join(",") + "\n";
    fs::write(&csv, columns.join(",") + "\n" + &rows.iter().map(record).collect::<String>()).unwrap();
    [lines, array, csv]
}

fn rows(count: usize) -> Vec<Vec<String>> {
    let row = |number: usize| vec![format!("{number} + \"1\",\nis?"), (number + 1).to_string()];
    (0..count).map(row).collect()
}

/// Outputs of a command on each file, without the records' numbers.
fn outputs(files: &[PathBuf], args: &dyn Fn(&str) -> Vec<String>) -> Vec<Vec<Value>> {
    let output = |file: &PathBuf| {
        let told = succeed(anyroll(args(file.to_str().unwrap()))).stdout;
        let lines = told.lines().map(|line| serde_json::from_str::<Value>(line).unwrap());
        lines
            .map(|mut line| {
                line.as_object_mut().unwrap().remove("line").unwrap();
                line
            })
            .collect()
    };
    files.iter().map(output).collect()
}

fn texts(args: &[&str]) -> Vec<String> {
    args.iter().map(|arg| (*arg).to_owned()).collect()
}

#[test]
fn commands_read_the_same_records_from_every_format() {
    let folder = tempfile::tempdir().unwrap();
    let model = published_model::model();
    let model = model.to_str().unwrap();
    let files = write(folder.path(), &["question", "gold"], &rows(3));
    let generate = |file: &str| {
        let columns =
            ["--columns", "prompt=question,answer=gold", "--temperature", "0", "--max-new-tokens", "3"];
        texts(&[&["generate", model, "--file", file][..], &columns].concat())
    };
    let found = outputs(&files, &generate);
    assert!(found[0].len() == 3 && found[0][2]["answer"] == "3", "{found:?}");
    assert_eq!((&found[1], &found[2]), (&found[0], &found[0]));

    let judged: Vec<Vec<String>> =
        rows(4).into_iter().map(|row| vec![row[1].clone(), row[1].clone()]).collect();
    let files = write(folder.path(), &["completion", "answer"], &judged);
    let found = outputs(&files, &|file| texts(&["reward", "exact", "--file", file]));
    assert!(found[0].len() == 4 && found[0][3]["score"] == 1.0, "{found:?}");
    assert_eq!((&found[1], &found[2]), (&found[0], &found[0]));

    let prompts: Vec<Vec<String>> = rows(3).into_iter().map(|row| vec![row[0].clone()]).collect();
    let files = write(folder.path(), &["prompt"], &prompts);
    let found = outputs(&files, &|file| texts(&["score", model, "--file", file]));
    assert!(found[0].len() == 3 && found[0][0]["logprob"].is_f64(), "{found:?}");
    assert_eq!((&found[1], &found[2]), (&found[0], &found[0]));

    let files = write(folder.path(), &["prompt", "answer"], &rows(5));
    let numbers = files.each_ref().map(|file| {
        let json = folder.path().join("numbers.json");
        let data =
            ["evaluate", model, "--data", file.to_str().unwrap(), "--reward", "exact", "--samples", "1"];
        succeed(anyroll(data.into_iter().chain(["--max-new-tokens", "3", "--json", json.to_str().unwrap()])));
        serde_json::from_str::<Value>(&fs::read_to_string(&json).unwrap()).unwrap()
    });
    assert_eq!(numbers[0]["all"]["prompts"], 5, "{}", numbers[0]);
    assert_eq!((&numbers[1], &numbers[2]), (&numbers[0], &numbers[0]));
}

/// Cells of CSV are texts, except where the command needs another type.
#[test]
fn cells_have_the_types_that_a_command_needs() {
    let folder = tempfile::tempdir().unwrap();
    let file = folder.path().join("a.csv");
    let model = published_model::model();
    let [file_name, model] = [file.to_str().unwrap(), model.to_str().unwrap()];
    fs::write(&file, "completion,finished,tokens,answer,level\n7,True,3,7,007\n7,,,7,\n").unwrap();
    let found = &outputs(std::slice::from_ref(&file), &|file| texts(&["reward", "exact", "--file", file]))[0];
    assert_eq!(found.iter().map(|it| it["score"].as_f64().unwrap()).collect::<Vec<_>>(), [1.0, 1.0]);
    fs::write(&file, "prompt,temperature,max_new_tokens,level\n1+1,0,2,007\n1+1,,3,\n").unwrap();
    let generate = |file: &str| texts(&["generate", model, "--file", file, "--temperature", "0"]);
    let found = &outputs(std::slice::from_ref(&file), &generate)[0];
    let of = |name: &str| found.iter().map(|it| it[name].clone()).collect::<Vec<_>>();
    assert_eq!((of("tokens"), of("level")), (vec![json!(2), json!(3)], vec![json!("007"), json!("")]));
    for (text, expected) in [
        ("prompt,temperature\n1+1,warm\n", ":2: `temperature`: invalid type: string \"warm\""),
        ("prompt,temperature\n1+1\n", ":2: the record has 1 fields, and the header has 2"),
        ("prompt\n\"1+1\n", ":2: a quote of the record that begins here is not closed"),
    ] {
        fs::write(&file, text).unwrap();
        let error = fail(anyroll(["generate", model, "--file", file_name]));
        assert!(error.contains(&format!("a.csv{expected}")), "{error}");
    }
}

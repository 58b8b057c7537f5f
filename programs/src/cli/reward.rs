//! `anyroll reward`: scores completions from a file with a reward.

use std::collections::BTreeMap;
use std::path::PathBuf;

use anyroll_config::error_chain::one_line;
use anyroll_data::{CellTypes, Record, prompt};
use anyroll_pipelines::{Result, prepare::read_reward};
use anyroll_reward::{Completion, Reward, StartError, build};
use clap::Args;
use serde::{Deserialize, Serialize};
use serde_json::{Map, Value};

use super::{
    lines::{of_line, records},
    stdout::print,
};

#[derive(Debug, Args)]
pub(super) struct RewardArgs {
    /// The reward: exact, math, choice, countdown, regex, ifeval, code, judge, model, remote, python, length or
    /// repetition
    name: String,
    /// Lines of {"completion": ..., "answer": ...}, with "prompt", "finished" and "tokens" if the reward
    /// needs them, and with columns of your own; or a .json, .csv, .parquet or .arrow file of such records; `-` reads
    /// standard input
    #[arg(long, value_name = "FILE")]
    file: PathBuf,
    /// Change a field of the reward, as in `--set tolerance=1e-3`; repeatable
    #[arg(long = "set", value_name = "FIELD=VALUE")]
    sets: Vec<String>,
}

#[derive(Debug, Deserialize)]
struct Case {
    completion: String,
    /// A text or messages.
    #[serde(default)]
    prompt: Value,
    #[serde(default)]
    answer: Value,
    #[serde(default = "yes")]
    finished: bool,
    tokens: Option<usize>,
    #[serde(flatten)]
    columns: Map<String, Value>,
}

fn yes() -> bool {
    true
}

#[derive(Debug, Serialize)]
struct Scored {
    line: usize,
    score: f64,
    #[serde(skip_serializing_if = "Option::is_none")]
    extracted: Option<String>,
    /// Metrics that the function logged.
    #[serde(skip_serializing_if = "BTreeMap::is_empty")]
    metrics: BTreeMap<String, f64>,
    /// Columns that the function logged.
    #[serde(skip_serializing_if = "BTreeMap::is_empty")]
    columns: BTreeMap<String, Value>,
}

/// Returns exit code 0 only if there was a line and every line was scored.
pub(super) fn reward(args: &RewardArgs) -> Result<u8> {
    let reward = build(&read_reward(&args.name, &args.sets)?)
        .map_err(|failure| StartError { name: args.name.clone(), failure })?;
    let (mut count, mut sum, mut failed) = (0, 0.0, 0);
    let cells = CellTypes { flags: vec!["finished"], numbers: vec!["tokens"], ..CellTypes::default() };
    for line in records(&args.file, &cells)? {
        let (line, text) = line?;
        match score(&*reward, line, &text) {
            Ok(scored) => {
                count += 1;
                sum += scored.score;
                let line = serde_json::to_string(&scored).expect("plain data");
                if !print(line + "\n")? {
                    return Ok(0);
                }
            }
            Err(message) => {
                failed += 1;
                eprintln!("{}:{line}: {message}", args.file.display());
            }
        }
    }
    let mean = if count > 0 { format!(", mean {:.4}", sum / f64::from(count)) } else { String::new() };
    eprintln!("{}: {count} scored{mean}, {failed} failed", reward.name());
    Ok(u8::from(failed > 0 || count == 0))
}

fn score(reward: &dyn Reward, line: usize, text: &str) -> Result<Scored, String> {
    let case: Case =
        of_line(text).map_err(|problem| format!("not a completion with an answer: {problem}"))?;
    let answer = match case.answer {
        Value::Null => String::new(),
        Value::String(text) => text,
        // Numbers, and the tests of a program.
        other => other.to_string(),
    };
    let (prompt, messages) = match &case.prompt {
        Value::Null => Default::default(),
        Value::String(text) if text.is_empty() => Default::default(),
        value => prompt(value).map_err(|problem| format!("`prompt` {problem}"))?,
    };
    let (id, columns) = (format!("line {line}"), case.columns);
    let record = Record { id, prompt, messages, answer, columns, ..Record::default() };
    let completion = Completion { text: &case.completion, tokens: case.tokens, finished: case.finished };
    let scored = reward.score_and_log(&record, &completion);
    let (score, logged) = scored.map_err(|error| one_line(&error))?;
    let metrics = logged.means().into_iter().map(|(name, mean)| (name.to_owned(), mean)).collect();
    let extracted = reward.extracted(&completion);
    Ok(Scored { line, score, extracted, metrics, columns: logged.columns })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn scores_lines_and_names_what_is_wrong() {
        let math = build(&read_reward("math", &["tolerance=0.01".to_owned()]).unwrap()).unwrap();
        let scored = score(&*math, 3, r#"{"completion": "so \\boxed{1/2}", "answer": "0.5"}"#).unwrap();
        let json = serde_json::to_string(&scored).unwrap();
        assert_eq!(json, r#"{"line":3,"score":1.0,"extracted":"1/2"}"#);
        let prompt = r#"{"completion": "1", "prompt": [{"role": "user", "content": "?"}], "answer": "1"}"#;
        assert_eq!(score(&*math, 1, prompt).unwrap().score, 1.0);
        let wrong = r#"{"completion": "1", "prompt": [1], "answer": "1"}"#;
        assert!(score(&*math, 1, wrong).unwrap_err().contains("`prompt` is a list, but not of messages"));
        for wrong in ["{", "{}", r#"{"completion": 1}"#] {
            assert!(score(&*math, 1, wrong).unwrap_err().contains("not a completion"), "{wrong}");
        }
        assert!(score(&*math, 1, r#"{"completion": "1"}"#).unwrap_err().contains("its answer is empty"));

        for (name, set, message) in [
            ("maths", None, "did you mean `math`?"),
            ("math", Some("tol=1"), "choose from `tolerance`"),
            ("math", Some("tolerance=1"), "from 0 to 0.1"),
            ("regex", None, "add `pattern:`"),
            ("regex", Some("pattern=(a"), "unclosed group"),
        ] {
            let sets: Vec<String> = set.into_iter().map(str::to_owned).collect();
            let error = read_reward(name, &sets).unwrap_err().to_string();
            assert!(error.contains(message), "{error}");
        }
    }
}

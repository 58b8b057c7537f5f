//! Records from files: resolves file names and maps columns.

use std::collections::BTreeSet;
use std::path::{Path, PathBuf};
use std::{fs, io};

use anyroll_config::{FileConfig, Keep, LongPrompts, NamedColumns, Paths};
use regex::Regex;
use serde_json::{Map, Value};

use super::{CellTypes, Counted, Cut, Error, Reading, Record, RecordTokens, steps, table};

/// Reads the records of the files that `paths` names, in order, at most `most` and at least one.
pub(super) fn read(
    config: &FileConfig,
    paths: &Paths,
    most: Option<usize>,
    reading: Reading,
) -> Result<Vec<Record>, Error> {
    let columns = config.columns.named();
    let (names, cells) = (names(&columns), CellTypes::of(&columns));
    let paths = files(paths)?;
    let is_wanted = |record: &Record| config.domains.is_empty() || config.domains.contains(&record.domain);
    let mut records: Vec<Record> = Vec::new();
    let (mut rows, mut read) = (0, 0);
    for path in &paths {
        let (before, mut left_out, mut cut) = (read, 0, 0);
        table::each_row(path, &names, &cells, &mut |row, object| {
            if Some(read) == most {
                return Ok(());
            }
            rows += 1;
            let record = record(&columns, reading.step_separator, row.name(), object);
            let record = record.map_err(|message| row.error(message))?;
            if !is_wanted(&record) {
                return Ok(());
            }
            read += 1;
            let kept = match (excess(config, reading.tokens, &record)?, config.long_prompts) {
                (None, _) => record,
                (Some(Excess { cut: Some(to), .. }), _) => {
                    cut += 1;
                    Record { cut: Some(to), ..record }
                }
                (Some(Excess { problem, .. }), LongPrompts::Refuse) => {
                    return Err(Error::LongRecord { path: path.clone(), row: row.name(), problem });
                }
                (Some(_), _) => {
                    left_out += 1;
                    return Ok(());
                }
            };
            records.push(within(path, &paths, kept));
            Ok(())
        })?;
        let (path, of) = (path.display(), read - before);
        if left_out > 0 {
            tracing::warn!(left_out, of, "{path}: records longer than allowed");
        }
        if cut > 0 {
            tracing::warn!(cut, of, "{path}: records longer than allowed, which are truncated");
        }
    }
    if records.is_empty() {
        let names: Vec<_> = paths.iter().map(|path| path.display().to_string()).collect();
        return Err(Error::Empty { names: names.join(", "), rows, of_domains: read });
    }
    for domain in &config.domains {
        if records.iter().all(|record| record.domain != *domain) {
            tracing::warn!(domain, "no record of the data files is of this domain");
        }
    }
    Ok(records)
}

/// Columns of a file that the config names, by their names or the first parts of paths.
fn names(columns: &NamedColumns) -> BTreeSet<&str> {
    let NamedColumns { answer, rejected, label, reward, text, steps, step_labels, domain, .. } = columns;
    let others = [answer, rejected, label, reward, text, steps, step_labels, domain];
    let names = others.into_iter().flatten().chain([&columns.prompt]);
    names.flat_map(|name| [&**name, name.split('.').next().unwrap_or_default()]).collect()
}

/// Resolves `paths` to files; files of a pattern are sorted by name.
///
/// # Errors
/// If a folder cannot be read, no file matches, or a file is listed twice.
pub fn files(paths: &Paths) -> Result<Vec<PathBuf>, Error> {
    let mut files: Vec<PathBuf> = Vec::new();
    for path in &paths.0 {
        for file in matching(path)? {
            if files.contains(&file) {
                return Err(Error::Twice { path: file });
            }
            files.push(file);
        }
    }
    Ok(files)
}

/// Returns true if there is a file at `path`, or one that matches it.
pub fn is_data(path: &Path) -> bool {
    matching(path).is_ok_and(|files| files.iter().all(|file| file.exists()))
}

/// The file at `path`, or the files in its folder whose names match its last part, in which `*` and `?` are
/// wildcards.
fn matching(path: &Path) -> Result<Vec<PathBuf>, Error> {
    let name = path.file_name().unwrap_or_default().to_string_lossy();
    if path.exists() || !name.contains(['*', '?']) {
        return Ok(vec![path.to_owned()]);
    }
    let pattern = regex::escape(&name).replace(r"\*", ".*").replace(r"\?", ".");
    let pattern = Regex::new(&format!("^(?s:{pattern})$")).expect("all else is escaped");
    let folder = path.parent().filter(|folder| *folder != Path::new("")).unwrap_or(Path::new("."));
    let unreadable = |source| Error::Read { path: path.to_owned(), source };
    let mut found = Vec::new();
    for entry in fs::read_dir(folder).map_err(unreadable)? {
        let name = entry.map_err(unreadable)?.file_name();
        if name.to_str().is_some_and(|name| pattern.is_match(name)) {
            found.push(path.with_file_name(name));
        }
    }
    if found.is_empty() {
        return Err(unreadable(io::Error::new(io::ErrorKind::NotFound, "no file matches")));
    }
    found.sort_unstable();
    Ok(found)
}

/// A limit that a record exceeds.
struct Excess {
    problem: String,
    /// Length to cut the record to; `None` if it cannot be cut.
    cut: Option<Cut>,
}

/// The first limit that the record exceeds.
fn excess(config: &FileConfig, tokens: &RecordTokens, record: &Record) -> Result<Option<Excess>, Error> {
    let problem = |what: &str, found: usize, unit: &str, (field, most): (&str, usize)| {
        let problem = || format!("the {what} has {found} {unit}, and `{field}` is {most}");
        (found > most).then(|| Excess { problem: problem(), cut: None })
    };
    if let Some(most) = config.max_prompt_chars {
        let found = record.prompt.chars().count();
        if let Some(problem) = problem("prompt", found, "characters", ("max_prompt_chars", most)) {
            return Ok(Some(problem));
        }
    }
    if config.max_prompt_tokens.is_none() && config.max_tokens.is_none() {
        return Ok(None);
    }
    let of_prompt = tokens(record, Counted::Prompt)?;
    if let Some(most) = config.max_prompt_tokens
        && let Some(problem) = problem("prompt", of_prompt, "tokens", ("max_prompt_tokens", most))
    {
        return Ok(Some(problem));
    }
    let Some(most) = config.max_tokens else { return Ok(None) };
    let whole = of_prompt + tokens(record, Counted::Answer)?;
    let Some(excess) = problem("record", whole, "tokens", ("max_tokens", most)) else { return Ok(None) };
    let LongPrompts::Truncate(keep) = config.long_prompts else { return Ok(Some(excess)) };
    let leaves_some = keep == Keep::KeepEnd || tokens(record, Counted::Unlearnt)? < most;
    let cut = leaves_some.then_some(Cut { tokens: most, keep });
    Ok(Some(Excess { cut, ..excess }))
}

/// Adds the file's name to the record's id if there are several files.
fn within(path: &Path, paths: &[PathBuf], record: Record) -> Record {
    match paths {
        [_] => record,
        _ => {
            let file = path.file_name().unwrap_or_default().to_string_lossy();
            Record { id: format!("{file} {}", record.id), ..record }
        }
    }
}

/// Converts a row to a record with the id `row`, such as `line 12`.
fn record(
    columns: &NamedColumns,
    separator: &str,
    row: String,
    object: Map<String, Value>,
) -> Result<Record, String> {
    let column = |name: &str| {
        find(&object, name).ok_or_else(|| {
            let names = object.keys().map(|key| format!("`{key}`")).collect::<Vec<_>>().join(", ");
            let mut such_as = likely_columns(&object);
            if such_as.is_empty() && columns.answer.as_deref() == Some(name) {
                such_as = "; write `answer: null` there if records have none".to_owned();
            }
            format!("there is no column `{name}`, only {names}: name it in `columns`{such_as}")
        })
    };
    let domain = || match &columns.domain {
        None => Ok(String::new()),
        Some(name) => match column(name)? {
            Value::String(domain) => Ok(domain.clone()),
            _ => Err(format!("`{name}` is not a string")),
        },
    };
    if let Some(name) = &columns.text {
        let answer = match column(name)? {
            Value::String(text) if text.is_empty() => return Err(format!("`{name}` is empty")),
            Value::String(text) => text.clone(),
            _ => return Err(format!("`{name}` is not a string")),
        };
        return Ok(Record { id: row, answer, domain: domain()?, ..Record::default() });
    }
    if let (Some(steps), Some(labels)) = (&columns.steps, &columns.step_labels) {
        let steps = steps::read((steps, column(steps)?), (labels, column(labels)?))?;
        let prompt = prompt(column(&columns.prompt)?);
        let (prompt, messages) = prompt.map_err(|problem| format!("`{}` {problem}", columns.prompt))?;
        let answer = steps::joined(&steps, separator);
        let domain = domain()?;
        return Ok(Record { id: row, prompt, messages, answer, steps, domain, ..Record::default() });
    }
    let of = |name: &String, read: fn(&Value) -> Result<Answer, &'static str>| {
        read(column(name)?).map_err(|problem| format!("`{name}` {problem}"))
    };
    let read = if columns.rejected.is_some() { written } else { answer };
    let (answer, before) = columns.answer.as_ref().map_or(Ok(Answer::default()), |name| of(name, read))?;
    let rejected = match &columns.rejected {
        None => None,
        Some(name) => {
            let (rejected, of_rejected) = of(name, written)?;
            if of_rejected != before {
                return Err(format!("`{name}` has other messages before the answer than the better one"));
            }
            Some(rejected)
        }
    };
    let desirable = match &columns.label {
        None => None,
        Some(name) => Some(label(column(name)?).ok_or(format!("`{name}` is neither true nor false"))?),
    };
    let reward = match &columns.reward {
        None => None,
        Some(name) => Some(column(name)?.as_f64().ok_or(format!("`{name}` is not a number"))?),
    };
    let (prompt, messages) = match before {
        Some(before) if !before.is_empty() => of_messages(&before),
        _ => prompt(column(&columns.prompt)?),
    }
    .map_err(|problem| format!("`{}` {problem}", columns.prompt))?;
    let domain = domain()?;
    let mut columns_left = object;
    columns_left.shift_remove(&columns.prompt);
    let (columns, steps, cut) = (columns_left, Vec::new(), None);
    Ok(Record { id: row, prompt, messages, answer, rejected, desirable, reward, steps, domain, columns, cut })
}

/// A label of an answer; some files write it as a number.
fn label(value: &Value) -> Option<bool> {
    match value {
        Value::Bool(label) => Some(*label),
        Value::Number(number) if number.as_f64() == Some(1.0) => Some(true),
        Value::Number(number) if number.as_f64() == Some(0.0) => Some(false),
        _ => None,
    }
}

/// A suggestion for `columns`, by other systems' names for parts of records; empty if there are none.
fn likely_columns(object: &Map<String, Value>) -> String {
    const PROMPTS: [&str; 4] = ["instruction", "question", "problem", "query"];
    const ANSWERS: [&str; 6] = ["messages", "chosen", "completion", "response", "output", "solution"];
    let first = |names: &[&'static str]| names.iter().copied().find(|name| object.contains_key(*name));
    let parts = [
        ("prompt", first(&PROMPTS)),
        ("answer", first(&ANSWERS)),
        ("rejected", first(&["rejected"])),
        ("label", first(&["label"])),
        ("reward", first(&["reward"])),
        ("steps", first(&["completions", "steps"])),
        ("step_labels", first(&["labels"])),
        ("text", first(&["text"])),
    ];
    let found = parts.iter().filter_map(|(part, name)| Some(format!("{part}: {}", (*name)?)));
    match found.collect::<Vec<_>>() {
        none if none.is_empty() => String::new(),
        found => format!(", such as `{{{}}}`", found.join(", ")),
    }
}

/// An answer's text, with the messages before it if it ends a conversation.
type Answer = (String, Option<Vec<Value>>);

/// Reads an answer that a reward compares with; the error completes a sentence about the column.
fn answer(value: &Value) -> Result<Answer, &'static str> {
    match value {
        Value::String(text) => match as_messages(text) {
            Some(messages) => last_of(&messages),
            None => Ok((text.clone(), None)),
        },
        Value::Number(number) => Ok((number.to_string(), None)),
        Value::Array(messages) if messages.iter().any(is_message) => last_of(messages),
        // Data such as tests of a program, for the reward that reads them.
        Value::Array(_) | Value::Object(_) => Ok((value.to_string(), None)),
        Value::Null => Err("is null, not an answer: remove the record, or set `answer: null` in `columns`"),
        Value::Bool(_) => Err("is true or false, not an answer: write it as a text, such as \"true\""),
    }
}

/// Reads an answer in text form, such as one of a pair.
fn written(value: &Value) -> Result<Answer, &'static str> {
    const OTHER: &str = "is neither a text, a number nor a conversation";
    let is_data = matches!(value, Value::Array(_) | Value::Object(_));
    let found = if value.is_null() || value.is_boolean() { Err(OTHER) } else { answer(value) }?;
    if is_data && found.1.is_none() { Err(OTHER) } else { Ok(found) }
}

/// The last message of a conversation, and those before it.
fn last_of(messages: &[Value]) -> Result<Answer, &'static str> {
    match messages.split_last() {
        Some((last, before)) if last["role"] == "assistant" && last["content"].is_string() => {
            Ok((last["content"].as_str().unwrap_or_default().to_owned(), Some(before.to_vec())))
        }
        Some((last, _)) if last.get("from").is_some() => Err(
            "is a conversation with `from` and `value`: write `role`, which is user or assistant, and `content`",
        ),
        _ => Err(r#"is a conversation that does not end with {"role": "assistant", "content": a text}"#),
    }
}

/// Returns true if it is a message of a conversation, in either form.
fn is_message(value: &Value) -> bool {
    value.get("role").is_some() || (value.get("from").is_some() && value.get("value").is_some())
}

/// Messages written as JSON in a text, as in files without nested columns.
fn as_messages(text: &str) -> Option<Vec<Value>> {
    let list = text.starts_with('[').then(|| serde_json::from_str::<Vec<Value>>(text).ok()).flatten();
    list.filter(|messages| messages.iter().any(|message| message.get("role").is_some()))
}

/// A prompt's text, and its messages if it has any. The text of one message is its content; with several,
/// each starts with its role.
///
/// # Errors
/// If it is neither a text nor messages, or is empty, as the end of a sentence on it.
pub fn prompt(value: &Value) -> Result<(String, Vec<Value>), String> {
    let text = match value {
        Value::Array(messages) => return of_messages(messages),
        Value::String(text) => text,
        Value::Null => return Err("is null, neither a text nor messages".into()),
        Value::Bool(_) => return Err("is true or false, neither a text nor messages".into()),
        _ => return Err("is neither a text nor messages".into()),
    };
    match as_messages(text) {
        Some(messages) => of_messages(&messages),
        None if text.is_empty() => Err("is empty".into()),
        None if text.starts_with("[{'role'") || text.starts_with("[{'content'") => {
            Err("is a list of messages as Python prints it: write it as JSON".into())
        }
        None => Ok((text.clone(), Vec::new())),
    }
}

fn of_messages(messages: &[Value]) -> Result<(String, Vec<Value>), String> {
    let parts: Option<Vec<(&str, &str)>> =
        messages.iter().map(|it| Some((it.get("role")?.as_str()?, it.get("content")?.as_str()?))).collect();
    let text = match parts.as_deref() {
        None if messages.iter().any(|it| it.get("role").is_some() && it["content"].is_array()) => {
            return Err("has a message whose `content` is a list of parts: write it as one text".into());
        }
        None => return Err("is a list, but not of messages with `role` and `content`".into()),
        Some([]) => return Err("is empty".into()),
        Some([(_, content)]) => (*content).to_owned(),
        Some(parts) => {
            let lines: Vec<String> =
                parts.iter().map(|(role, content)| format!("{role}: {content}")).collect();
            lines.join("\n")
        }
    };
    Ok((text, messages.to_vec()))
}

/// The value of a column, or of a path such as `reward_model.ground_truth` if no column has that name.
pub fn find<'a>(object: &'a Map<String, Value>, name: &str) -> Option<&'a Value> {
    object.get(name).or_else(|| {
        let (first, rest) = name.split_once('.')?;
        find(object.get(first)?.as_object()?, rest)
    })
}

#[cfg(test)]
pub(super) mod tests {
    use std::io::Write;

    use serde_json::json;

    use super::*;
    use anyroll_config::ColumnsConfig;
    use anyroll_config::error_chain::one_line;

    fn parse(columns: &ColumnsConfig, line: &str) -> Result<Record, String> {
        record(&columns.named(), "|", "line 7".into(), serde_json::from_str(line).unwrap())
    }

    fn counting<'a>(tokens: &'a RecordTokens<'a>) -> Reading<'a> {
        Reading { tokens, holds_out: true, step_separator: "" }
    }

    #[test]
    fn columns_may_be_paths_and_name_a_domain() {
        let columns = ColumnsConfig::Named(NamedColumns {
            prompt: "question".into(),
            answer: Some("reward_model.ground_truth".into()),
            domain: Some("data_source".into()),
            ..NamedColumns::default()
        });
        let line =
            r#"{"question": "1+1", "reward_model": {"ground_truth": 2}, "data_source": "sums", "level": 3}"#;
        let record = parse(&columns, line).unwrap();
        assert_eq!(
            (record.id.as_str(), record.prompt.as_str(), record.answer.as_str()),
            ("line 7", "1+1", "2")
        );
        assert_eq!((record.domain.as_str(), &record.columns["level"]), ("sums", &Value::from(3)));
        assert!(!record.columns.contains_key("question"));
        let error = parse(&columns, r#"{"question": "1+1", "reward_model": {}}"#).unwrap_err();
        assert!(error.contains("no column `reward_model.ground_truth`"), "{error}");
    }

    #[test]
    fn a_files_first_character_may_mark_it() {
        let mut file = tempfile::Builder::new().suffix(".jsonl").tempfile().unwrap();
        file.write_all("\u{feff}{\"prompt\": \"1+1\", \"answer\": 2}\n".as_bytes()).unwrap();
        let config = FileConfig { path: Paths::from(file.path()), ..plain() };
        assert_eq!(read(&config, &config.path, None, counting(&|_, _| Ok(0))).unwrap()[0].prompt, "1+1");
    }

    #[test]
    fn records_may_have_no_answers() {
        let columns = ColumnsConfig::Named(NamedColumns { answer: None, ..NamedColumns::default() });
        let line = r#"{"prompt": "Say no more.", "instruction_id_list": ["a"], "kwargs": [{}]}"#;
        let record = parse(&columns, line).unwrap();
        assert_eq!((record.prompt.as_str(), record.answer.as_str()), ("Say no more.", ""));
        assert!(record.columns.contains_key("instruction_id_list"));
        let error = parse(&ColumnsConfig::default(), line).unwrap_err();
        assert!(
            error.contains("no column `answer`")
                && error.contains("`answer: null` there if records have none"),
            "{error}"
        );
    }

    /// Rows as in the documentation of each system.
    #[test]
    fn each_systems_own_files_are_read() {
        let check = |columns, line: &str, expected: (&str, usize, &str, &str)| {
            let record = parse(&columns, line).unwrap();
            let Record { prompt, messages, answer, domain, .. } = &record;
            assert_eq!((prompt.as_str(), messages.len(), answer.as_str(), domain.as_str()), expected);
        };
        check(
            ColumnsConfig::Verl,
            r#"{"data_source": "openai/gsm8k", "prompt": [{"content": "1+1?", "role": "user"}], "ability": "math",
                "reward_model": {"ground_truth": "2", "style": "rule"}, "extra_info": {"index": 0, "split": "train"}}"#,
            ("1+1?", 1, "2", "openai/gsm8k"),
        );
        check(
            ColumnsConfig::Roll,
            r#"{"id": "0", "source": "deepmath", "difficulty": 5, "prompt": "1+1?", "ground_truth": "2", "tag": "deepmath",
                "messages": "[{\"role\": \"system\", \"content\": \"Reason.\"}, {\"role\": \"user\", \"content\": \"1+1?\"}]"}"#,
            ("system: Reason.\nuser: 1+1?", 2, "2", "deepmath"),
        );
        check(ColumnsConfig::Trl, r#"{"prompt": "1+1?", "solution": "$2$"}"#, ("1+1?", 0, "$2$", ""));
        check(
            ColumnsConfig::Trl,
            r#"{"prompt": [{"role": "user", "content": "1+1?"}], "solution": "$2$"}"#,
            ("1+1?", 1, "$2$", ""),
        );
        check(ColumnsConfig::Openrlhf, r#"{"input": "1+1?", "label": 2}"#, ("1+1?", 0, "2", ""));
    }

    #[test]
    fn pairs_are_texts_or_conversations() {
        let columns = ColumnsConfig::Named(NamedColumns {
            answer: Some("chosen".into()),
            rejected: Some("rejected".into()),
            ..ColumnsConfig::default().named()
        });
        let check = |line: &str, expected: (&str, usize, &str, &str)| {
            let record = parse(&columns, line).unwrap();
            let rejected = record.rejected().unwrap();
            assert_eq!(
                (
                    record.prompt.as_str(),
                    record.messages.len(),
                    record.answer.as_str(),
                    rejected.answer.as_str()
                ),
                expected
            );
            assert_eq!((rejected.prompt, rejected.rejected), (record.prompt, None));
        };
        check(r#"{"prompt": "1+1?", "chosen": "2", "rejected": 3}"#, ("1+1?", 0, "2", "3"));
        let turns = |content: &str| {
            format!(
                r#"[{{"role": "user", "content": "1+1?"}}, {{"role": "assistant", "content": "{content}"}}]"#
            )
        };
        let line =
            format!(r#"{{"prompt": "not read", "chosen": {}, "rejected": {}}}"#, turns("2"), turns("3"));
        check(&line, ("1+1?", 1, "2", "3"));
        // TRL's other form: a separate prompt, and each answer as a message.
        check(
            r#"{"prompt": [{"role": "user", "content": "1+1?"}], "chosen": [{"role": "assistant", "content": "2"}],
                "rejected": [{"role": "assistant", "content": "3"}]}"#,
            ("1+1?", 1, "2", "3"),
        );
        let refused = |line: &str, words: &str| {
            let error = parse(&columns, line).unwrap_err();
            assert!(error.contains(words), "{error}");
        };
        refused(r#"{"prompt": "1+1?", "chosen": "2"}"#, "there is no column `rejected`");
        refused(r#"{"prompt": "1+1?", "chosen": "2", "rejected": null}"#, "`rejected` is neither");
        let other = turns("3").replace("1+1?", "1+2?");
        refused(
            &format!(r#"{{"chosen": {}, "rejected": {other}}}"#, turns("2")),
            "has other messages before the answer",
        );
        let unnamed = parse(&ColumnsConfig::default(), r#"{"prompt": "a", "chosen": "b", "rejected": "c"}"#);
        assert!(unnamed.unwrap_err().ends_with("`columns`, such as `{answer: chosen, rejected: rejected}`"));
        let alpaca = parse(&ColumnsConfig::default(), r#"{"instruction": "a", "input": "", "output": "b"}"#);
        assert!(alpaca.unwrap_err().ends_with("such as `{prompt: instruction, answer: output}`"));
        // A conversation is not a text to learn, and neither is a list next to a worse answer.
        for answer in [
            turns("2").replace("assistant", "user"),
            json!(turns("2").replace("assistant", "user")).to_string(),
            json!([{"from": "gpt", "value": "2"}]).to_string(),
        ] {
            let line = format!(r#"{{"prompt": "a", "answer": {answer}}}"#);
            let error = parse(&ColumnsConfig::default(), &line).unwrap_err();
            assert!(error.starts_with("`answer` is a conversation"), "{error}");
        }
        refused(r#"{"prompt": "a", "chosen": [{"content": "2"}], "rejected": "3"}"#, "`chosen` is neither");
        let as_text = parse(&ColumnsConfig::default(), &json!({"answer": turns("2")}).to_string()).unwrap();
        assert_eq!((as_text.prompt.as_str(), as_text.answer.as_str()), ("1+1?", "2"));
        // Data for a reward are kept unchanged.
        let tests = parse(&ColumnsConfig::default(), r#"{"prompt": "a", "answer": [["1", "2"]]}"#).unwrap();
        assert_eq!((tests.answer.as_str(), tests.rejected), (r#"[["1","2"]]"#, None));
    }

    fn names(paths: &[PathBuf]) -> Result<Vec<String>, Error> {
        let name = |file: &PathBuf| file.file_name().unwrap().to_str().unwrap().to_owned();
        files(&Paths(paths.to_vec())).map(|files| files.iter().map(name).collect())
    }

    #[test]
    fn files_are_listed_or_found_by_name() {
        let folder = tempfile::tempdir().unwrap();
        for name in ["b-1.jsonl", "b-10.jsonl", "b-2.jsonl", "b-2.jsonl.old", "a[1].jsonl", "c.parquet"] {
            fs::write(folder.path().join(name), "").unwrap();
        }
        let check = |paths: &[&str], expected: &[&str]| {
            let paths: Vec<PathBuf> = paths.iter().map(|path| folder.path().join(path)).collect();
            assert_eq!(names(&paths).unwrap(), expected, "{paths:?}");
        };
        check(&["c.parquet"], &["c.parquet"]);
        check(&["b-*.jsonl"], &["b-1.jsonl", "b-10.jsonl", "b-2.jsonl"]);
        check(&["c.parquet", "b-?.jsonl"], &["c.parquet", "b-1.jsonl", "b-2.jsonl"]);
        check(&["a[1]*"], &["a[1].jsonl"]);
        // A file whose name contains the wildcard is meant itself.
        fs::write(folder.path().join("b-*.jsonl"), "").unwrap();
        check(&["b-*.jsonl"], &["b-*.jsonl"]);
        let at = |path: &str| folder.path().join(path);
        let none = one_line(&names(&[at("d*.jsonl")]).unwrap_err());
        assert!(none.contains("d*.jsonl") && none.contains("no file matches"), "{none}");
        let twice = names(&[at("c.parquet"), at("?.parquet")]).unwrap_err().to_string();
        assert!(twice.contains("c.parquet is listed twice"), "{twice}");
    }

    #[test]
    fn records_of_several_files_are_named_by_their_file() {
        let folder = tempfile::tempdir().unwrap();
        for (name, prompt) in [("a.jsonl", "1+1"), ("b.jsonl", "2+2")] {
            let line = format!("{{\"prompt\": \"{prompt}\", \"answer\": 1}}\n");
            fs::write(folder.path().join(name), line).unwrap();
        }
        let config = FileConfig { path: Paths::from(&*folder.path().join("*.jsonl")), ..plain() };
        let records = read(&config, &config.path, None, counting(&|_, _| Ok(0))).unwrap();
        let ids: Vec<&str> = records.iter().map(|record| record.id.as_str()).collect();
        assert_eq!(ids, ["a.jsonl line 1", "b.jsonl line 1"]);
    }

    #[test]
    fn a_file_may_be_read_for_some_of_its_domains() {
        let mut file = tempfile::Builder::new().suffix(".jsonl").tempfile().unwrap();
        for (prompt, tag) in [("1", "a"), ("2", "b"), ("3", "c"), ("4", "a")] {
            writeln!(file, "{{\"prompt\": \"{prompt}\", \"answer\": 1, \"tag\": \"{tag}\"}}").unwrap();
        }
        let columns = ColumnsConfig::Named(NamedColumns {
            domain: Some("tag".to_owned()),
            ..ColumnsConfig::default().named()
        });
        let check = |domains: &[&str], expected: &[&str]| {
            let domains = domains.iter().map(|domain| (*domain).to_owned()).collect();
            let path = Paths::from(file.path());
            let config = FileConfig { path, columns: columns.clone(), domains, ..plain() };
            let records = read(&config, &config.path, None, counting(&|_, _| Ok(0)));
            let prompts = |records: Vec<Record>| records.into_iter().map(|it| it.prompt).collect::<Vec<_>>();
            match records.map(prompts) {
                Ok(found) => assert_eq!(found, expected),
                Err(error) => {
                    let told = error.to_string();
                    assert!(expected.is_empty() && told.ends_with("that is of `domains`, of 4"), "{told}");
                }
            }
        };
        check(&[], &["1", "2", "3", "4"]);
        check(&["a"], &["1", "4"]);
        check(&["c", "nowhere", "b"], &["2", "3"]);
        check(&["nowhere"], &[]);
    }

    pub fn plain() -> FileConfig {
        FileConfig {
            path: Paths(Vec::new()),
            columns: ColumnsConfig::default(),
            domains: Vec::new(),
            max_prompt_chars: None,
            max_prompt_tokens: None,
            max_tokens: None,
            long_prompts: LongPrompts::LeaveOut,
            max_records: None,
            held_out_percent: None,
            held_out: None,
        }
    }

    #[test]
    fn long_prompts_are_left_out_or_refused() {
        let mut file = tempfile::Builder::new().suffix(".jsonl").tempfile().unwrap();
        for prompt in ["a", "a b c", "a b", "a b c d"] {
            writeln!(file, "{{\"prompt\": \"{prompt}\", \"answer\": 1}}").unwrap();
        }
        let words = |record: &Record, counted: Counted| match counted {
            Counted::Prompt | Counted::Unlearnt => Ok(record.prompt.split(' ').count()),
            Counted::Answer => Ok(2),
        };
        let config = FileConfig { path: Paths::from(file.path()), ..plain() };
        let read = |config: &FileConfig| {
            let records = read(config, &config.path, config.max_records, counting(&words))?;
            Ok::<_, Error>(records.into_iter().map(|record| record.prompt).collect::<Vec<_>>())
        };
        let by_tokens = FileConfig { max_prompt_tokens: Some(2), ..config.clone() };
        assert_eq!(read(&by_tokens).unwrap(), ["a", "a b"]);
        let by_both = FileConfig { max_prompt_chars: Some(1), ..by_tokens.clone() };
        assert_eq!(read(&by_both).unwrap(), ["a"]);
        let whole = FileConfig { max_tokens: Some(4), ..config.clone() };
        assert_eq!(read(&whole).unwrap(), ["a", "a b"]);
        let error = read(&FileConfig { long_prompts: LongPrompts::Refuse, ..whole }).unwrap_err().to_string();
        assert!(error.contains("line 2: the record has 5 tokens, and `max_tokens` is 4"), "{error}");
        let strict = FileConfig { long_prompts: LongPrompts::Refuse, ..by_tokens };
        let error = read(&strict).unwrap_err().to_string();
        assert!(error.contains("line 2: the prompt has 3 tokens, and `max_prompt_tokens` is 2"), "{error}");
        let all = FileConfig { max_prompt_tokens: Some(4), ..strict };
        assert_eq!(read(&all).unwrap().len(), 4);
        // The first records, then those of them that are short enough.
        let first = FileConfig { max_records: Some(3), max_prompt_tokens: Some(2), ..config };
        assert_eq!(read(&first).unwrap(), ["a", "a b"]);
    }

    #[test]
    fn long_records_may_be_cut() {
        let mut file = tempfile::Builder::new().suffix(".jsonl").tempfile().unwrap();
        for prompt in ["a", "a b", "a b c", "a b c d"] {
            writeln!(file, "{{\"prompt\": \"{prompt}\", \"answer\": 1}}").unwrap();
        }
        let words = |record: &Record, counted: Counted| match counted {
            Counted::Prompt | Counted::Unlearnt => Ok(record.prompt.split(' ').count()),
            Counted::Answer => Ok(2),
        };
        let cut = |keep, max_prompt_tokens| {
            let (path, long_prompts) = (Paths::from(file.path()), LongPrompts::Truncate(keep));
            let config = FileConfig { path, max_tokens: Some(3), max_prompt_tokens, long_prompts, ..plain() };
            let records = read(&config, &config.path, None, counting(&words)).unwrap();
            records.into_iter().map(|it| (it.prompt, it.cut.map(|cut| cut.tokens))).collect::<Vec<_>>()
        };
        let [a, ab, abc, abcd] = ["a", "a b", "a b c", "a b c d"].map(str::to_owned);
        let (a, ab) = ((a, None), (ab, Some(3)));
        assert_eq!(cut(Keep::KeepStart, None), [a.clone(), ab.clone()], "of others no answer is left");
        let last = [a, ab, (abc, Some(3)), (abcd, Some(3))];
        assert_eq!(cut(Keep::KeepEnd, None), last);
        assert_eq!(cut(Keep::KeepEnd, Some(3)), last[..3]);
    }

    #[test]
    fn answers_may_be_judged() {
        let [answer, label] = ["completion", "label"].map(|name| Some(name.to_owned()));
        let columns = ColumnsConfig::Named(NamedColumns { answer, label, ..NamedColumns::default() });
        let line = |label: &str| format!(r#"{{"prompt": "1+1?", "completion": "2", "label": {label}}}"#);
        for (written, expected) in
            [("true", true), ("false", false), ("1", true), ("0", false), ("0.0", false)]
        {
            assert_eq!(parse(&columns, &line(written)).unwrap().desirable, Some(expected), "{written}");
        }
        for wrong in ["null", "2", "0.5", "\"true\"", "[]"] {
            let error = parse(&columns, &line(wrong)).unwrap_err();
            assert_eq!(error, "`label` is neither true nor false", "{wrong}");
        }
        let none = parse(&columns, r#"{"prompt": "1+1?", "completion": "2"}"#).unwrap_err();
        assert!(none.contains("there is no column `label`"), "{none}");
    }

    #[test]
    fn answers_may_have_rewards() {
        let reward = Some("score".to_owned());
        let columns = ColumnsConfig::Named(NamedColumns { reward, ..NamedColumns::default() });
        let line = |score: &str| format!(r#"{{"prompt": "1+1?", "answer": "2", "score": {score}}}"#);
        for (written, expected) in [("1", 1.0), ("-0.5", -0.5), ("2e3", 2000.0)] {
            assert_eq!(parse(&columns, &line(written)).unwrap().reward, Some(expected), "{written}");
        }
        for wrong in ["null", "true", "\"1\"", "[1]"] {
            let error = parse(&columns, &line(wrong)).unwrap_err();
            assert_eq!(error, "`score` is not a number", "{wrong}");
        }
        let none = parse(&columns, r#"{"prompt": "1+1?", "answer": "2"}"#).unwrap_err();
        assert!(none.contains("there is no column `score`"), "{none}");
    }

    #[test]
    fn solutions_may_be_in_labelled_steps() {
        let [steps, step_labels] = ["completions", "labels"].map(|name| Some(name.to_owned()));
        let columns = ColumnsConfig::Named(NamedColumns { steps, step_labels, ..NamedColumns::default() });
        let line = r#"{"prompt": "1+1?", "completions": ["one", "two"], "labels": [true, 0.5]}"#;
        let record = parse(&columns, line).unwrap();
        let found: Vec<(&str, f64)> = record.steps.iter().map(|it| (&*it.text, it.label)).collect();
        assert_eq!(found, [("one", 1.0), ("two", 0.5)]);
        assert_eq!((&*record.prompt, &*record.answer), ("1+1?", "one|two|"));
        let chat =
            r#"{"prompt": [{"role": "user", "content": "1+1?"}], "completions": ["2"], "labels": [1]}"#;
        assert_eq!(parse(&columns, chat).unwrap().messages.len(), 1);
        for (line, words) in [
            (r#"{"prompt": "a", "completions": ["b"]}"#, "there is no column `labels`"),
            (r#"{"prompt": "a", "labels": [1]}"#, "there is no column `completions`"),
            (r#"{"completions": ["b"], "labels": [1]}"#, "there is no column `prompt`"),
            (r#"{"prompt": "", "completions": ["b"], "labels": [1]}"#, "`prompt` is empty"),
            (r#"{"prompt": "a", "completions": ["b"], "labels": [2]}"#, "`labels[0]` is 2"),
        ] {
            let error = parse(&columns, line).unwrap_err();
            assert!(error.contains(words), "{error}");
        }
        let error = parse(&ColumnsConfig::default(), line).unwrap_err();
        assert!(error.contains("steps: completions, step_labels: labels"), "{error}");
    }

    #[test]
    fn a_text_may_be_all_of_a_record() {
        let text = Some("body".to_owned());
        let columns = ColumnsConfig::Named(NamedColumns { text, ..NamedColumns::default() });
        let record = parse(&columns, r#"{"body": "Once upon a time.", "url": "a"}"#).unwrap();
        assert!(record.is_text() && record.key() == "Once upon a time.", "{record:?}");
        for (line, words) in [
            (r#"{"body": ""}"#, "`body` is empty"),
            (r#"{"body": ["a"]}"#, "`body` is not a string"),
            (r#"{"text": "a"}"#, "`columns`, such as `{text: text}`"),
        ] {
            let error = parse(&columns, line).unwrap_err();
            assert!(error.contains(words), "{error}");
        }
    }

    #[test]
    fn what_is_no_prompt_is_told() {
        let check = |prompt: &str, words: &str| {
            let line = format!("{{\"prompt\": {prompt}, \"answer\": 1}}");
            let error = parse(&ColumnsConfig::default(), &line).unwrap_err();
            assert!(error.contains(words), "{error}");
        };
        check("3", "`prompt` is neither a text nor messages");
        check("\"\"", "`prompt` is empty");
        check("[]", "`prompt` is empty");
        check("[1, 2]", "not of messages");
        check("null", "`prompt` is null");
        check("true", "`prompt` is true or false");
        check("\"[{'role': 'user', 'content': 'a'}]\"", "as Python prints it");
        check(r#"[{"role": "user", "content": [{"type": "text", "text": "a"}]}]"#, "a list of parts");
        for (answer, words) in [("null", "`answer` is null"), ("true", "`answer` is true or false")] {
            let line = format!("{{\"prompt\": \"a\", \"answer\": {answer}}}");
            let error = parse(&ColumnsConfig::default(), &line).unwrap_err();
            assert!(error.contains(words), "{error}");
        }
        // A text that only looks like a list is a text.
        let line = r#"{"prompt": "[1, 2] sorted is", "answer": 1}"#;
        assert_eq!(parse(&ColumnsConfig::default(), line).unwrap().prompt, "[1, 2] sorted is");
    }
}

//! Facts on the model and the data that a config is written for.

use std::{fmt, path::Path};

use anyroll_config::{FolderConfig, NamedColumns, Paths};
use anyroll_data::{CellTypes, Tokenizer, files, find, is_data, rows};
use anyroll_models::{Decoder, Model, hf::ModelFolder};
use anyroll_pipelines::{
    Result,
    hub::{Hub, Name},
};
use serde_json::{Map, Value};

use super::{Method, refused};
use crate::cli::columns::Columns;

/// Facts on a published model.
pub(super) struct ModelFacts {
    /// Number of weights.
    pub weights: usize,
    /// Maximum length in tokens.
    pub max_length: usize,
    /// True if prompts can be a user's messages.
    pub has_template: bool,
}

impl ModelFacts {
    /// Reads the model that `path` names, without its weights.
    pub fn read(path: &Path, hub: &Hub) -> Result<Self> {
        let folder = ModelFolder::open_shape(&hub.model(path)?).map_err(anyroll_models::Error::from)?;
        let config = folder.decoder_config();
        let max_length = config.max_position_embeddings as usize;
        let decoder = Decoder::new(config.clone(), tch::Device::Cpu)?;
        let params = decoder.units().iter().flat_map(|unit| &unit.params);
        let weights = params.map(|param| param.elements()).sum();
        let plain = FolderConfig { path: path.to_owned(), chat: false, system_prompt: None, lora: None };
        let has_template = Tokenizer::of_folder(&folder, &plain)?.has_unused_template();
        Ok(Self { weights, max_length, has_template })
    }
}

/// Rows that are looked at.
const LOOKED_AT: usize = 100;

/// Facts on data.
pub(super) struct DataFacts {
    /// Number of records.
    pub count: usize,
    first: Vec<Map<String, Value>>,
}

/// Columns of a config, as YAML and as a sentence.
pub(super) struct Chosen {
    /// Value of `columns`.
    pub yaml: String,
    columns: NamedColumns,
    is_recognized: bool,
}

impl fmt::Display for Chosen {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let how = if self.is_recognized { "recognized by their names" } else { "as given" };
        write!(f, "its columns are {}, {how}", self.yaml)
    }
}

impl DataFacts {
    /// Reads the data that `path` names.
    pub fn read(path: &Path, hub: &Hub) -> Result<Self> {
        let found = match (is_data(path), Name::of_data(path)) {
            (false, Some(name)) => hub.find(&name).map_err(|problem| {
                let missing = format!("there is no file {}, and {problem}", path.display());
                refused(
                    "--data",
                    format!("{missing}: fetch it with `{}`, or pass `--download`", name.command()),
                )
            })?,
            _ => path.to_owned(),
        };
        let (mut count, mut first) = (0, Vec::new());
        for file in files(&Paths(vec![found]))? {
            let records = rows(&file, &CellTypes::default())?;
            count += records.len();
            let wanted = LOOKED_AT.saturating_sub(first.len());
            first.extend(records.into_iter().take(wanted).map(|(_, record)| record));
        }
        if first.is_empty() {
            return Err(refused("--data", format!("{} has no record", path.display())));
        }
        Ok(Self { count, first })
    }

    /// Returns true if the records have a column.
    pub fn has(&self, column: &str) -> bool {
        find(&self.first[0], column).is_some()
    }

    /// The column that is named as a prompt.
    pub fn prompt(&self) -> Option<&'static str> {
        self.one_of(&["prompt", "question", "instruction", "problem", "query", "input"])
    }

    fn one_of(&self, names: &[&'static str]) -> Option<&'static str> {
        names.iter().copied().find(|name| self.has(name))
    }

    /// The columns that `method` reads: those of the option, or recognized by their names.
    pub fn columns_for(&self, method: Method, given: Option<&Columns>) -> Result<Chosen> {
        if let Some(Columns(given)) = given {
            let yaml = serde_json::to_value(given).expect("plain data");
            return Ok(Chosen { yaml: flow(&yaml), columns: given.named(), is_recognized: false });
        }
        let parts = self.recognized(method).map_err(|part| {
            let names: Vec<String> = self.first[0].keys().map(|name| format!("`{name}`")).collect();
            let problem = format!("none of the columns {} is named as {part}", names.join(", "));
            refused("--columns", format!("{problem}: pass `--columns` with the parts of a record"))
        })?;
        let columns: Map<String, Value> =
            parts.into_iter().map(|(part, column)| (part.to_owned(), column.into())).collect();
        let columns = Value::Object(columns);
        let named: NamedColumns = serde_json::from_value(columns.clone()).expect("known parts");
        Ok(Chosen { yaml: flow(&columns), columns: named, is_recognized: true })
    }

    /// Parts of a record with their columns; the error is the part that has none.
    fn recognized(&self, method: Method) -> Result<Vec<(&'static str, Option<&'static str>)>, &'static str> {
        const ANSWERS: [&str; 8] =
            ["answer", "gold", "solution", "target", "response", "output", "completion", "chosen"];
        let prompt = || self.prompt().map(|column| ("prompt", Some(column))).ok_or("a prompt");
        let part = |part, names: &[&'static str], what| {
            self.one_of(names).map(|column| (part, Some(column))).ok_or(what)
        };
        match method {
            Method::Grpo | Method::Rloo if self.has("reward_model.ground_truth") => {
                let domain = self.has("data_source").then_some(("domain", Some("data_source")));
                Ok([prompt()?, ("answer", Some("reward_model.ground_truth"))]
                    .into_iter()
                    .chain(domain)
                    .collect())
            }
            Method::Grpo | Method::Rloo if self.has("ground_truth") => {
                let messages = self.has("messages").then_some(("prompt", Some("messages")));
                Ok(vec![messages.map_or_else(prompt, Ok)?, ("answer", Some("ground_truth"))])
            }
            Method::Grpo | Method::Rloo => {
                Ok(vec![prompt()?, ("answer", self.one_of(&ANSWERS).or(self.one_of(&["label"])))])
            }
            Method::Sft if self.has("messages") => Ok(vec![("answer", Some("messages"))]),
            Method::Sft if self.prompt().is_none() => {
                Ok(vec![part("text", &["text"], "a prompt or a text")?])
            }
            Method::Sft => Ok(vec![prompt()?, part("answer", &ANSWERS, "an answer")?]),
            Method::Dpo | Method::RewardModel => {
                let answers = [
                    part("answer", &["chosen"], "a chosen answer")?,
                    part("rejected", &["rejected"], "a rejected answer")?,
                ];
                Ok(prompt().into_iter().chain(answers).collect())
            }
            Method::Kto => {
                let answer = part("answer", &["completion", "answer", "response", "output"], "an answer")?;
                Ok(vec![prompt()?, answer, part("label", &["label"], "a label")?])
            }
        }
    }

    /// The reward that fits the answers.
    pub fn usual_reward(&self, chosen: &Chosen) -> &'static str {
        let Some(answer) = &chosen.columns.answer else { return "exact" };
        let has_digit = |record: &Map<String, Value>| match find(record, answer) {
            Some(Value::String(text)) => text.contains(|c: char| c.is_ascii_digit()),
            Some(Value::Number(_)) => true,
            _ => false,
        };
        if self.first.iter().all(has_digit) { "math" } else { "exact" }
    }
}

/// A mapping on one line; a part without a column is left out, but for the answer's.
fn flow(columns: &Value) -> String {
    let Value::Object(columns) = columns else { return columns.as_str().unwrap_or_default().to_owned() };
    let entry = |(part, column): (&String, &Value)| match column.as_str() {
        Some(column) => Some(format!("{part}: {}", scalar(column))),
        None => (part == "answer").then(|| "answer: null".to_owned()),
    };
    format!("{{{}}}", columns.iter().filter_map(entry).collect::<Vec<_>>().join(", "))
}

/// A text as YAML, in quotes where it could be anything else.
pub(super) fn scalar(text: &str) -> String {
    const OTHERS: [&str; 7] = ["null", "true", "false", "yes", "no", "on", "off"];
    let is_plain = |c: char| c.is_alphanumeric() || "_-./@".contains(c);
    let starts = text.starts_with(|c: char| c.is_alphabetic() || c == '_' || c == '/')
        || text.starts_with("./")
        || text.starts_with("../");
    let is_plain = starts && text.chars().all(is_plain) && !OTHERS.contains(&&*text.to_lowercase());
    if is_plain { text.to_owned() } else { Value::from(text).to_string() }
}

#[cfg(test)]
mod tests {
    use anyroll_config::error_chain::one_line;
    use serde_json::json;

    use super::*;

    fn chosen(method: Method, record: Value) -> std::result::Result<String, String> {
        let Value::Object(record) = record else { panic!("no object") };
        let facts = DataFacts { count: 1, first: vec![record] };
        facts.columns_for(method, None).map(|it| it.yaml).map_err(|error| one_line(&error))
    }

    #[test]
    fn columns_are_recognized_by_their_names() {
        for (method, record, expected) in [
            (Method::Grpo, json!({"question": "a", "answer": "1"}), "{prompt: question, answer: answer}"),
            (Method::Rloo, json!({"problem": "a", "solution": "1"}), "{prompt: problem, answer: solution}"),
            (Method::Grpo, json!({"prompt": "a", "kwargs": []}), "{prompt: prompt, answer: null}"),
            (
                Method::Grpo,
                json!({"prompt": [], "reward_model": {"ground_truth": "1"}, "data_source": "b"}),
                "{prompt: prompt, answer: reward_model.ground_truth, domain: data_source}",
            ),
            (
                Method::Grpo,
                json!({"messages": "[]", "ground_truth": "1", "prompt": "a"}),
                "{prompt: messages, answer: ground_truth}",
            ),
            (Method::Sft, json!({"messages": []}), "{answer: messages}"),
            (
                Method::Sft,
                json!({"instruction": "a", "output": "b"}),
                "{prompt: instruction, answer: output}",
            ),
            (Method::Sft, json!({"text": "a"}), "{text: text}"),
            (
                Method::Dpo,
                json!({"prompt": "a", "chosen": "b", "rejected": "c"}),
                "{prompt: prompt, answer: chosen, rejected: rejected}",
            ),
            (
                Method::RewardModel,
                json!({"chosen": [], "rejected": []}),
                "{answer: chosen, rejected: rejected}",
            ),
            (
                Method::Kto,
                json!({"prompt": "a", "completion": "b", "label": true}),
                "{prompt: prompt, answer: completion, label: label}",
            ),
        ] {
            assert_eq!(chosen(method, record.clone()), Ok(expected.to_owned()), "{method} of {record}");
        }
        for (method, record, expected) in [
            (Method::Grpo, json!({"q": "a"}), "none of the columns `q` is named as a prompt"),
            (Method::Dpo, json!({"prompt": "a", "chosen": "b"}), "is named as a rejected answer"),
            (Method::Kto, json!({"prompt": "a", "completion": "b"}), "is named as a label"),
            (Method::Sft, json!({"prompt": "a"}), "is named as an answer"),
        ] {
            let error = chosen(method, record).unwrap_err();
            assert!(error.contains(expected) && error.contains("--columns"), "{error}");
        }
    }

    #[test]
    fn texts_are_quoted_where_yaml_reads_something_else() {
        for (text, expected) in [
            ("a/b_c-1.jsonl", "a/b_c-1.jsonl"),
            ("../x", "../x"),
            ("/a b", "\"/a b\""),
            ("1.5", "\"1.5\""),
            (".nan", "\".nan\""),
            ("No", "\"No\""),
            ("a: b", "\"a: b\""),
            ("train-*.parquet", "\"train-*.parquet\""),
            ("", "\"\""),
        ] {
            assert_eq!(scalar(text), expected);
            let read: String = serde_saphyr::from_str(&scalar(text)).unwrap();
            assert_eq!(read, text);
        }
    }
}

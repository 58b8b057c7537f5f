//! The `data` section: the source of prompts and answers.

use std::fmt;
use std::path::{Path, PathBuf};

use serde::de::value::SeqAccessDeserializer;
use serde::de::{self, MapAccess, SeqAccess, Visitor};
use serde::{Deserialize, Deserializer, Serialize, Serializer};

use crate::document::Section;

/// Source of prompts and answers. A tenth of the prompts is held out for evaluation, by hash.
#[derive(Clone, Debug, PartialEq, Deserialize, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum DataConfig {
    /// Digits to sort, generated: `314159>` has the answer `113459`.
    Sort(SortConfig),
    /// Sums, generated: `27+58=` has the answer `85`.
    Addition(AdditionConfig),
    /// Digits and a target, generated: `2,3,4=14>` is solved by an expression such as `2+3*4`. The reward of such data
    /// is `countdown`.
    Countdown(CountdownConfig),
    /// Files: JSONL, JSON, CSV, Parquet or Arrow.
    File(Box<FileConfig>),
    /// Several sources, each a domain; a step draws from the sources in proportion to their weights.
    Mix(Vec<MixedConfig>),
}

/// A source of a mix.
#[derive(Clone, Debug, PartialEq, Deserialize, Serialize)]
#[serde(deny_unknown_fields)]
pub struct MixedConfig {
    /// Name of the domain. Rewards choose their records by the name (`domains`), and evaluation reports each domain.
    pub domain: String,
    /// Share of the prompts that this source provides, relative to the other weights; above 0, met to a thousandth.
    /// Default 1.
    #[serde(default = "one_f64")]
    pub weight: f64,
    /// The source.
    pub data: DataConfig,
}

/// Expressions whose value is a target.
#[derive(Clone, Debug, PartialEq, Deserialize, Serialize)]
#[serde(deny_unknown_fields)]
pub struct CountdownConfig {
    /// Number of digits in a problem, 2 to 5. Each digit is used once, with `+`, `-` and `*`.
    pub numbers: u32,
}

/// Digits to sort.
#[derive(Clone, Debug, PartialEq, Deserialize, Serialize)]
#[serde(deny_unknown_fields)]
pub struct SortConfig {
    /// Number of digits in a prompt, 2 to 18.
    pub digits: u32,
}

/// Two numbers to add.
#[derive(Clone, Debug, PartialEq, Deserialize, Serialize)]
#[serde(deny_unknown_fields)]
pub struct AdditionConfig {
    /// Number of digits of each number, 1 to 9; shorter numbers are padded with zeros.
    pub digits: u32,
    /// True if the answer has its digits from the last to the first. That order is easier, since carries run in the
    /// same direction. Default false.
    #[serde(default)]
    pub reversed: bool,
}

/// Files of records: a line with a JSON object each (`.jsonl`), an array of objects (`.json`), CSV with a line of columns
/// (`.csv`), or the rows of a table (`.parquet`, `.arrow`). An Arrow file may have the file or the stream format. Cells of
/// CSV are texts, except in the columns `label`, `reward`, `steps` and `step_labels`.
#[derive(Clone, Debug, PartialEq, Deserialize, Serialize)]
#[serde(deny_unknown_fields)]
pub struct FileConfig {
    /// The file, or a list of files, whose records are read one file after the other. A relative path starts at the
    /// config's folder, or else at the shell's. `ORG/NAME/FILE` may also name a file of a data set on the hub, which is
    /// looked up in the local cache. In the last part of a path `*` matches any characters and `?` matches one: all matching files
    /// are read, sorted by name.
    pub path: Paths,
    /// Columns of a record's parts: `roll`, `verl`, `trl` or `openrlhf` for a file made for that system, or names, such
    /// as `{prompt: question, answer: gold}`. Rewards receive all other columns of a file unchanged.
    /// Default `{prompt: prompt, answer: answer}`.
    #[serde(default)]
    pub columns: ColumnsConfig,
    /// Domains whose records are read, by the domain column; a file may thus be several sources of a mix. Default: all
    /// records.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub domains: Vec<String>,
    /// Maximum number of characters of a prompt; 1 or above. Default: no bound.
    #[serde(default)]
    pub max_prompt_chars: Option<usize>,
    /// Maximum number of tokens of a prompt, chat template included; 1 or above. Default: the model's maximum length,
    /// and a longer prompt is an error.
    #[serde(default)]
    pub max_prompt_tokens: Option<usize>,
    /// Maximum number of tokens of a prompt with its answer and end token; 1 or above. Of two answers, the longer one
    /// counts. Default: the model's maximum length, and a longer record is an error.
    #[serde(default)]
    pub max_tokens: Option<usize>,
    /// Treatment of records that are too long. Default leave_out.
    #[serde(default)]
    pub long_prompts: LongPrompts,
    /// Maximum number of records; 1 or above. The records are the first ones of `path`, in order, before any record is
    /// left out as too long. Default: all.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub max_records: Option<usize>,
    /// Percentage of the prompts that are held out, by hash, 1 to 99. Default 10, unless there is `held_out` or
    /// evaluation is off.
    #[serde(default)]
    pub held_out_percent: Option<u32>,
    /// Files whose prompts are held out, in the form of `path` and with the same columns. No prompt of `path` is then
    /// held out, and a prompt that is in both is not trained on. Default: none.
    #[serde(default)]
    pub held_out: Option<Paths>,
}

/// Treatment of a record that is too long.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Deserialize, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum LongPrompts {
    /// The record is left out, and a warning has the count.
    #[default]
    LeaveOut,
    /// The run does not start; the error names the record.
    Refuse,
    /// A record with more than `max_tokens` tokens is cut to that length, and a warning has the count. A record is left
    /// out if no token of its answers would remain, or if its prompt exceeds another bound. Only `offline` cuts.
    Truncate(Keep),
}

/// Tokens that remain of a cut record.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Deserialize, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum Keep {
    /// The first tokens.
    KeepStart,
    /// The last tokens, end token included.
    KeepEnd,
}

/// Files, as a text or a list of texts.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Paths(pub Vec<PathBuf>);

impl From<&Path> for Paths {
    fn from(path: &Path) -> Self {
        Self(vec![path.to_owned()])
    }
}

impl Serialize for Paths {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        match &self.0[..] {
            [path] => path.serialize(serializer),
            paths => paths.serialize(serializer),
        }
    }
}

impl<'de> Deserialize<'de> for Paths {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        struct PathsVisitor;

        impl<'de> Visitor<'de> for PathsVisitor {
            type Value = Paths;

            fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str("a path, or a list such as [first.jsonl, more-*.parquet]")
            }

            fn visit_str<E: de::Error>(self, path: &str) -> Result<Paths, E> {
                Ok(Paths(vec![path.into()]))
            }

            fn visit_seq<A: SeqAccess<'de>>(self, paths: A) -> Result<Paths, A::Error> {
                Vec::deserialize(SeqAccessDeserializer::new(paths)).map(Paths)
            }
        }

        deserializer.deserialize_any(PathsVisitor)
    }
}

/// Columns of a record's parts in a file.
#[derive(Clone, Debug, PartialEq, Serialize)]
#[serde(rename_all = "snake_case")]
#[expect(clippy::large_enum_variant, reason = "a config has one for each data file")]
pub enum ColumnsConfig {
    /// ROLL's JSONL: `messages`, as JSON in a text, `ground_truth`, and `tag` as the domain.
    Roll,
    /// verl's Parquet: `prompt`, which are messages, `reward_model.ground_truth`, and `data_source` as the domain.
    Verl,
    /// The columns that TRL's trainers and accuracy reward read: `prompt`, a text or messages, and `solution`.
    Trl,
    /// OpenRLHF's usual `--input_key` and `--label_key`: `input` and `label`.
    Openrlhf,
    /// Any other columns.
    #[serde(untagged)]
    Named(NamedColumns),
}

/// Columns by name. A name may be a path such as `a.b`.
#[derive(Clone, Debug, PartialEq, Deserialize, Serialize)]
#[serde(deny_unknown_fields)]
pub struct NamedColumns {
    /// Column of the prompt: a text, or messages with `role` and `content`, which may be JSON in a text. Messages need
    /// `model.chat`. Default `prompt`.
    #[serde(default = "prompt")]
    pub prompt: String,
    /// Column of the answer: a text or a number; a list or an object is input of a reward, such as a program's tests.
    /// Messages that end with the assistant's are a conversation. The last message of a conversation is the answer;
    /// messages before the last one replace the prompt in the column `prompt`. `null`: records have no answers, and no
    /// reward may compare with an answer. Default `answer`.
    #[serde(default = "answer")]
    pub answer: Option<String>,
    /// Column of a rejected answer, a text or a conversation, for objectives that compare two answers. Default: none.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub rejected: Option<String>,
    /// Column with true for a desirable answer and false for an undesirable one, for unpaired objectives. Records then
    /// have no rejected answer. Default: none.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub label: Option<String>,
    /// Column of the answer's reward, a number, for `ilql`. Records then have no rejected answer. Default: none.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub reward: Option<String>,
    /// Column of a text that `sft` trains on from its first token to its end. There is then neither a prompt nor an
    /// answer. Default: none.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub text: Option<String>,
    /// Column of a solution's steps, a list of texts, for `prm`. There is then no answer. Default: none.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub steps: Option<String>,
    /// Column of the steps' labels, a list with as many: true for a right step and false for a wrong one, or a
    /// probability from 0 to 1. Default: none.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub step_labels: Option<String>,
    /// Column of the record's domain, a text. Default: no domain.
    #[serde(default)]
    pub domain: Option<String>,
}

impl Default for ColumnsConfig {
    fn default() -> Self {
        Self::Named(NamedColumns::default())
    }
}

impl Default for NamedColumns {
    fn default() -> Self {
        let (prompt, answer) = (prompt(), answer());
        let (rejected, label, reward, text, domain) = (None, None, None, None, None);
        Self { prompt, answer, rejected, label, reward, text, steps: None, step_labels: None, domain }
    }
}

impl ColumnsConfig {
    /// Returns the columns by name.
    pub fn named(&self) -> NamedColumns {
        let columns = |prompt: &str, answer: &str, domain: Option<&str>| NamedColumns {
            prompt: prompt.to_owned(),
            answer: Some(answer.to_owned()),
            domain: domain.map(str::to_owned),
            ..NamedColumns::default()
        };
        match self {
            Self::Roll => columns("messages", "ground_truth", Some("tag")),
            Self::Verl => columns("prompt", "reward_model.ground_truth", Some("data_source")),
            Self::Trl => columns("prompt", "solution", None),
            Self::Openrlhf => columns("input", "label", None),
            Self::Named(named) => named.clone(),
        }
    }
}

impl DataConfig {
    /// Returns the maximum number of tokens of a record; `None` if one of the files has no bound.
    pub fn max_tokens(&self) -> Option<usize> {
        match self {
            Self::File(file) => file.max_tokens,
            Self::Mix(sources) => {
                let bounds: Option<Vec<usize>> = sources.iter().map(|it| it.data.max_tokens()).collect();
                bounds?.into_iter().max()
            }
            Self::Sort(_) | Self::Addition(_) | Self::Countdown(_) => None,
        }
    }
}

impl DataConfig {
    /// Reports invalid fields, without reading the files.
    pub(super) fn validate(&self, at: &Section) {
        let (name, value, range) = match self {
            Self::Sort(sort) => ("sort.digits", sort.digits, 2..=18),
            Self::Addition(addition) => ("addition.digits", addition.digits, 1..=9),
            Self::Countdown(countdown) => ("countdown.numbers", countdown.numbers, 2..=5),
            Self::File(file) => {
                file.validate(&at.below("file"));
                ("file.held_out_percent", file.held_out_percent.unwrap_or(1), 1..=99)
            }
            Self::Mix(sources) => return validate_mix(sources, &at.below("mix")),
        };
        at.ensure(
            range.contains(&value),
            name,
            format!("{value} is out of range"),
            format!("write a whole number from {} to {}", range.start(), range.end()),
        );
    }

    /// Reports a source that has no separate prompts to complete.
    pub(super) fn validate_prompts(&self, at: &Section) {
        match self {
            Self::File(file) => {
                let at = at.below("file");
                let columns = file.columns.named();
                let message = "a text by itself has no prompt to complete";
                let help = "name a column of prompts, `columns: {prompt: ...}`; `offline` learns texts";
                at.ensure(columns.text.is_none(), "columns.text", message, help);
                let message = "what is completed is judged by its reward";
                at.ensure(columns.label.is_none(), "columns.label", message, "leave it out");
                at.ensure(columns.reward.is_none(), "columns.reward", message, "leave it out");
                at.ensure(columns.steps.is_none(), "columns.steps", message, "leave it out");
                let cuts = matches!(file.long_prompts, LongPrompts::Truncate(_));
                let help = "write `leave_out` or `refuse`";
                at.ensure(!cuts, "long_prompts.truncate", "prompts are not cut", help);
            }
            Self::Mix(sources) => {
                for (index, source) in sources.iter().enumerate() {
                    source.data.validate_prompts(&at.below("mix").item(index).below("data"));
                }
            }
            Self::Sort(_) | Self::Addition(_) | Self::Countdown(_) => {}
        }
    }

    /// Reports records without answers if something reads answers. `reader` names the reader, and `domains` are the
    /// domains of a mix that are read; an empty list is for all.
    pub(super) fn validate_answers(&self, at: &Section, reader: &str, domains: &[String]) {
        match self {
            Self::File(file) => {
                let has = file.columns.named().answer.is_some();
                let message = format!("{reader}, and records have no answers");
                at.ensure(has, "file.columns.answer", message, "name the column of their answers");
            }
            Self::Mix(sources) => {
                let is_read = |source: &MixedConfig| domains.is_empty() || domains.contains(&source.domain);
                for (index, source) in sources.iter().enumerate().filter(|(_, source)| is_read(source)) {
                    source.data.validate_answers(&at.below("mix").item(index).below("data"), reader, &[]);
                }
            }
            Self::Sort(_) | Self::Addition(_) | Self::Countdown(_) => {}
        }
    }
}

fn validate_mix(sources: &[MixedConfig], at: &Section) {
    if !at.has_all_items() {
        return;
    }
    let help = "add a source, such as `- {domain: sums, data: {addition: {digits: 2}}}`";
    at.ensure(!sources.is_empty(), "", "the list is empty", help);
    for (index, MixedConfig { domain, weight, data }) in sources.iter().enumerate() {
        let at = at.item(index);
        let first = sources.iter().position(|other| other.domain == *domain);
        at.ensure(
            first == Some(index) && !domain.is_empty(),
            "domain",
            format!("`{domain}` is no name of its own"),
            "give each source a name of its own",
        );
        at.number("weight", *weight, *weight > 0.0, "above 0");
        let is_nested = matches!(data, DataConfig::Mix(_));
        if at.ensure(!is_nested, "data", "it is a mix itself", "list its sources here") {
            data.validate(&at.below("data"));
        }
    }
}

impl FileConfig {
    fn validate(&self, at: &Section) {
        let help = "name a file, such as `train.jsonl`";
        at.ensure(!self.path.0.is_empty(), "path", "the list is empty", help);
        if let Some(held_out) = &self.held_out {
            at.ensure(!held_out.0.is_empty(), "held_out", "the list is empty", help);
            let message = "with `held_out` none of these prompts is";
            let is_alone = self.held_out_percent.is_none();
            at.ensure(is_alone, "held_out_percent", message, "leave one of the two out");
        }
        let columns = self.columns.named();
        at.given(&["columns"]).ensure(
            self.domains.is_empty() || columns.domain.is_some(),
            "domains",
            "its records have no domain",
            "name the column that has it: `columns: {domain: ...}`",
        );
        at.ensure(
            columns.text.is_none()
                || [&columns.rejected, &columns.label, &columns.reward].iter().all(|it| it.is_none()),
            "columns.text",
            "a text by itself has no worse answer, no label and no reward",
            "leave these out, or name a `prompt` and an `answer` in place of `text`",
        );
        at.given(&["columns.text"]).ensure(
            columns.label.is_none() || columns.rejected.is_none(),
            "columns.label",
            "of a better and a worse answer each is judged by that",
            "leave `label` or `rejected` out",
        );
        at.given(&["columns.label", "columns.rejected"]).ensure(
            columns.reward.is_none() || (columns.label.is_none() && columns.rejected.is_none()),
            "columns.reward",
            "a label, or a worse answer, is the reward already",
            "leave one of these out",
        );
        columns.validate_steps(&at.below("columns"));
        self.validate_bounds(at);
    }

    fn validate_bounds(&self, at: &Section) {
        at.positive("max_records", self.max_records.unwrap_or(1));
        let bounds = [
            ("max_prompt_chars", self.max_prompt_chars),
            ("max_prompt_tokens", self.max_prompt_tokens),
            ("max_tokens", self.max_tokens),
        ];
        for (name, bound) in bounds {
            at.positive(name, bound.unwrap_or(1));
        }
        if let LongPrompts::Truncate(_) = self.long_prompts {
            at.given(&["max_tokens"]).ensure(
                self.max_tokens.is_some_and(|most| most >= 2),
                "long_prompts.truncate",
                "records are cut to `max_tokens`, and there is no such number of 2 or above",
                "write `max_tokens: 1024`, say",
            );
            return;
        }
        at.given(&bounds.map(|(name, _)| name)).ensure(
            bounds.iter().any(|(_, bound)| bound.is_some()) || self.long_prompts == LongPrompts::LeaveOut,
            "long_prompts",
            "no record is too long: there is no `max_prompt_tokens` or `max_tokens`",
            "add it, or leave this out",
        );
    }
}

impl NamedColumns {
    fn validate_steps(&self, at: &Section) {
        let (steps, labels) = (self.steps.is_some(), self.step_labels.is_some());
        let help = "name both: `{steps: completions, step_labels: labels}`";
        at.ensure(steps || !labels, "step_labels", "these are labels of no `steps`", help);
        at.ensure(labels || !steps, "steps", "these steps have no `step_labels`", help);
        for (name, column) in [
            ("text", &self.text),
            ("rejected", &self.rejected),
            ("label", &self.label),
            ("reward", &self.reward),
        ] {
            let message = "a record of labelled steps has no other labels, texts and answers";
            at.given(&["steps"]).ensure(!steps || column.is_none(), name, message, "leave it out");
        }
    }
}

impl<'de> Deserialize<'de> for ColumnsConfig {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        struct ColumnsVisitor;

        impl<'de> Visitor<'de> for ColumnsVisitor {
            type Value = ColumnsConfig;

            fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str(
                    "`roll`, `verl`, `trl`, `openrlhf`, or columns such as {prompt: question, answer: gold}",
                )
            }

            fn visit_str<E: de::Error>(self, name: &str) -> Result<ColumnsConfig, E> {
                match name {
                    "roll" => Ok(ColumnsConfig::Roll),
                    "verl" => Ok(ColumnsConfig::Verl),
                    "trl" => Ok(ColumnsConfig::Trl),
                    "openrlhf" => Ok(ColumnsConfig::Openrlhf),
                    _ => Err(E::invalid_value(de::Unexpected::Str(name), &self)),
                }
            }

            fn visit_map<A: MapAccess<'de>>(self, map: A) -> Result<ColumnsConfig, A::Error> {
                let map = de::value::MapAccessDeserializer::new(map);
                NamedColumns::deserialize(map).map(ColumnsConfig::Named)
            }
        }

        deserializer.deserialize_any(ColumnsVisitor)
    }
}

fn one_f64() -> f64 {
    1.0
}

fn prompt() -> String {
    "prompt".to_owned()
}

fn answer() -> Option<String> {
    Some("answer".to_owned())
}

//! The `data` section: where prompts and answers come from.

use std::fmt;
use std::path::{Path, PathBuf};

use serde::de::value::SeqAccessDeserializer;
use serde::de::{self, MapAccess, SeqAccess, Visitor};
use serde::{Deserialize, Deserializer, Serialize, Serializer};

/// Where prompts and answers come from; a tenth of the prompts is held out for evaluation, by hash.
#[derive(Clone, Debug, PartialEq, Deserialize, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum DataConfig {
    /// Digits to sort, made in code: `314159>` wants `113459`.
    Sort(SortConfig),
    /// Sums, made in code: `27+58=` wants `85`.
    Addition(AdditionConfig),
    /// Digits and a target, made in code: `2,3,4=14>` wants an expression such as `2+3*4`. Its reward is `countdown`.
    Countdown(CountdownConfig),
    /// Files: JSONL, Parquet or Arrow.
    File(Box<FileConfig>),
    /// Several sources, each a domain; in a step they stand by their weights.
    Mix(Vec<MixedConfig>),
}

/// A source of a mix.
#[derive(Clone, Debug, PartialEq, Deserialize, Serialize)]
#[serde(deny_unknown_fields)]
pub struct MixedConfig {
    /// Its name, by which rewards choose their records (`domains`) and evaluation tells it apart.
    pub domain: String,
    /// How many of the prompts are from it, relative to the other weights; above 0, met to a thousandth. Default 1.
    #[serde(default = "one_f64")]
    pub weight: f64,
    /// The source.
    pub data: DataConfig,
}

/// Expressions that come to a target.
#[derive(Clone, Debug, PartialEq, Deserialize, Serialize)]
#[serde(deny_unknown_fields)]
pub struct CountdownConfig {
    /// Digits of a problem, 2 to 5, each to be used once with `+`, `-` and `*`.
    pub numbers: u32,
}

/// Digits to sort.
#[derive(Clone, Debug, PartialEq, Deserialize, Serialize)]
#[serde(deny_unknown_fields)]
pub struct SortConfig {
    /// Digits in a prompt, 2 to 18.
    pub digits: u32,
}

/// Two numbers to add.
#[derive(Clone, Debug, PartialEq, Deserialize, Serialize)]
#[serde(deny_unknown_fields)]
pub struct AdditionConfig {
    /// Digits of each number, 1 to 9; shorter numbers are filled up with zeros.
    pub digits: u32,
    /// The answer's digits from the last to the first, which is easier, since carries run that way.
    /// Default false.
    #[serde(default)]
    pub reversed: bool,
}

/// Files of records: a line with a JSON object each, or the rows of a table. Their names end with `.jsonl`, `.parquet`
/// or `.arrow`, which may be a file or a stream.
#[derive(Clone, Debug, PartialEq, Deserialize, Serialize)]
#[serde(deny_unknown_fields)]
pub struct FileConfig {
    /// The file, or a list of them, whose records come one file after the other; a relative path starts at the current
    /// folder. In the last part of a path `*` stands for any characters and `?` for one: all files there that are called
    /// so, by name.
    pub path: Paths,
    /// Where a record's parts are: `roll`, `verl`, `trl` or `openrlhf` for a file made for that system, or their columns,
    /// such as `{prompt: question, answer: gold}`. Default `{prompt: prompt, answer: answer}`; whatever a file has beside these
    /// comes to rewards as it is.
    #[serde(default)]
    pub columns: ColumnsConfig,
    /// Only records of these domains, by their column; so a file may be several sources of a mix. Default: all records.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub domains: Vec<String>,
    /// The most characters of a prompt. Default: any number.
    #[serde(default)]
    pub max_prompt_chars: Option<usize>,
    /// The most tokens of a prompt, its chat template included. Default: as many as the model has room for, and one that
    /// has more is an error.
    #[serde(default)]
    pub max_prompt_tokens: Option<usize>,
    /// The most tokens of a prompt with its answer and an end; of two answers with the longer one. Default: as many as the
    /// model has room for, and a record that has more is an error.
    #[serde(default)]
    pub max_tokens: Option<usize>,
    /// What becomes of a longer record. Default leave_out.
    #[serde(default)]
    pub long_prompts: LongPrompts,
    /// The most records: the first ones of `path`, in its order, before any is left out as too long. Default: all.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub max_records: Option<usize>,
    /// Percent of the prompts that are held out, by hash, 1 to 99. Default 10, unless there is `held_out` or nothing is
    /// evaluated.
    #[serde(default)]
    pub held_out_percent: Option<u32>,
    /// Files of their own whose prompts are held out, as in `path` and with the same columns; of those in `path` none is then,
    /// and one that is in both is not trained on. Default: none.
    #[serde(default)]
    pub held_out: Option<Paths>,
}

/// What becomes of a record that is too long.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Deserialize, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum LongPrompts {
    /// It is left out, and counted in a warning.
    #[default]
    LeaveOut,
    /// The run does not start, and says which it is.
    Refuse,
    /// Of one that has more than `max_tokens` only so many are learnt, and it is counted in a warning; one of whose answers
    /// nothing would be left, or whose prompt is too long by another bound, is left out. Only `offline` cuts.
    Truncate(Keep),
}

/// Which tokens of a record are kept that is cut.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Deserialize, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum Keep {
    /// The first ones.
    KeepStart,
    /// The last ones, the end token among them.
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

/// Where a file has a record's parts.
#[derive(Clone, Debug, PartialEq, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum ColumnsConfig {
    /// ROLL's JSONL: `messages`, as JSON in a text, `ground_truth`, and `tag` as the domain.
    Roll,
    /// verl's Parquet: `prompt`, which are messages, `reward_model.ground_truth`, and `data_source` as the domain.
    Verl,
    /// What TRL's trainers and accuracy reward read: `prompt`, a text or messages, and `solution`.
    Trl,
    /// OpenRLHF's usual `--input_key` and `--label_key`: `input` and `label`.
    Openrlhf,
    /// Any others.
    #[serde(untagged)]
    Named(NamedColumns),
}

/// Columns by name. A name may be a path such as `a.b`.
#[derive(Clone, Debug, PartialEq, Deserialize, Serialize)]
#[serde(deny_unknown_fields)]
pub struct NamedColumns {
    /// The prompt: a text, or messages with `role` and `content`, which may be JSON in a text. Messages need
    /// `model.chat`. Default `prompt`.
    #[serde(default = "prompt")]
    pub prompt: String,
    /// The answer: a text or a number; a list or an object is what a reward reads, such as a program's tests. Messages that
    /// end with the assistant's are a conversation: the last one is the answer, and those before it, if there are any, are the
    /// prompt, whatever `prompt` says. `null`: records have no answers, and no reward may compare with one. Default `answer`.
    #[serde(default = "answer")]
    pub answer: Option<String>,
    /// A worse answer, a text or a conversation too, for objectives that compare. Default: none.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub rejected: Option<String>,
    /// Whether the answer is desirable, true or false, for objectives of answers that are judged each by itself; then no record
    /// has a worse answer. Default: none.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub label: Option<String>,
    /// A text that is learnt from its first token to its end, by `sft`: then there is neither prompt nor answer. Default: none.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub text: Option<String>,
    /// The record's domain, a text. Default: no domain.
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
        Self { prompt, answer, rejected: None, label: None, text: None, domain: None }
    }
}

impl ColumnsConfig {
    /// The columns by name.
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
    /// The most tokens of a record, where all of its files have a bound.
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

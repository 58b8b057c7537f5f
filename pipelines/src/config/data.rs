//! The `data` section: where prompts and answers come from.

use std::path::PathBuf;

use serde::{Deserialize, Serialize};

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
    /// One JSON object a line of a file.
    Jsonl(JsonlConfig),
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

/// A file with one JSON object a line.
#[derive(Clone, Debug, PartialEq, Deserialize, Serialize)]
#[serde(deny_unknown_fields)]
pub struct JsonlConfig {
    /// The file; a relative path starts at the current folder.
    pub path: PathBuf,
    /// The key of the prompt, a string, or a path such as `a.b` to it. Default `prompt`.
    #[serde(default = "prompt")]
    pub prompt: String,
    /// The key of the answer, or a path to it: a string or a number; a list or an object is what a reward reads, such
    /// as a program's tests. Default `answer`.
    #[serde(default = "answer")]
    pub answer: String,
    /// The key of the record's domain, a string, or a path to it. Default: no domain.
    #[serde(default)]
    pub domain: Option<String>,
    /// Records with a longer prompt are left out, and counted in a warning. Default: none is.
    #[serde(default)]
    pub max_prompt_chars: Option<usize>,
    /// Percent of the prompts that are held out, 1 to 99. Default 10.
    #[serde(default = "ten")]
    pub held_out_percent: u32,
}

fn one_f64() -> f64 {
    1.0
}

fn ten() -> u32 {
    10
}

fn prompt() -> String {
    "prompt".to_owned()
}

fn answer() -> String {
    "answer".to_owned()
}

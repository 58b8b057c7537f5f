//! The fields of rewards.

use std::fmt;
use std::path::PathBuf;

use serde::de::value::SeqAccessDeserializer;
use serde::de::{self, MapAccess, SeqAccess, Visitor};
use serde::ser::SerializeMap;
use serde::{Deserialize, Deserializer, Serialize, Serializer};

use super::endpoint::{CodeConfig, JudgeConfig, RemoteConfig};
use super::image_reward::ImageForm;
use super::reward_model::RewardModelConfig;
use super::schema::PipelineConfig;
use crate::document::Section;

/// The reward of a completion: a word, a term such as `{math: {}}`, or a list of terms with a weighted sum.
///
/// ```yaml
/// reward:
///   - math: {}
///   - regex: {pattern: "<think>.*</think>.*"}
///     weight: 0.1
/// ```
#[derive(Clone, Debug, Default, PartialEq)]
pub enum RewardConfig {
    /// `exact`: 1 for a finished completion that equals the answer, else 0.
    #[default]
    Exact,
    /// A list of at least one term. Evaluation measures the first term that applies to a record; the other terms only
    /// shape the training.
    Sum(Vec<RewardTerm>),
}

impl RewardConfig {
    /// Returns true if right completions, of any domain, have about the length of the records' answers.
    pub fn wants_answers(&self) -> bool {
        match self {
            Self::Exact => true,
            Self::Sum(terms) => terms.iter().any(|term| term.domains.is_empty() && term.kind.wants_answer()),
        }
    }

    /// Returns the reward models.
    pub fn models(&self) -> impl Iterator<Item = &RewardModelConfig> {
        self.numbered_models().map(|(_, model)| model)
    }

    /// Returns the reward models, each with its term's index.
    pub fn numbered_models(&self) -> impl Iterator<Item = (usize, &RewardModelConfig)> {
        self.terms().iter().enumerate().filter_map(|(index, term)| match &term.kind {
            RewardKind::Model(model) => Some((index, model)),
            _ => None,
        })
    }

    /// Returns the reward models, mutably.
    pub fn models_mut(&mut self) -> impl Iterator<Item = &mut RewardModelConfig> {
        let terms = match self {
            Self::Exact => &mut [][..],
            Self::Sum(terms) => terms,
        };
        terms.iter_mut().filter_map(|term| match &mut term.kind {
            RewardKind::Model(model) => Some(model),
            _ => None,
        })
    }
}

impl PipelineConfig {
    /// Returns the reward of completions; `None` if the pipeline has no such reward.
    pub fn reward(&self) -> Option<&RewardConfig> {
        if let Self::Rlvr(rlvr) = self { Some(&rlvr.reward) } else { None }
    }

    /// Returns the reward of completions, mutably.
    pub fn reward_mut(&mut self) -> Option<&mut RewardConfig> {
        if let Self::Rlvr(rlvr) = self { Some(&mut rlvr.reward) } else { None }
    }
}

/// A term of a sum: a reward's name with the reward's fields, and the fields of the term.
#[derive(Clone, Debug, PartialEq)]
pub struct RewardTerm {
    /// The reward, the only key that is not a field of terms: `math: {}`.
    pub kind: RewardKind,
    /// Weight of the score; other than 0, negative for a penalty. Default 1.
    pub weight: f64,
    /// Domains whose records have the term; an empty list is for all. Default: all.
    pub domains: Vec<String>,
    /// Maximum fraction of a step's completions that the term may fail on, 0 to 1; above this fraction the run ends
    /// with the error. A completion on which a term fails is not trained on, and counted. Default 0.
    pub max_error_rate: f64,
}

impl RewardTerm {
    /// Returns a term with the defaults of its fields.
    pub fn of(kind: RewardKind) -> Self {
        Self { kind, weight: 1.0, domains: Vec::new(), max_error_rate: 0.0 }
    }
}

/// A reward and its fields.
#[derive(Clone, Debug, PartialEq)]
pub enum RewardKind {
    /// 1 for a finished completion that equals the answer, else 0.
    Exact(NoFields),
    /// 1 for an answer that is mathematically equal, else 0.
    Math(MathConfig),
    /// 1 for the right letter of a multiple choice, else 0.
    Choice(NoFields),
    /// 1 for an expression that solves a countdown problem, else 0.
    Countdown(NoFields),
    /// 1 for a finished completion that a pattern matches as a whole, else 0.
    Regex(RegexConfig),
    /// 1 for a completion that follows its verifiable instructions (IFEval).
    Ifeval(IfevalConfig),
    /// 1 for a program that passes its tests, in a sandbox.
    Code(CodeConfig),
    /// Score of a judge model at an endpoint.
    Judge(JudgeConfig),
    /// The score of a reward model in a folder.
    Model(RewardModelConfig),
    /// The score of a reward model behind an endpoint.
    Remote(RemoteConfig),
    /// Score of a user's function.
    Python(PythonConfig),
    /// Sum of the rewards that the environment gave for the turns.
    Environment(NoFields),
    /// Penalty from 0 to -1 as a completion approaches the maximum length (DAPO).
    Length(LengthConfig),
    /// Minus the fraction of repeated n-grams.
    Repetition(RepetitionConfig),
}

impl RewardKind {
    /// Returns the name in YAML.
    pub fn name(&self) -> &'static str {
        match self {
            Self::Exact(_) => "exact",
            Self::Math(_) => "math",
            Self::Choice(_) => "choice",
            Self::Countdown(_) => "countdown",
            Self::Regex(_) => "regex",
            Self::Ifeval(_) => "ifeval",
            Self::Code(_) => "code",
            Self::Judge(_) => "judge",
            Self::Model(_) => "model",
            Self::Remote(_) => "remote",
            Self::Python(_) => "python",
            Self::Environment(_) => "environment",
            Self::Length(_) => "length",
            Self::Repetition(_) => "repetition",
        }
    }

    /// Returns the reward's name in YAML if the reward compares with a record's answer; otherwise `None`.
    pub fn compares(&self) -> Option<&'static str> {
        let compares = matches!(
            self,
            Self::Exact(_) | Self::Math(_) | Self::Choice(_) | Self::Countdown(_) | Self::Code(_)
        );
        compares.then(|| self.name())
    }

    /// Returns true if a right completion has about the length of the record's answer. For other rewards an answer may
    /// be a solution, or tests.
    fn wants_answer(&self) -> bool {
        matches!(self, Self::Exact(_) | Self::Countdown(_))
    }
}

/// An empty section, `{}`.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Deserialize, Serialize)]
#[serde(deny_unknown_fields)]
pub struct NoFields {}

/// Options of comparing answers as mathematics.
#[derive(Clone, Copy, Debug, PartialEq, Deserialize, Serialize)]
#[serde(deny_unknown_fields)]
pub struct MathConfig {
    /// Relative tolerance if the gold answer is a decimal number, from 0 to 0.1; the error is never above half of the
    /// last digit. Default 1e-4.
    #[serde(default = "tolerance")]
    pub tolerance: f64,
    /// True if only an answer in `\boxed{}` or `\fbox{}` counts. Default false.
    #[serde(default)]
    pub only_boxed: bool,
    /// True if a comma between digits is the decimal mark: `3,5` is then 3.5, and `1.234,5` is 1234.5. Default false.
    #[serde(default)]
    pub decimal_comma: bool,
}

impl Default for MathConfig {
    fn default() -> Self {
        Self { tolerance: tolerance(), only_boxed: false, decimal_comma: false }
    }
}

/// Form of a completion.
#[derive(Clone, Debug, PartialEq, Eq, Deserialize, Serialize)]
#[serde(deny_unknown_fields)]
pub struct RegexConfig {
    /// A regular expression for the whole completion, in the syntax of Rust's `regex`; a dot is any character.
    pub pattern: String,
}

/// Start and end of the length penalty.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Deserialize, Serialize)]
#[serde(deny_unknown_fields)]
pub struct LengthConfig {
    /// Length at which the score reaches -1, in tokens, end token included; 1 or above.
    pub max_tokens: usize,
    /// Number of tokens before `max_tokens` over which the score falls; from 1 to `max_tokens`.
    pub buffer_tokens: usize,
}

/// Unit of repetition.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Deserialize, Serialize)]
#[serde(deny_unknown_fields)]
pub struct RepetitionConfig {
    /// Number of words of an n-gram; 1 or above. Default 3.
    #[serde(default = "three")]
    pub ngram_words: usize,
}

/// Credit for results that are partly right.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Deserialize, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum Credit {
    /// 1 if all parts are right, else 0.
    #[default]
    All,
    /// The fraction of parts that are right.
    Share,
}

/// Options of verifying instructions.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Deserialize, Serialize)]
#[serde(deny_unknown_fields, default)]
pub struct IfevalConfig {
    /// Credit for instructions that are followed. Default `all`.
    pub credit: Credit,
    /// True for the published checker's verdict where it is wrong. Default false.
    pub like_published: bool,
}

/// A function in a Python file of the user's.
#[derive(Clone, Debug, PartialEq, Deserialize, Serialize)]
#[serde(deny_unknown_fields)]
pub struct PythonConfig {
    /// The Python file; a relative path starts at the config's folder.
    pub path: PathBuf,
    /// Name of the function in the file.
    pub function: String,
    /// Signature of the function. Default `trl`.
    #[serde(default)]
    pub signature: Signature,
    /// The interpreter, whose Python environment has the function's imports. Default `python3`.
    #[serde(default = "python3")]
    pub python: String,
    /// Timeout of a completion in seconds; above 0, at most 3600. The process is then killed. Default 30.
    #[serde(default = "half_minute")]
    pub timeout_s: f64,
    /// Timeout of loading the file in seconds; above 0, at most 3600. Default 120.
    #[serde(default = "two_minutes")]
    pub start_timeout_s: f64,
    /// Format of images, for a function of images. Default `png`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub images: Option<ImageForm>,
}

/// Signature of a user's function. A column is left out if the function has no parameter for it.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Deserialize, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum Signature {
    /// TRL's: `f(prompts, completions, answer, **columns)`, from lists of one to a list of one number.
    #[default]
    Trl,
    /// verl's: `f(data_source, solution_str, ground_truth, extra_info)`, to a number or a dict with `score`.
    Verl,
    /// OpenRLHF's: `f(queries, prompts, labels)`, from lists of one, where a query is the prompt followed by the
    /// completion. The result is a list or tensor of one number, or a dict with such `rewards`.
    Openrlhf,
}

impl Signature {
    /// Returns the named arguments that a function receives besides columns; openrlhf's have no names.
    pub fn arguments(self) -> &'static [&'static str] {
        match self {
            Self::Trl => &["prompts", "completions", "answer", "finished", "log_metric", "log_extra"],
            Self::Verl => &["data_source", "solution_str", "ground_truth", "extra_info", "finished"],
            Self::Openrlhf => &[],
        }
    }

    /// Returns the signature's name in YAML.
    pub fn name(self) -> &'static str {
        match self {
            Self::Trl => "trl",
            Self::Verl => "verl",
            Self::Openrlhf => "openrlhf",
        }
    }
}

impl RewardConfig {
    /// Returns the terms; an empty list for `exact` alone.
    pub fn terms(&self) -> &[RewardTerm] {
        match self {
            Self::Exact => &[],
            Self::Sum(terms) => terms,
        }
    }

    pub(super) fn validate(&self, at: &Section) {
        let Self::Sum(terms) = self else { return };
        if !at.has_all_items() {
            return;
        }
        at.ensure(!terms.is_empty(), "", "the list is empty", "add a term, such as `- math: {}`");
        for (index, term) in terms.iter().enumerate() {
            let at = at.item(index);
            validate_term(&at, term.weight, term.max_error_rate);
            term.kind.validate(&at);
        }
    }
}

impl RewardTerm {
    /// Returns true if the reward is the environment's.
    pub(super) fn is_of_environment(&self) -> bool {
        matches!(self.kind, RewardKind::Environment(_))
    }
}

/// Reports invalid fields that every term of a sum has.
pub(super) fn validate_term(at: &Section, weight: f64, max_error_rate: f64) {
    at.number("weight", weight, weight != 0.0, "other than 0");
    let holds = (0.0..=1.0).contains(&max_error_rate);
    at.number("max_error_rate", max_error_rate, holds, "from 0 to 1");
}

impl RewardKind {
    /// Reports invalid fields. `at` is the term.
    pub fn validate(&self, at: &Section) {
        match self {
            Self::Exact(_)
            | Self::Choice(_)
            | Self::Countdown(_)
            | Self::Regex(_)
            | Self::Ifeval(_)
            | Self::Environment(_) => {}
            Self::Math(math) => {
                let holds = (0.0..=0.1).contains(&math.tolerance);
                at.number("math.tolerance", math.tolerance, holds, "from 0 to 0.1");
            }
            Self::Code(code) => code.validate(&at.below("code")),
            Self::Judge(judge) => judge.validate(&at.below("judge")),
            Self::Model(model) => model.validate(&at.below("model")),
            Self::Remote(remote) => remote.validate(&at.below("remote")),
            Self::Python(python) => {
                python.validate(&at.below("python"));
                let message = "completions are no images";
                at.ensure(python.images.is_none(), "python.images", message, "leave it out");
            }
            Self::Length(length) => length.validate(&at.below("length")),
            Self::Repetition(repetition) => {
                at.positive("repetition.ngram_words", repetition.ngram_words);
            }
        }
    }
}

impl LengthConfig {
    fn validate(self, at: &Section) {
        let Self { max_tokens, buffer_tokens } = self;
        at.positive("max_tokens", max_tokens);
        at.positive("buffer_tokens", buffer_tokens);
        at.given(&["max_tokens"]).ensure(
            buffer_tokens <= max_tokens,
            "buffer_tokens",
            format!("{buffer_tokens} is more than `max_tokens`"),
            format!("write {max_tokens} or fewer"),
        );
    }
}

impl PythonConfig {
    pub(super) fn validate(&self, at: &Section) {
        at.seconds("timeout_s", self.timeout_s);
        at.seconds("start_timeout_s", self.start_timeout_s);
    }
}

// serde's attributes take functions only.

fn tolerance() -> f64 {
    1e-4
}

fn three() -> usize {
    3
}

pub(super) fn half_minute() -> f64 {
    30.0
}

pub(super) fn two_minutes() -> f64 {
    120.0
}

pub(super) fn python3() -> String {
    "python3".into()
}

impl<'de> Deserialize<'de> for RewardConfig {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        struct RewardVisitor;

        impl<'de> Visitor<'de> for RewardVisitor {
            type Value = RewardConfig;

            fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str("a reward that needs no field, such as `math`, a reward with its fields, or a list such as [{math: {}, weight: 1.0}]")
            }

            fn visit_str<E: de::Error>(self, text: &str) -> Result<RewardConfig, E> {
                let kind = match text {
                    "exact" => return Ok(RewardConfig::Exact),
                    "math" => RewardKind::Math(MathConfig::default()),
                    "choice" => RewardKind::Choice(NoFields {}),
                    "countdown" => RewardKind::Countdown(NoFields {}),
                    "ifeval" => RewardKind::Ifeval(IfevalConfig::default()),
                    "code" => RewardKind::Code(CodeConfig::default()),
                    // Other rewards need fields, which only a list can have.
                    _ => {
                        const WORDS: [&str; 6] = ["exact", "math", "choice", "countdown", "ifeval", "code"];
                        return Err(E::unknown_variant(text, &WORDS));
                    }
                };
                Ok(RewardConfig::Sum(vec![RewardTerm::of(kind)]))
            }

            fn visit_seq<A: SeqAccess<'de>>(self, terms: A) -> Result<RewardConfig, A::Error> {
                Vec::deserialize(SeqAccessDeserializer::new(terms)).map(RewardConfig::Sum)
            }
        }

        deserializer.deserialize_any(RewardVisitor)
    }
}

impl Serialize for RewardConfig {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        match self {
            Self::Exact => "exact".serialize(serializer),
            Self::Sum(terms) => terms.serialize(serializer),
        }
    }
}

/// The keys of a term.
#[derive(Clone, Copy, Deserialize)]
#[serde(field_identifier, rename_all = "snake_case")]
enum Key {
    Exact,
    Math,
    Choice,
    Countdown,
    Regex,
    Ifeval,
    Code,
    Judge,
    Model,
    Remote,
    Python,
    Environment,
    Length,
    Repetition,
    Weight,
    Domains,
    MaxErrorRate,
}

impl<'de> Deserialize<'de> for RewardTerm {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        struct TermVisitor;

        impl<'de> Visitor<'de> for TermVisitor {
            type Value = RewardTerm;

            fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str("a mapping with a reward, such as {math: {}, weight: 1.0}")
            }

            fn visit_map<A: MapAccess<'de>>(self, mut entries: A) -> Result<RewardTerm, A::Error> {
                let mut kinds = Vec::new();
                let (mut weight, mut domains, mut max_error_rate) = (1.0, Vec::new(), 0.0);
                while let Some(key) = entries.next_key()? {
                    match key {
                        Key::Exact => kinds.push(RewardKind::Exact(entries.next_value()?)),
                        Key::Math => kinds.push(RewardKind::Math(entries.next_value()?)),
                        Key::Choice => kinds.push(RewardKind::Choice(entries.next_value()?)),
                        Key::Countdown => kinds.push(RewardKind::Countdown(entries.next_value()?)),
                        Key::Regex => kinds.push(RewardKind::Regex(entries.next_value()?)),
                        Key::Ifeval => kinds.push(RewardKind::Ifeval(entries.next_value()?)),
                        Key::Code => kinds.push(RewardKind::Code(entries.next_value()?)),
                        Key::Judge => kinds.push(RewardKind::Judge(entries.next_value()?)),
                        Key::Model => kinds.push(RewardKind::Model(entries.next_value()?)),
                        Key::Remote => kinds.push(RewardKind::Remote(entries.next_value()?)),
                        Key::Python => kinds.push(RewardKind::Python(entries.next_value()?)),
                        Key::Environment => kinds.push(RewardKind::Environment(entries.next_value()?)),
                        Key::Length => kinds.push(RewardKind::Length(entries.next_value()?)),
                        Key::Repetition => kinds.push(RewardKind::Repetition(entries.next_value()?)),
                        Key::Weight => weight = entries.next_value()?,
                        Key::Domains => domains = entries.next_value()?,
                        Key::MaxErrorRate => max_error_rate = entries.next_value()?,
                    }
                }
                Ok(RewardTerm { kind: only(kinds)?, weight, domains, max_error_rate })
            }
        }

        deserializer.deserialize_map(TermVisitor)
    }
}

/// Returns the only reward that a term names.
pub(super) fn only<K, E: de::Error>(mut kinds: Vec<K>) -> Result<K, E> {
    let count = kinds.len();
    match kinds.pop() {
        Some(kind) if count == 1 => Ok(kind),
        _ => Err(E::invalid_length(count, &"exactly one reward in a term")),
    }
}

impl Serialize for RewardTerm {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        let mut map = serializer.serialize_map(Some(4))?;
        match &self.kind {
            RewardKind::Exact(config) => map.serialize_entry("exact", config)?,
            RewardKind::Math(config) => map.serialize_entry("math", config)?,
            RewardKind::Choice(config) => map.serialize_entry("choice", config)?,
            RewardKind::Countdown(config) => map.serialize_entry("countdown", config)?,
            RewardKind::Regex(config) => map.serialize_entry("regex", config)?,
            RewardKind::Ifeval(config) => map.serialize_entry("ifeval", config)?,
            RewardKind::Code(config) => map.serialize_entry("code", config)?,
            RewardKind::Judge(config) => map.serialize_entry("judge", config)?,
            RewardKind::Model(config) => map.serialize_entry("model", config)?,
            RewardKind::Remote(config) => map.serialize_entry("remote", config)?,
            RewardKind::Python(config) => map.serialize_entry("python", config)?,
            RewardKind::Environment(config) => map.serialize_entry("environment", config)?,
            RewardKind::Length(config) => map.serialize_entry("length", config)?,
            RewardKind::Repetition(config) => map.serialize_entry("repetition", config)?,
        }
        map.serialize_entry("weight", &self.weight)?;
        map.serialize_entry("domains", &self.domains)?;
        map.serialize_entry("max_error_rate", &self.max_error_rate)?;
        map.end()
    }
}

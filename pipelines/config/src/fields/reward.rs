//! The fields of rewards.

use std::fmt;
use std::path::PathBuf;

use serde::de::value::SeqAccessDeserializer;
use serde::de::{self, MapAccess, SeqAccess, Visitor};
use serde::ser::SerializeMap;
use serde::{Deserialize, Deserializer, Serialize, Serializer};

use super::endpoint::{CodeConfig, JudgeConfig};
use super::image_reward::ImageForm;
use super::reward_model::RewardModelConfig;
use super::schema::PipelineConfig;
use crate::document::Section;

/// What a completion earns: a word, or a list of terms whose weighted sum it is.
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
    /// A list, at least one; evaluation measures the first term that is for a record, the others shape the training.
    Sum(Vec<RewardTerm>),
}

impl RewardConfig {
    /// Whether right completions, of any domain, are about as long as the records' answers.
    pub fn wants_answers(&self) -> bool {
        match self {
            Self::Exact => true,
            Self::Sum(terms) => terms.iter().any(|term| term.domains.is_empty() && term.kind.wants_answer()),
        }
    }

    /// Its reward models.
    pub fn models(&self) -> impl Iterator<Item = &RewardModelConfig> {
        self.numbered_models().map(|(_, model)| model)
    }

    /// Its reward models, each with its term's number.
    pub fn numbered_models(&self) -> impl Iterator<Item = (usize, &RewardModelConfig)> {
        self.terms().iter().enumerate().filter_map(|(index, term)| match &term.kind {
            RewardKind::Model(model) => Some((index, model)),
            _ => None,
        })
    }

    /// Its reward models, to be changed.
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
    /// What completions earn, if they earn something.
    pub fn reward(&self) -> Option<&RewardConfig> {
        if let Self::Rlvr(rlvr) = self { Some(&rlvr.reward) } else { None }
    }

    /// The same, to be changed.
    pub fn reward_mut(&mut self) -> Option<&mut RewardConfig> {
        if let Self::Rlvr(rlvr) = self { Some(&mut rlvr.reward) } else { None }
    }
}

/// A reward of a sum: its name with its fields, and beside it what follows.
#[derive(Clone, Debug, PartialEq)]
pub struct RewardTerm {
    /// Which, the only key of its own: `math: {}`.
    pub kind: RewardKind,
    /// What its score is multiplied by; negative for a reward that is to be avoided. Default 1.
    pub weight: f64,
    /// Only records of these domains have it; an empty list is for all. Default: all.
    pub domains: Vec<String>,
    /// The share of a step's completions that it may fail on, 0 to 1; above it the run ends with the error. A completion
    /// on which a term fails is not trained on, and counted. Default 0.
    pub max_error_rate: f64,
}

impl RewardTerm {
    /// A term with nothing said beside its reward.
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
    /// What another model says of it.
    Judge(JudgeConfig),
    /// The score of a reward model in a folder.
    Model(RewardModelConfig),
    /// What a function of the user's says of it.
    Python(PythonConfig),
    /// What the environment gave for the turns, summed.
    Environment(NoFields),
    /// From 0 down to -1 as a completion comes close to the longest length (DAPO).
    Length(LengthConfig),
    /// Minus the share of repeated n-grams.
    Repetition(RepetitionConfig),
}

impl RewardKind {
    /// Its name in YAML, if it compares with a record's answer.
    pub fn compares(&self) -> Option<&'static str> {
        match self {
            Self::Exact(_) => Some("exact"),
            Self::Math(_) => Some("math"),
            Self::Choice(_) => Some("choice"),
            Self::Countdown(_) => Some("countdown"),
            Self::Code(_) => Some("code"),
            Self::Regex(_)
            | Self::Ifeval(_)
            | Self::Judge(_)
            | Self::Model(_)
            | Self::Python(_)
            | Self::Environment(_)
            | Self::Length(_)
            | Self::Repetition(_) => None,
        }
    }

    /// Whether a right completion is about as long as the record's answer, which for others may be a solution, or tests.
    fn wants_answer(&self) -> bool {
        matches!(self, Self::Exact(_) | Self::Countdown(_))
    }
}

/// `{}`.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Deserialize, Serialize)]
#[serde(deny_unknown_fields)]
pub struct NoFields {}

/// How answers are compared as mathematics.
#[derive(Clone, Copy, Debug, PartialEq, Deserialize, Serialize)]
#[serde(deny_unknown_fields)]
pub struct MathConfig {
    /// Where the gold answer is a decimal number: how far off a number may be, relative to it, from 0 to 0.1; never
    /// more than half of its last digit. Default 1e-4.
    #[serde(default = "tolerance")]
    pub tolerance: f64,
    /// Whether only an answer in `\boxed{}` or `\fbox{}` counts. Default false.
    #[serde(default)]
    pub only_boxed: bool,
}

impl Default for MathConfig {
    fn default() -> Self {
        Self { tolerance: tolerance(), only_boxed: false }
    }
}

/// The form of a completion.
#[derive(Clone, Debug, PartialEq, Eq, Deserialize, Serialize)]
#[serde(deny_unknown_fields)]
pub struct RegexConfig {
    /// A regular expression for the whole completion, in the syntax of Rust's `regex`; a dot is any character.
    pub pattern: String,
}

/// Where the penalty for length starts and ends.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Deserialize, Serialize)]
#[serde(deny_unknown_fields)]
pub struct LengthConfig {
    /// The length, in tokens with the end token, from which the score is -1.
    pub max_tokens: usize,
    /// Tokens before it over which the score falls, at most `max_tokens`.
    pub buffer_tokens: usize,
}

/// What counts as repeated.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Deserialize, Serialize)]
#[serde(deny_unknown_fields)]
pub struct RepetitionConfig {
    /// Words of an n-gram. Default 3.
    #[serde(default = "three")]
    pub ngram_words: usize,
}

/// What counts where there are several things to get right.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Deserialize, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum Credit {
    /// 1 if all are right, else 0.
    #[default]
    All,
    /// The share that is right.
    Share,
}

/// How instructions count.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Deserialize, Serialize)]
#[serde(deny_unknown_fields, default)]
pub struct IfevalConfig {
    /// Default `all`.
    pub credit: Credit,
}

/// A function in a file of the user's.
#[derive(Clone, Debug, PartialEq, Deserialize, Serialize)]
#[serde(deny_unknown_fields)]
pub struct PythonConfig {
    /// The file; a relative path starts at the current folder.
    pub path: PathBuf,
    /// The function's name in it.
    pub function: String,
    /// How it is called. Default `trl`.
    #[serde(default)]
    pub signature: Signature,
    /// The interpreter, in whose environment the function's imports are. Default `python3`.
    #[serde(default = "python3")]
    pub python: String,
    /// Seconds for a completion, after which its process is ended. Default 30.
    #[serde(default = "half_minute")]
    pub timeout_s: f64,
    /// Seconds for loading the file. Default 120.
    #[serde(default = "two_minutes")]
    pub start_timeout_s: f64,
    /// How it gets images, if it is of images. Default `png`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub images: Option<ImageForm>,
}

/// How a user's function is called; a column that it has no parameter for is left out.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Deserialize, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum Signature {
    /// TRL's: `f(prompts, completions, answer, **columns)` with lists of one, to a list of one number.
    #[default]
    Trl,
    /// verl's: `f(data_source, solution_str, ground_truth, extra_info)`, to a number or a dict with `score`.
    Verl,
    /// OpenRLHF's: `f(queries, prompts, labels)` with lists of one, a query the prompt with the completion behind it; to a list or
    /// tensor of one number, or a dict with such `rewards`.
    Openrlhf,
}

impl Signature {
    /// Its name in YAML.
    pub fn name(self) -> &'static str {
        match self {
            Self::Trl => "trl",
            Self::Verl => "verl",
            Self::Openrlhf => "openrlhf",
        }
    }
}

impl RewardConfig {
    /// Its terms; none for `exact` alone.
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
    /// Whether it is what the environment gives.
    pub(super) fn is_of_environment(&self) -> bool {
        matches!(self.kind, RewardKind::Environment(_))
    }
}

/// Reports what cannot be, of what stands beside every reward of a sum.
pub(super) fn validate_term(at: &Section, weight: f64, max_error_rate: f64) {
    at.number("weight", weight, weight != 0.0, "other than 0");
    let holds = (0.0..=1.0).contains(&max_error_rate);
    at.number("max_error_rate", max_error_rate, holds, "from 0 to 1");
}

impl RewardKind {
    /// Reports what cannot be. `at` is the term.
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
                f.write_str("a reward that needs no field, such as `math`, or a list such as [{math: {}, weight: 1.0}]")
            }

            fn visit_str<E: de::Error>(self, text: &str) -> Result<RewardConfig, E> {
                let kind = match text {
                    "exact" => return Ok(RewardConfig::Exact),
                    "math" => RewardKind::Math(MathConfig::default()),
                    "choice" => RewardKind::Choice(NoFields {}),
                    "countdown" => RewardKind::Countdown(NoFields {}),
                    "ifeval" => RewardKind::Ifeval(IfevalConfig::default()),
                    "code" => RewardKind::Code(CodeConfig::default()),
                    // Others need fields, which a list has room for.
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

/// The one reward that a term names.
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

//! The fields of rewards.

use std::fmt;

use serde::de::{self, MapAccess, SeqAccess, Visitor};
use serde::ser::SerializeMap;
use serde::{Deserialize, Deserializer, Serialize, Serializer};

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
    /// `random`, the control: coin flips with the mean that `exact` has in the same step. Nothing is to be learnt.
    Random,
    /// A list, at least one; evaluation measures its first term alone, the others shape the training.
    Sum(Vec<RewardTerm>),
}

/// A reward of a sum: its name with its fields, and beside it what follows.
#[derive(Clone, Debug, PartialEq)]
pub struct RewardTerm {
    /// Which, the only key of its own: `math: {}`.
    pub kind: RewardKind,
    /// What its score is multiplied by; negative for a reward that is to be avoided. Default 1.
    pub weight: f64,
    /// What happens when it cannot score a sample. Default `stop`.
    pub on_error: OnError,
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
    /// 1 for a finished completion that a pattern matches as a whole, else 0.
    Regex(RegexConfig),
    /// From 0 down to -1 as a completion comes close to the longest length (DAPO).
    Length(LengthConfig),
    /// Minus the share of repeated n-grams.
    Repetition(RepetitionConfig),
}

/// What happens when a reward fails. It never counts as a score.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Deserialize, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum OnError {
    /// The run ends with the error.
    #[default]
    Stop,
    /// The sample has its group's mean, so an advantage of 0 within the group; it is warned of and counted in `reward/errors`; evaluation stops all the same.
    Drop,
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

fn tolerance() -> f64 {
    1e-4
}

fn three() -> usize {
    3
}

impl<'de> Deserialize<'de> for RewardConfig {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        struct RewardVisitor;

        impl<'de> Visitor<'de> for RewardVisitor {
            type Value = RewardConfig;

            fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str("`exact`, `random`, or a list such as [{math: {}, weight: 1.0}]")
            }

            fn visit_str<E: de::Error>(self, text: &str) -> Result<RewardConfig, E> {
                match text {
                    "exact" => Ok(RewardConfig::Exact),
                    "random" => Ok(RewardConfig::Random),
                    _ => Err(E::unknown_variant(text, &["exact", "random"])),
                }
            }

            fn visit_seq<A: SeqAccess<'de>>(self, mut items: A) -> Result<RewardConfig, A::Error> {
                let mut terms = Vec::new();
                while let Some(term) = items.next_element()? {
                    terms.push(term);
                }
                Ok(RewardConfig::Sum(terms))
            }
        }

        deserializer.deserialize_any(RewardVisitor)
    }
}

impl Serialize for RewardConfig {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        match self {
            Self::Exact => "exact".serialize(serializer),
            Self::Random => "random".serialize(serializer),
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
    Regex,
    Length,
    Repetition,
    Weight,
    OnError,
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
                let (mut weight, mut on_error) = (1.0, OnError::Stop);
                while let Some(key) = entries.next_key()? {
                    match key {
                        Key::Exact => kinds.push(RewardKind::Exact(entries.next_value()?)),
                        Key::Math => kinds.push(RewardKind::Math(entries.next_value()?)),
                        Key::Choice => kinds.push(RewardKind::Choice(entries.next_value()?)),
                        Key::Regex => kinds.push(RewardKind::Regex(entries.next_value()?)),
                        Key::Length => kinds.push(RewardKind::Length(entries.next_value()?)),
                        Key::Repetition => kinds.push(RewardKind::Repetition(entries.next_value()?)),
                        Key::Weight => weight = entries.next_value()?,
                        Key::OnError => on_error = entries.next_value()?,
                    }
                }
                let count = kinds.len();
                match kinds.pop() {
                    Some(kind) if count == 1 => Ok(RewardTerm { kind, weight, on_error }),
                    _ => Err(de::Error::invalid_length(count, &"exactly one reward in a term")),
                }
            }
        }

        deserializer.deserialize_map(TermVisitor)
    }
}

impl Serialize for RewardTerm {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        let mut map = serializer.serialize_map(Some(3))?;
        match &self.kind {
            RewardKind::Exact(config) => map.serialize_entry("exact", config)?,
            RewardKind::Math(config) => map.serialize_entry("math", config)?,
            RewardKind::Choice(config) => map.serialize_entry("choice", config)?,
            RewardKind::Regex(config) => map.serialize_entry("regex", config)?,
            RewardKind::Length(config) => map.serialize_entry("length", config)?,
            RewardKind::Repetition(config) => map.serialize_entry("repetition", config)?,
        }
        map.serialize_entry("weight", &self.weight)?;
        map.serialize_entry("on_error", &self.on_error)?;
        map.end()
    }
}

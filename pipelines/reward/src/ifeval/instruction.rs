//! Instructions and their checks. Each check follows the published checker, except for its errors, which [`Rules`] may
//! keep. Differences from the libraries that it uses are documented in `words`.

use std::sync::LazyLock;

use regex::{Regex, RegexBuilder};
use serde_json::{Map, Value};

use super::edges::{begins_with, has_word};
use super::words::{
    capital_words, is_english, is_language, is_lower, is_upper, known_language, sentences, words,
};

/// An instruction with its arguments.
#[derive(Clone, Debug, PartialEq)]
pub(super) enum Instruction {
    Keywords(Vec<String>),
    KeywordFrequency { keyword: String, bound: Bound },
    ForbiddenWords(Vec<String>),
    LetterFrequency { letter: String, bound: Bound },
    Language(String),
    Sentences(Bound),
    Paragraphs(usize),
    Words(Bound),
    FirstWord { paragraphs: usize, nth: usize, first_word: String },
    Placeholders(usize),
    Postscript(String),
    Bullets(usize),
    ConstrainedResponse,
    Highlights(usize),
    Sections { marker: String, count: usize },
    Json,
    Title,
    TwoResponses,
    RepeatPrompt(String),
    EndPhrase(String),
    CapitalWords(Bound),
    AllCapital,
    AllLowercase,
    NoComma,
    Quotation,
}

/// Treatment of texts that the published checker judges wrongly.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Rules {
    /// The right verdict.
    Corrected,
    /// The published checker's verdict.
    Published,
}

/// Bound of a count.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Bound {
    LessThan(usize),
    AtLeast(usize),
}

impl Bound {
    fn holds(self, count: usize) -> bool {
        match self {
            Self::LessThan(most) => count < most,
            Self::AtLeast(least) => count >= least,
        }
    }
}

/// Arguments of an instruction, by name.
struct Kwargs<'a>(&'a Map<String, Value>);

impl Kwargs<'_> {
    fn number(&self, name: &str) -> Result<usize, String> {
        // Tables store integers as floats if another row has none.
        let number = self.0.get(name).and_then(Value::as_f64).filter(|n| *n >= 0.0 && n.fract() == 0.0);
        number.map(|number| number as usize).ok_or_else(|| format!("it needs the number `{name}`"))
    }

    fn text(&self, name: &str) -> Result<String, String> {
        let text = self.0.get(name).and_then(Value::as_str);
        text.map(str::to_owned).ok_or_else(|| format!("it needs the text `{name}`"))
    }

    fn texts(&self, name: &str) -> Result<Vec<String>, String> {
        let list = self.0.get(name).and_then(Value::as_array);
        let texts = list.map(|list| list.iter().map(|it| it.as_str().map(str::to_owned)).collect());
        let texts: Option<Vec<String>> = texts.flatten();
        let texts = texts.ok_or_else(|| format!("it needs the list of texts `{name}`"))?;
        match texts.iter().any(|text| text.trim().is_empty()) {
            true => Err(format!("`{name}` has an empty text")),
            false => Ok(texts),
        }
    }

    fn bound(&self, relation: &str, number: &str) -> Result<Bound, String> {
        let count = self.number(number)?;
        match self.text(relation)?.as_str() {
            "less than" => Ok(Bound::LessThan(count)),
            "at least" => Ok(Bound::AtLeast(count)),
            other => Err(format!("`{relation}` is `{other}`; write `less than` or `at least`")),
        }
    }
}

impl Instruction {
    /// The instruction with the name `id` in the published data.
    pub(super) fn read(id: &str, kwargs: &Map<String, Value>) -> Result<Self, String> {
        let given = Kwargs(kwargs);
        Ok(match id {
            "keywords:existence" => Self::Keywords(given.texts("keywords")?),
            "keywords:frequency" => Self::KeywordFrequency {
                keyword: given.text("keyword")?,
                bound: given.bound("relation", "frequency")?,
            },
            "keywords:forbidden_words" => Self::ForbiddenWords(given.texts("forbidden_words")?),
            "keywords:letter_frequency" => Self::LetterFrequency {
                letter: given.text("letter")?.to_lowercase(),
                bound: given.bound("let_relation", "let_frequency")?,
            },
            "language:response_language" => Self::Language(known_language(given.text("language")?)?),
            "length_constraints:number_sentences" => {
                Self::Sentences(given.bound("relation", "num_sentences")?)
            }
            "length_constraints:number_paragraphs" => Self::Paragraphs(given.number("num_paragraphs")?),
            "length_constraints:number_words" => Self::Words(given.bound("relation", "num_words")?),
            "length_constraints:nth_paragraph_first_word" => Self::FirstWord {
                paragraphs: given.number("num_paragraphs")?,
                nth: given.number("nth_paragraph")?,
                first_word: given.text("first_word")?.to_lowercase(),
            },
            "detectable_content:number_placeholders" => Self::Placeholders(given.number("num_placeholders")?),
            "detectable_content:postscript" => Self::Postscript(given.text("postscript_marker")?),
            "detectable_format:number_bullet_lists" => Self::Bullets(given.number("num_bullets")?),
            "detectable_format:constrained_response" => Self::ConstrainedResponse,
            "detectable_format:number_highlighted_sections" => {
                Self::Highlights(given.number("num_highlights")?)
            }
            "detectable_format:multiple_sections" => Self::Sections {
                marker: given.text("section_spliter")?,
                count: given.number("num_sections")?,
            },
            "detectable_format:json_format" => Self::Json,
            "detectable_format:title" => Self::Title,
            "combination:two_responses" => Self::TwoResponses,
            "combination:repeat_prompt" => Self::RepeatPrompt(given.text("prompt_to_repeat")?),
            "startend:end_checker" => Self::EndPhrase(given.text("end_phrase")?),
            "change_case:capital_word_frequency" => {
                Self::CapitalWords(given.bound("capital_relation", "capital_frequency")?)
            }
            "change_case:english_capital" => Self::AllCapital,
            "change_case:english_lowercase" => Self::AllLowercase,
            "punctuation:no_comma" => Self::NoComma,
            "startend:quotation" => Self::Quotation,
            _ => return Err("unknown instruction".into()),
        })
    }

    /// Returns true if `text` follows the instruction.
    ///
    /// # Errors
    /// If a text of the instruction is too large for a pattern.
    pub(super) fn is_followed(&self, text: &str, rules: Rules) -> Result<bool, String> {
        let published = match rules {
            Rules::Published => self.as_published(text)?,
            Rules::Corrected => None,
        };
        published.map_or_else(|| self.is_followed_rightly(text), Ok)
    }

    fn is_followed_rightly(&self, text: &str) -> Result<bool, String> {
        Ok(match self {
            Self::Keywords(keywords) => {
                let text = text.to_lowercase();
                keywords.iter().all(|keyword| text.contains(&keyword.to_lowercase()))
            }
            Self::KeywordFrequency { keyword, bound } => {
                bound.holds(text.to_lowercase().matches(&keyword.to_lowercase()).count())
            }
            Self::ForbiddenWords(words) => {
                for word in words {
                    if has_word(text, word)? {
                        return Ok(false);
                    }
                }
                true
            }
            Self::LetterFrequency { letter, bound } => {
                bound.holds(text.to_lowercase().matches(letter).count())
            }
            Self::Language(language) => is_language(text, language),
            Self::Sentences(bound) => bound.holds(sentences(text)),
            Self::Paragraphs(count) => parts_between(text, "***") == Some(*count),
            Self::Words(bound) => bound.holds(words(text)),
            Self::FirstWord { paragraphs, nth, first_word } => {
                first_word_is(text, *paragraphs, *nth, first_word)
            }
            Self::Placeholders(count) => PLACEHOLDER.find_iter(text).count() >= *count,
            Self::Postscript(marker) => has_postscript(text, marker)?,
            Self::Bullets(count) => {
                STAR_BULLET.find_iter(text).count() + DASH_BULLET.find_iter(text).count() == *count
            }
            Self::ConstrainedResponse => {
                ["yes", "no", "maybe"].iter().any(|it| text.contains(&format!("My answer is {it}.")))
            }
            Self::Highlights(count) => highlights(text) >= *count,
            Self::Sections { marker, count } => {
                let sections = Regex::new(&format!(r"\s?{}\s?\d+\s?", regex::escape(marker)));
                sections.map_err(|error| error.to_string())?.find_iter(text).count() >= *count
            }
            Self::Json => is_json(text),
            Self::Title => {
                let titles = TITLE.find_iter(text).map(|it| it.as_str().trim_matches(['<', '>']));
                titles.into_iter().any(|title| !title.trim().is_empty())
            }
            Self::TwoResponses => two_responses(text),
            Self::RepeatPrompt(prompt) => {
                text.trim().to_lowercase().starts_with(&prompt.trim().to_lowercase())
            }
            Self::EndPhrase(phrase) => {
                text.trim().trim_matches('"').to_lowercase().ends_with(&phrase.trim().to_lowercase())
            }
            Self::CapitalWords(bound) => bound.holds(capital_words(text)),
            Self::AllCapital => is_upper(text) && is_english(text),
            Self::AllLowercase => is_lower(text) && is_english(text),
            Self::NoComma => !text.contains([',', '，', '、', '،', '﹐', '﹑']),
            Self::Quotation => {
                let text = text.trim();
                text.len() > 1 && text.starts_with('"') && text.ends_with('"')
            }
        })
    }
}

impl Instruction {
    /// The published checker's verdict, if the instruction is of a kind that it judges wrongly. It reads words as
    /// patterns, bounds them by `\b`, counts only one kind of comma, and counts blank paragraphs in the place of others.
    fn as_published(&self, text: &str) -> Result<Option<bool>, String> {
        Ok(Some(match self {
            Self::Keywords(keywords) => {
                let found: Result<Vec<bool>, String> =
                    keywords.iter().map(|it| Ok(published(it, "")?.is_match(text))).collect();
                found?.into_iter().all(|it| it)
            }
            Self::KeywordFrequency { keyword, bound } => {
                bound.holds(published(keyword, "")?.find_iter(text).count())
            }
            Self::ForbiddenWords(words) => {
                let found: Result<Vec<bool>, String> =
                    words.iter().map(|it| Ok(published(it, r"\b")?.is_match(text))).collect();
                !found?.into_iter().any(|it| it)
            }
            Self::FirstWord { paragraphs, nth, first_word } => {
                published_first_word_is(text, *paragraphs, *nth, first_word)
            }
            Self::NoComma => !text.contains(','),
            _ => return Ok(None),
        }))
    }
}

/// The pattern as which the published checker reads `word`; the word itself where it is no pattern.
fn published(word: &str, edge: &str) -> Result<Regex, String> {
    pattern(&format!("{edge}{word}{edge}"))
        .or_else(|_| pattern(&format!("{edge}{}{edge}", regex::escape(word))))
}

static PLACEHOLDER: LazyLock<Regex> = LazyLock::new(|| fixed(r"\[.*?\]"));
static STAR_BULLET: LazyLock<Regex> = LazyLock::new(|| fixed(r"(?m)^\s*\*[^*].*$"));
static DASH_BULLET: LazyLock<Regex> = LazyLock::new(|| fixed(r"(?m)^\s*-.*$"));
static HIGHLIGHT: LazyLock<Regex> = LazyLock::new(|| fixed(r"\*[^\n*]*\*"));
static STRONG_HIGHLIGHT: LazyLock<Regex> = LazyLock::new(|| fixed(r"\*\*[^\n*]*\*\*"));
static TITLE: LazyLock<Regex> = LazyLock::new(|| fixed(r"<<[^\n]+>>"));

fn fixed(pattern: &str) -> Regex {
    Regex::new(pattern).expect("a pattern of this file")
}

fn pattern(pattern: &str) -> Result<Regex, String> {
    RegexBuilder::new(pattern).case_insensitive(true).build().map_err(|error| error.to_string())
}

/// Number of parts between `separator`s, without an empty first or last part; `None` if another part is
/// empty.
fn parts_between(text: &str, separator: &str) -> Option<usize> {
    let parts: Vec<&str> = text.split(separator).collect();
    let mut count = parts.len();
    for (index, part) in parts.iter().enumerate() {
        if part.trim().is_empty() {
            if index != 0 && index + 1 != parts.len() {
                return None;
            }
            count -= 1;
        }
    }
    Some(count)
}

/// Returns true if there are `paragraphs` paragraphs and the `nth`, from 1, starts with the given lower-case
/// word. Blank lines stand between paragraphs.
fn first_word_is(text: &str, paragraphs: usize, nth: usize, first_word: &str) -> bool {
    static BLANK: LazyLock<Regex> = LazyLock::new(|| fixed(r"\r?\n[^\S\n]*\n"));
    let parts: Vec<&str> = BLANK.split(text).filter(|part| !part.trim().is_empty()).collect();
    let found = nth.checked_sub(1).and_then(|index| parts.get(index));
    parts.len() == paragraphs && found.is_some_and(|part| begins_with(part, first_word))
}

/// Returns true if there are `paragraphs` paragraphs and the `nth`, from 1, starts with the given lower-case
/// word. Blank paragraphs count for `nth` only.
fn published_first_word_is(text: &str, paragraphs: usize, nth: usize, first_word: &str) -> bool {
    let parts: Vec<&str> = text.split("\n\n").collect();
    let count = parts.iter().filter(|part| !part.trim().is_empty()).count();
    if nth == 0 || nth > count || count != paragraphs {
        return false;
    }
    let Some(word) = parts[nth - 1].split_whitespace().next() else { return false };
    let word = word.trim_start_matches('\'').trim_start_matches('"');
    let word = word.split(['.', ',', '?', '!', '\'', '"']).next().unwrap_or_default();
    word.to_lowercase() == first_word
}

fn has_postscript(text: &str, marker: &str) -> Result<bool, String> {
    let marker = match marker {
        "P.P.S" => r"p\.\s?p\.\s?s".to_owned(),
        "P.S." => r"p\.\s?s\.".to_owned(),
        other => regex::escape(other),
    };
    Ok(pattern(&marker)?.is_match(text))
}

/// Number of `*so*` and `**so**`. Text between two stars counts for both patterns, as in the published
/// checker.
fn highlights(text: &str) -> usize {
    let count = |pattern: &Regex| {
        pattern.find_iter(text).filter(|it| !it.as_str().trim_matches('*').trim().is_empty()).count()
    };
    count(&HIGHLIGHT) + count(&STRONG_HIGHLIGHT)
}

fn is_json(text: &str) -> bool {
    let mut text = text.trim();
    for fence in ["```json", "```Json", "```JSON", "```"] {
        text = text.strip_prefix(fence).unwrap_or(text);
    }
    let text = text.strip_suffix("```").unwrap_or(text);
    serde_json::from_str::<Value>(text.trim()).is_ok()
}

fn two_responses(text: &str) -> bool {
    if parts_between(text, "******") != Some(2) {
        return false;
    }
    let mut responses = text.split("******").map(str::trim).filter(|part| !part.is_empty());
    responses.next() != responses.next()
}

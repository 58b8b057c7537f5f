//! Replacements of libraries that the published checker uses: sentences and words (NLTK), languages
//! (langdetect), letter case.

use std::sync::LazyLock;

use regex::Regex;
use whatlang::{Lang, detect};

/// Number of runs of word characters, as counted by NLTK's `RegexpTokenizer(r"\w+")`.
pub(super) fn words(text: &str) -> usize {
    static WORD: LazyLock<Regex> = LazyLock::new(|| Regex::new(r"\w+").expect("a pattern of this file"));
    WORD.find_iter(text).count()
}

/// Abbreviations whose full stop does not end a sentence.
const ABBREVIATIONS: [&str; 24] = [
    "mr", "mrs", "ms", "dr", "prof", "sr", "jr", "st", "vs", "etc", "e.g", "i.e", "u.s", "u.k", "inc", "ltd",
    "co", "corp", "no", "fig", "al", "approx", "dept", "est",
];

/// Number of sentences, counted by their end marks. NLTK's Punkt learns abbreviations from a corpus; here
/// they are this list and single letters.
pub(super) fn sentences(text: &str) -> usize {
    let chars: Vec<char> = text.trim().chars().collect();
    let mut count = 0;
    let mut start = 0;
    let mut at = 0;
    while at < chars.len() {
        if !".!?…".contains(chars[at]) {
            at += 1;
            continue;
        }
        let mark = at;
        while at < chars.len() && ".!?…\"'”’)]*_".contains(chars[at]) {
            at += 1;
        }
        let ends = at == chars.len() || chars[at].is_whitespace();
        let next = chars[at..].iter().find(|c| !c.is_whitespace());
        let goes_on = next.is_some_and(|c| c.is_lowercase());
        if ends && !goes_on && (next.is_none() || !is_abbreviation(&chars[start..mark], chars[mark])) {
            count += 1;
            start = at;
        }
    }
    // The last sentence may lack an end mark.
    count + usize::from(chars[start..].iter().any(|c| c.is_alphanumeric()))
}

fn is_abbreviation(before: &[char], mark: char) -> bool {
    let word: String = before.iter().rev().take_while(|c| !c.is_whitespace()).collect();
    let word: String = word.chars().rev().filter(|c| c.is_alphanumeric() || *c == '.').collect();
    let is_initial = word.chars().count() == 1 && word.chars().all(char::is_alphabetic) && word != "I";
    mark == '.' && (is_initial || ABBREVIATIONS.contains(&word.to_lowercase().as_str()))
}

/// Number of words with at least one letter and only upper-case ones. NLTK also splits contractions: `DON'T`
/// is two tokens there.
pub(super) fn capital_words(text: &str) -> usize {
    text.split_whitespace().filter(|word| is_upper(word)).count()
}

/// Python's `str.isupper`.
pub(super) fn is_upper(text: &str) -> bool {
    text.chars().any(char::is_uppercase) && !text.chars().any(char::is_lowercase)
}

/// Python's `str.islower`.
pub(super) fn is_lower(text: &str) -> bool {
    text.chars().any(char::is_lowercase) && !text.chars().any(char::is_uppercase)
}

/// Languages of the published data that can be detected, by their code there.
const LANGUAGES: [(&str, Lang); 29] = [
    ("en", Lang::Eng),
    ("es", Lang::Spa),
    ("pt", Lang::Por),
    ("ar", Lang::Ara),
    ("hi", Lang::Hin),
    ("fr", Lang::Fra),
    ("ru", Lang::Rus),
    ("de", Lang::Deu),
    ("ja", Lang::Jpn),
    ("it", Lang::Ita),
    ("bn", Lang::Ben),
    ("uk", Lang::Ukr),
    ("th", Lang::Tha),
    ("ur", Lang::Urd),
    ("ta", Lang::Tam),
    ("te", Lang::Tel),
    ("bg", Lang::Bul),
    ("ko", Lang::Kor),
    ("pl", Lang::Pol),
    ("he", Lang::Heb),
    ("fa", Lang::Pes),
    ("vi", Lang::Vie),
    ("ne", Lang::Nep),
    ("kn", Lang::Kan),
    ("mr", Lang::Mar),
    ("gu", Lang::Guj),
    ("pa", Lang::Pan),
    ("ml", Lang::Mal),
    ("fi", Lang::Fin),
];

/// The code, if its language can be detected.
pub(super) fn known_language(code: String) -> Result<String, String> {
    match LANGUAGES.iter().any(|(known, _)| *known == code) {
        true => Ok(code),
        false => Err(format!("the language `{code}` cannot be detected here")),
    }
}

/// Returns true if `text` is in the language `code`. A text without letters is in any, as in the published
/// checker.
pub(super) fn is_language(text: &str, code: &str) -> bool {
    let Some(found) = detect(text) else { return true };
    LANGUAGES.iter().any(|(known, language)| *known == code && *language == found.lang())
}

/// Returns true if `text` is English. It is lowercased, since most letter sequences in upper case are unknown
/// to the detector.
pub(super) fn is_english(text: &str) -> bool {
    is_language(&text.to_lowercase(), "en")
}

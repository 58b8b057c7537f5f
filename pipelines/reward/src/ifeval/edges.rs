//! Edges of words, for words with symbols (`C++`, `.NET`) and for scripts without spaces between words.

use std::sync::LazyLock;

use regex::{Regex, RegexBuilder};

/// Returns true if `text` has `word` as a word of its own, in any case.
///
/// # Errors
/// If the word is too long for a pattern.
pub(super) fn has_word(text: &str, word: &str) -> Result<bool, String> {
    let word = word.trim();
    let pattern = RegexBuilder::new(&regex::escape(word)).case_insensitive(true).build();
    let pattern = pattern.map_err(|error| error.to_string())?;
    let mut from = 0;
    while let Some(found) = pattern.find_at(text, from) {
        let before = text[..found.start()].chars().next_back();
        if starts_after(before, found.as_str()) && ends_before(found.as_str(), &text[found.end()..]) {
            return Ok(true);
        }
        // Occurrences may overlap.
        let Some(first) = text[found.start()..].chars().next() else { break };
        from = found.start() + first.len_utf8();
    }
    Ok(false)
}

/// Returns true if `paragraph` begins with `word`, which is in lower case. Quotes and marks before it do not count.
pub(super) fn begins_with(paragraph: &str, word: &str) -> bool {
    let paragraph = paragraph.trim().to_lowercase();
    let unmarked = paragraph.trim_start_matches(|it: char| !is_of_word(it));
    [paragraph.as_str(), unmarked]
        .iter()
        .any(|text| text.strip_prefix(word.trim()).is_some_and(|rest| is_whole(word.trim(), rest)))
}

/// Returns true if a paragraph's first word is `word` and not a longer one, such as `well-known` for `well`.
fn is_whole(word: &str, rest: &str) -> bool {
    let goes_on = |it: char| is_of_word(it) || "-+#&@/".contains(it);
    ends_before(word, rest) && (ends_anywhere(word) || !rest.chars().next().is_some_and(goes_on))
}

/// Returns true if `word` may start after the character `before`. A symbol starts a word anywhere.
fn starts_after(before: Option<char>, word: &str) -> bool {
    let first = word.chars().next();
    let is_bound = |it: char| is_of_word(it) && !is_unspaced(it);
    !(first.is_some_and(is_bound) && before.is_some_and(is_bound))
}

/// Returns true if `word` may end before `rest`. A symbol ends a word anywhere, and Korean adds particles to it.
fn ends_before(word: &str, rest: &str) -> bool {
    let is_bound = |it: char| is_of_word(it) && !is_unspaced(it);
    let next = rest.chars().next();
    ends_anywhere(word) || !next.is_some_and(is_bound) || is_hangul(word.chars().next_back())
}

/// Returns true if the last character of `word` is a symbol, or of a script without spaces.
fn ends_anywhere(word: &str) -> bool {
    word.chars().next_back().is_none_or(|it| !is_of_word(it) || is_unspaced(it))
}

fn is_of_word(it: char) -> bool {
    static WORD: LazyLock<Regex> = LazyLock::new(|| class(r"\w"));
    matches(&WORD, it)
}

/// Returns true for scripts that write words without spaces between them.
fn is_unspaced(it: char) -> bool {
    static UNSPACED: LazyLock<Regex> = LazyLock::new(|| {
        class(
            r"[\p{scx=Han}\p{scx=Hiragana}\p{scx=Katakana}\p{scx=Bopomofo}\p{Yi}\p{Thai}\p{Lao}\p{Khmer}\p{scx=Myanmar}\p{Tibetan}\p{Javanese}\p{Balinese}\p{Tai_Le}\p{New_Tai_Lue}\p{Tai_Tham}]",
        )
    });
    !it.is_ascii() && matches(&UNSPACED, it)
}

fn is_hangul(it: Option<char>) -> bool {
    static HANGUL: LazyLock<Regex> = LazyLock::new(|| class(r"\p{Hangul}"));
    it.is_some_and(|it| matches(&HANGUL, it))
}

fn class(pattern: &str) -> Regex {
    Regex::new(pattern).expect("a pattern of this file")
}

fn matches(class: &Regex, it: char) -> bool {
    class.is_match(it.encode_utf8(&mut [0; 4]))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn words_are_found_where_they_stand_alone() {
        for (text, word, found) in [
            ("I write C++ daily.", "C++", true),
            ("c++11 and C", "C++", true),
            ("C and C+", "C++", false),
            ("We use .NET here", ".net", true),
            ("ASP.NET", ".NET", true),
            ("the internet.", ".NET", false),
            ("C# is fine", "c#", true),
            ("abc# is fine", "C#", false),
            ("(100%)", "100%", true),
            ("2100%", "100%", false),
            ("Node.js!", "node.js", true),
            ("Nodexjs", "node.js", false),
            ("@home", "@home", true),
            ("concatenate", "cat", false),
            ("concat cat", "cat", true),
            ("the cat's tail", "cat", true),
            ("New York", "new york", true),
            ("今天天气很好", "天气", true),
            ("今天天很好", "天气", false),
            ("使用Python编程", "python", true),
            ("使用CPython编程", "python", false),
            ("東京に行きました", "東京", true),
            ("スーパーで買う", "スーパー", true),
            ("วันนี้อากาศดี", "อากาศ", true),
            ("오늘 날씨가 좋다", "날씨", true),
            ("हिन्दी में कार है", "कार", true),
            ("यह सरकार है", "कार", false),
            ("Straße", "stra", false),
            ("naïve", "na", false),
            ("a+b+a+b", "+b+", true),
        ] {
            assert_eq!(has_word(text, word).unwrap(), found, "{text:?} {word:?}");
        }
    }

    #[test]
    fn a_first_word_may_have_marks_around() {
        for (text, word, begins) in [
            ("Weather is fine", "weather", true),
            ("\"Weather,\" he said", "weather", true),
            ("**Weather** is", "weather", true),
            ("“Weather” is", "weather", true),
            ("# Weather", "weather", true),
            ("Weather's", "weather", true),
            ("It's me", "it's", true),
            ("It's me", "it", true),
            ("Weatherman", "weather", false),
            ("Well-known", "well", false),
            ("The weather", "weather", false),
            (".NET is", ".net", true),
            ("C++ is", "c++", true),
            ("C++ is", "c", false),
            ("今天天气很好", "今天", true),
            ("天气今天很好", "今天", false),
        ] {
            assert_eq!(begins_with(text, word), begins, "{text:?} {word:?}");
        }
    }
}

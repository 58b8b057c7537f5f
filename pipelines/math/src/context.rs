//! Context of an answer: detects surrounding text that changes or negates it.
//!
//! A policy is rewarded for what is accepted here, and it exploits gaps: `5` in `not 5`, `-$5$`, `$5$%`,
//! `10 - 5`, `4 or 5` and `is it 5?` is not an answer. In doubt an answer is rejected: in a box it would count.

use std::sync::LazyLock;

use regex::Regex;

use super::foreign::{is_foreign_letter, is_mark, is_percent, negates_after, negates_before, scale_of};
use super::unit::changes_number;

/// Returns true if neither `before` nor `after` changes the answer between them. An answer that `is_rounded`
/// may follow "about".
pub(super) fn is_neutral(before: &str, after: &str, is_rounded: bool) -> bool {
    let last = last_chars(before);
    let is_about = !is_rounded && ABOUT.is_match(last);
    let is_item = is_dash(before.trim());
    let is_one_of_several = is_part_of_formula(last) || is_compared(last) || is_another_value(last);
    let is_foreign = negates_before(before) || negates_after(after);
    !(is_about || is_item || is_one_of_several || is_foreign || is_negated(before) || is_continued(after))
}

/// Returns true if `before` ends with a mark that strikes the text behind it out.
pub(super) fn is_struck(before: &str) -> bool {
    static STRUCK: LazyLock<Regex> =
        LazyLock::new(|| pattern(r"(?:~~|<(?:s|del|strike)>|\\(?:[bx]?cancel|sout|st)\s*\{)[\s$*]*$"));
    STRUCK.is_match(last_chars(before))
}

/// Returns true if `after` starts with words of LaTeX that change the answer: `\text{ or more}`.
pub(super) fn is_followed_by_words(after: &str) -> bool {
    static WORDS: LazyLock<Regex> = LazyLock::new(|| {
        pattern(
            r"^(?:\s|\\[,;:! ]|\\q?quad|~)*\\(?:text|textrm|textnormal|textbf|textit|mathrm|mbox|hbox)\s*\{([^{}]*)\}",
        )
    });
    let found = WORDS.captures(after).and_then(|found| found.get(1));
    found.is_some_and(|words| {
        let text = format!(" {}", words.as_str().trim());
        is_continued(&text) || negates_after(&text) || hedges(&text)
    })
}

/// `after` without the modulus of a congruence at its start: ` \pmod 7`.
pub(super) fn without_modulus(after: &str) -> &str {
    static MODULUS: LazyLock<Regex> = LazyLock::new(|| {
        let number = r"(?:\{[^{}]{1,20}\}|[0-9]+|[a-z])";
        let name = r"(?:\\bmod|\\mathrm\{mod\}|\\text\{\s*mod\s*\}|mod)";
        pattern(&format!(r"^(?:\s|\$|\\[,;:! ]|\\q?quad)*(?:\\[pb]?mod\s*{number}|\({name}\s*{number}\))"))
    });
    MODULUS.find(after).map_or(after, |found| &after[found.end()..])
}

/// Returns true for a letter or digit that a number behind it would be a part of: not in scripts without spaces.
pub(super) fn is_joining_letter(c: char) -> bool {
    c.is_alphanumeric() && !(is_foreign_letter(c) || is_mark(c))
}

/// Returns true if words before a formula say that it is not the answer, or not all of it: `not`, `at least`,
/// `either`.
pub(super) fn hedges(before: &str) -> bool {
    static HEDGE: LazyLock<Regex> = LazyLock::new(|| {
        let words = r"at\s+(?:least|most)|between|either|fewer|greater|larger|less|more";
        pattern(&format!(r"(?i:\b(?:{words}|neither|not|one\s+of|smaller|than)\b|n['’]t\b)"))
    });
    HEDGE.is_match(before)
}

/// Returns true if the last clause of `before` negates the text after it, or makes it a supposition.
pub(super) fn is_negated(before: &str) -> bool {
    static CLAUSE: LazyLock<Regex> = LazyLock::new(|| {
        let words = "but|hence|so|then|therefore|thus";
        // The number that is denied is another one: `not 10 but 5`, `not 10, it is 5`.
        let other = r"not\s+[$]?[0-9][0-9.,]*%?\s+(?:(?:which|that)\s+is|it['’]s|it\s+is)";
        pattern(&format!(r"[.;:?!]\s|[,\n]|=|\b(?i:{words}|{other})\b"))
    });
    static NEGATION: LazyLock<Regex> = LazyLock::new(|| {
        let denied = r"cannot|except|excluding|instead|neither|never|no|none|nor|not|unlike|without";
        let supposed = r"assum(?:e|ing)|if|let|suppos(?:e|ing)|unless|whether|wrong";
        let guessed = format!(r"hardly|{GUESSED}|(?:I|my|we)(?:['’]d|\s+would)?\s+(?:doubt|guess|hope)");
        pattern(&format!(r"(?i:\b(?:{denied}|{supposed}|{guessed})\b|n['’]t\b)"))
    });
    const MOST_CHARS: usize = 120;
    let last = last_of(before, MOST_CHARS);
    let clause = CLAUSE.find_iter(last).last().map_or(last, |end| &last[end.end()..]);
    // `Let x = 5` gives no answer, but `y = 5` in `if x = 2, y = 5` does.
    let supposed = last.trim_end().ends_with('=') && LET.is_match(last);
    supposed || NEGATION.is_match(clause) || MAY_BE.is_match(clause)
}

/// Words that turn text near them into a guess.
const GUESSED: &str = "maybe|perhaps|possibly|presumably|probably";

/// Words that turn only the text directly after them into a guess: `the most that he could have is 5` is an
/// answer.
static MAY_BE: LazyLock<Regex> = LazyLock::new(|| {
    let may = r"(?:can|could|may|might)\s+(?:also\s+|well\s+)?be|(?:un)?likely|say";
    pattern(&format!(r"(?i:\b(?:{may}))[\s$*(]*$"))
});

/// `let x =` at the end of a text.
static LET: LazyLock<Regex> = LazyLock::new(|| {
    let words = r"assume|hope|(?:false|impossible|incorrect|not|untrue|wrong)\s+that|if|let|suppose|whether";
    pattern(&format!(r"(?i:\b(?:{words}))\s+(?:that\s+)?[\s$*]*\p{{L}}[\p{{L}}\p{{N}}_]*\s*=\s*$"))
});

/// Number of bytes at the start of `text`, which follows a number, that are words changing the number, such
/// as ` hundred thousand` or ` percent`, including formula or bold marks before them.
pub(super) fn words_of_number(text: &str) -> usize {
    let mut rest = text;
    loop {
        let word = rest
            .trim_start_matches(|c: char| c.is_whitespace() || [')', ']', '$', '*', '\\', '}'].contains(&c));
        let word = word.strip_prefix("text{").unwrap_or(word).trim_start();
        let length = match word.starts_with('%') {
            true => 1,
            false => scale_of(word).map_or_else(
                || word.chars().take_while(|c| c.is_alphabetic() || is_mark(*c)).map(char::len_utf8).sum(),
                |(length, _)| length,
            ),
        };
        let name = word[..length].to_lowercase();
        if !changes_number(&name) && !["%", "percent"].contains(&&*name) && !is_percent(&name) {
            return text.len() - rest.len();
        }
        rest = &word[length..];
    }
}

/// Words that only a decimal may follow.
static ABOUT: LazyLock<Regex> = LazyLock::new(|| {
    let words = r"about|almost|approximately|approx\.?|around|circa|nearly|roughly";
    pattern(&format!(r"(?:\b(?i:{words})\s+(?i:equal\s+to\s+)?|[~≈]|\\(?:approx|sim)\b)[\s$*(]*$"))
});

/// Returns true if `before` makes the text after it an exponent, an index, an argument, an operand or an item
/// of a list, or ends in a separate sign.
fn is_part_of_formula(before: &str) -> bool {
    static PART: LazyLock<Regex> = LazyLock::new(|| {
        // Two stars after a number or variable are a power, otherwise they open bold text.
        let power = r"(?:[\p{N})]|\b\p{L})(?:\*\*| \*\* )";
        let sign = r"(?:±|\\(?:pm|mp)\b|\+/-)[\s$*(]*|[-−–—‐‑⁻﹣－][$*(|\[]*|−\s+|(?:=|\bis|:)[^\S\n]*[-–—][^\S\n]+[$*]*";
        let operator = r"[\p{N})\]}$%x]\s*(?:[-+*×·⋅÷/–−^&]|\\(?:cdot|times|div|pm)\b)\s*[$*(]*|[\p{N})\]}$]\s+to\s+[$*(]*|[\p{N}](?:\s*x\s+|\s+:\s*|:)";
        let listed = r"(?:^|\n)[^\S\n]*[0-9]+[.)][^\S\n]+[$*(]*|[\p{N})][$*]*[^\S\n]*[,;]?[^\S\n]+[$*(]*|[\p{N}][,;]|[\p{N}]\$\s*\$?";
        let opened = r"[\p{L}\p{N})]\s*[(\[|]";
        let compared = r"(?:\}\s*\\(?:to|mapsto)\b|[<>≤≥≠]=?|!=|\\(?:n?eq?|[lg]eq?|[lg]t|neq))\s*\$?";
        let command = r"\\(?:sqrt|[dt]?frac|[bp]?mod)\s*(?:\[[^\]]*\])?(?:\{[^{}]*\})?\s*\{";
        let adjacent = r"[\p{N}_^√/#][${]?|[0-9]\}[$]?";
        pattern(&format!("(?:{adjacent}|{power}|{sign}|{operator}|{listed}|{opened}|{compared}|{command})$"))
    });
    let word = before.trim_end_matches([' ', '$', '*', '-']);
    let word = &word[word.rfind(|c: char| !c.is_alphabetic()).map_or(0, |at| at + char_length(word, at))..];
    PART.is_match(before) || changes_number(&word.to_ascii_lowercase())
}

/// Returns true if `before` makes the next number or formula one of several, a term of comparison, an operand
/// in words, or the number of a step: `or 5`, `than 5`, `twice 5`, `step 5`.
fn is_compared(before: &str) -> bool {
    static COMPARED: LazyLock<Regex> = LazyLock::new(|| {
        let compared = r"above|and|below|between|beyond|bigger|fewer|greater|larger|least|less|lower|more|most|nor|not|or|over|smaller|than|under|up\s+to|versus|vs\.?|(?:all|anything|everything|nothing)\s+but";
        let operators = r"base|choose|cos|(?:divided|multiplied)\s+by|double|ln|log|minus|mod(?:ulo)?|negative|plus|point|sin|sqrt|tan|times|triple|twice|\p{N}\s+by|(?:from\s+\S+|[\p{N}}$]|power|raised)\s+to(?:\s+the)?|to\s+the";
        let of = r"(?:%|percent|any|cubes?|sqrt|each|factors?|half|one|out|powers?|quarters?|roots?|some|squares?|thirds?|two|\p{N}+)\s+of";
        let related = r"(?:complement|conjugate|cosine|divisors?|inverse|logarithm|multiples?|negation|negative|opposite|reciprocal|sine|tangent)\s+of|(?:away|differs?|different|far)\s+from";
        let labels = r"case|chapter|eq(?:uation)?\.?|figure|line|no\.?|option|page|part|problem|question|round|section|step";
        let fillers = r"(?:\s+(?:a|an|be|equal|exactly|or|than|the|to))*";
        pattern(&format!(
            r"(?i:(?:^|\W)(?:{compared}|{operators}|{of}|{related}|{labels})|n['’]t){fillers}[\s$*(]+$"
        ))
    });
    COMPARED.is_match(before)
}

/// Returns true if another value of a name follows: `x = 4 or x = 5`, `x_1 = 4, x_2 = 5`.
fn is_another_value(before: &str) -> bool {
    static ANOTHER: LazyLock<Regex> = LazyLock::new(|| {
        let name = r"(\p{L}+)(?:_?\{?[0-9]+\}?)?\s*=\s*";
        pattern(&format!(
            r"{name}[-−]?[\p{{N}}.,/]+[\s$]*(?:[,;&]|and|or)[\s$]*(?:and\s|or\s)?[\s$]*{name}[-−$*(\s]*$"
        ))
    });
    ANOTHER
        .captures(before)
        .is_some_and(|names| names.get(1).map(|it| it.as_str()) == names.get(2).map(|it| it.as_str()))
}

/// Returns true if `after` changes the text before it: ` million`, `%`, ` or $6$`, `^2`, ` is wrong`, `?`.
fn is_continued(after: &str) -> bool {
    static CONTINUED: LazyLock<Regex> = LazyLock::new(|| {
        let words =
            "and|by|choose|minus|mod|of|or|out of|over|plus|times|to|versus|vs|x|(?:divided|multiplied) by";
        let between = format!(r"(?:[,;]?[\s(]*(?i:{words})\b\.?|[,;:/+*×·−–-]|\\(?:cdot|times|div|pm)\b)");
        let hedge = r"(?i:\s*\b(?:else|even|maybe|perhaps|possibly)\b)*";
        let another = format!(r"[\s*)\]]*{between}{hedge}[\s(*$]*(?:\$|\\[(\[]|\\(?:boxed|fbox)|[-−]?[0-9])");
        let adjacent =
            r"[eE]?[0-9]|\(|\s*per\s+cent|[.,][0-9]|[\^√π²³₀-₉!+_?]|(?:/?[a-zA-Z]|st|nd|rd|th)\b|/[0-9]";
        let command = r"\s*\\(?:cdot|times|div|pm|mp|sqrt|[dt]?frac|pi|[bp]?mod|binom)\b";
        // `1 million d'euros` has no factor d.
        let letter = r"\s*[(]?(?:[cdeijknpqrxyzKMBT](?:[^\p{L}\p{N}_'’]|$)|mod\b)|\s*±";
        let part = r"\s+(?:and|&)\s+(?:an?|one|two|three)\s+(?:half|third|quarter|fourth|fifth)";
        let is = r"(?:am|are|can|could|has|have|is|seems|was|would)(?:\s+be)?";
        let wrong = r"(?:clearly\s+|also\s+)?(?:false|impossible|incorrect|no\b|not|too|wrong)";
        let denied =
            format!(r"[\s,]*(?:which\s+|that\s+)?(?:{is}\s+{wrong}|(?:is|ca|could|was|wo)n['’]t)|\s*below");
        let bound = r"(?:and|or)\s+(?:above|below|fewer|greater|less|more|so|up)|at\s+(?:least|most)|plus";
        let guessed = format!(r"[^\S\n]*[,(]?[^\S\n]*(?:{bound}|{GUESSED}|I\s+guess)\b");
        let asked = r"[^.!?\n]*\?";
        pattern(&format!(
            "^(?:{another}|{adjacent}|{command}|{letter}|(?i:{part}|{denied}|{guessed})|{asked})"
        ))
    });
    let rest = after.trim_start_matches("**").trim_start_matches(['$', ')', ']', '}']);
    words_of_number(after) > 0 || CONTINUED.is_match(after) || CONTINUED.is_match(rest)
}

fn is_dash(text: &str) -> bool {
    ["-", "–", "—", "−"].contains(&text)
}

/// The end of `text`, long enough for the patterns of this file.
fn last_chars(text: &str) -> &str {
    const MOST_CHARS: usize = 40;
    last_of(text, MOST_CHARS)
}

pub(super) fn last_of(text: &str, most_chars: usize) -> &str {
    let start = text.char_indices().rev().take(most_chars).last().map_or(0, |(start, _)| start);
    &text[start..]
}

fn char_length(text: &str, at: usize) -> usize {
    text[at..].chars().next().map_or(0, char::len_utf8)
}

fn pattern(pattern: &str) -> Regex {
    Regex::new(pattern).expect("a pattern of this file")
}

//! Where in a completion the answer stands.

use std::sync::LazyLock;

use regex::Regex;

use super::expr::Expr;
use super::parse::parse;
use super::unit::changes_number;

static PHRASE: LazyLock<Regex> =
    LazyLock::new(|| Regex::new(r"(?i)answer\s*(?:is\b|:)(?:\s|:|\*)*").expect("a pattern of this file"));

/// The text that is taken for the answer. In a completion that was cut, or if `only_boxed`, nothing but a box counts.
///
/// What is inside of `<think>` is not read. Then the first of these that is there counts, and of several the last:
/// `\boxed{...}` or `\fbox{...}`; `<answer>...</answer>`, or what the following find in it; `#### ...`;
/// `... answer is ...` or `answer: ...`; a formula between dollars or in `\(...\)` or `\[...\]`; a number.
pub(super) fn extract(completion: &str, only_boxed: bool) -> Option<&str> {
    let text = completion.rsplit("</think>").next().unwrap_or(completion);
    if let Some(boxed) = last_boxed(text) {
        return Some(clean(boxed));
    }
    if only_boxed {
        return None;
    }
    let tagged = last_tagged(text);
    if let Some(whole) = tagged.map(clean).filter(|inner| parse(inner).is_some()) {
        return Some(whole);
    }
    let text = tagged.unwrap_or(text);
    let found = after_hashes(text).or_else(|| after_phrase(text)).or_else(|| last_formula(text));
    found.or_else(|| last_number(text)).map(clean).filter(|answer| !answer.is_empty())
}

/// The gold answer: what is boxed or behind `####` in a solution, else the whole text.
pub(super) fn gold(text: &str) -> &str {
    clean(last_boxed(text).or_else(|| after_hashes(text)).unwrap_or(text))
}

/// The content of the last box whose braces are balanced, in one pass.
fn last_boxed(text: &str) -> Option<&str> {
    let bytes = text.as_bytes();
    let mut open: Vec<Option<usize>> = Vec::new();
    let mut last = None;
    let mut at = 0;
    while at < bytes.len() {
        match bytes[at] {
            b'\\' if text[at..].starts_with(r"\boxed") || text[at..].starts_with(r"\fbox") => {
                at += if bytes[at + 1] == b'b' { r"\boxed".len() } else { r"\fbox".len() };
                at += text[at..].len() - text[at..].trim_start().len();
                if bytes.get(at) == Some(&b'{') {
                    at += 1;
                    open.push(Some(at));
                }
                continue;
            }
            b'\\' => at += 1,
            b'{' => open.push(None),
            b'}' => {
                if let Some(Some(start)) = open.pop() {
                    last = Some(&text[start..at]);
                }
            }
            _ => {}
        }
        at += 1;
    }
    last
}

/// The content of the last `<answer>` that is closed.
fn last_tagged(text: &str) -> Option<&str> {
    let (before, _) = text.rsplit_once("</answer>")?;
    Some(before.rsplit_once("<answer>")?.1)
}

/// GSM8K's mark. Markdown's headings look the same, so that it stands in the last line or before a bare value.
fn after_hashes(text: &str) -> Option<&str> {
    let rest = text.rsplit_once("####")?.1.trim_start();
    let line = rest.lines().next()?;
    // `#### The answer is 5` is left to the phrase.
    if PHRASE.is_match(line) {
        return None;
    }
    let is_last = rest[line.len()..].trim().is_empty();
    (is_last || is_bare_value(clean(line))).then_some(line)
}

/// Whether `text` is mathematics without a word: `2. Add the two` is none.
fn is_bare_value(text: &str) -> bool {
    parse(text).is_some_and(|answer| {
        let is_money = text.contains(['$', '€', '£']);
        (answer.unit.is_none() || is_money) && !answer.expr.any(&|part| matches!(part, Expr::Words(_)))
    })
}

/// What is said to be the answer, up to the end of the sentence or to where it is explained.
fn after_phrase(text: &str) -> Option<&str> {
    static REASON: LazyLock<Regex> = LazyLock::new(|| {
        Regex::new(r",\s+(?:as|because|hence|since|so|which)\b").expect("a pattern of this file")
    });
    let phrase = PHRASE.find_iter(text).last()?;
    let line = text[phrase.end()..].lines().next()?;
    let line = bold(phrase.as_str(), line).unwrap_or(line);
    let line = REASON.split(line).next().unwrap_or(line);
    let alone = formulas(line).next().filter(|(before, _, after)| !hedges(before) && ends_with_itself(after));
    alone.map(|(_, formula, _)| formula).or_else(|| line.split(". ").next())
}

/// Whether words before a formula say that it is not the answer, or not all of it: `not`, `at least`, `either`.
fn hedges(before: &str) -> bool {
    static HEDGE: LazyLock<Regex> = LazyLock::new(|| {
        let words = r"about|almost|approximately|at\s+(?:least|most)|between|either|fewer|greater|larger|less|more|nearly";
        let words = format!("{words}|neither|not|roughly|smaller|than");
        Regex::new(&format!(r"(?i:\b(?:{words})\b|n['’]t\b)")).expect("a pattern of this file")
    });
    HEDGE.is_match(before)
}

/// Whether what is said in a formula or in bold is not changed by the text `after` it: ` million`, ` or $6$`, ` times 2`.
fn ends_with_itself(after: &str) -> bool {
    static GOES_ON: LazyLock<Regex> = LazyLock::new(|| {
        let words = "and|by|minus|or|plus|times|to|versus|vs|(?:divided|multiplied) by";
        let between = format!(r"(?:[,;]?[\s(]*(?i:{words})\b\.?|[,;/+−–-])");
        let hedge = r"(?i:\s*\b(?:else|even|maybe|perhaps|possibly)\b)*";
        Regex::new(&format!(r"^[\s*)\]]*{between}{hedge}[\s(*]*(?:\$|\\[(\[]|[-−]?[0-9])"))
            .expect("a pattern of this file")
    });
    words_of_number(after) == 0 && !GOES_ON.is_match(after)
}

/// Whether a number or formula behind `before` is one of several, or what the answer is compared with: `or 5`, `than 5`.
fn is_compared(before: &str) -> bool {
    static COMPARED: LazyLock<Regex> = LazyLock::new(|| {
        Regex::new(r"(?i:\b(?:and|between|least|most|nor|not|or|than|versus|vs\.?)|n['’]t)[\s*(]+$")
            .expect("a pattern of this file")
    });
    COMPARED.is_match(last_chars(before))
}

/// The end of `text`, long enough for what is looked for there.
fn last_chars(text: &str) -> &str {
    const MOST_CHARS: usize = 16;
    let start = text.char_indices().rev().take(MOST_CHARS).last().map_or(0, |(start, _)| start);
    &text[start..]
}

/// What is bold in `line`, if `phrase` before it ends with the stars that open it.
fn bold<'a>(phrase: &str, line: &'a str) -> Option<&'a str> {
    let (inner, after) = line.split_once("**").filter(|_| phrase.ends_with("**"))?;
    // `2**10` is a power, and `**3** million` another number.
    let is_power = after.starts_with(|c: char| c.is_alphanumeric() || c == '(');
    (!is_power && ends_with_itself(after)).then_some(inner)
}

/// How many bytes at the start of `text`, which follows a number, are words that make it another, as
/// ` hundred thousand`, with the marks of a formula or of bold before them.
fn words_of_number(text: &str) -> usize {
    let mut rest = text;
    loop {
        let word =
            rest.trim_start_matches(|c: char| c.is_whitespace() || [')', ']', '$', '*', '\\'].contains(&c));
        let length = word.bytes().take_while(u8::is_ascii_alphabetic).count();
        if !changes_number(&word[..length].to_ascii_lowercase()) {
            return text.len() - rest.len();
        }
        rest = &word[length..];
    }
}

fn last_formula(text: &str) -> Option<&str> {
    let alone =
        formulas(text).last().filter(|(before, _, after)| !is_compared(before) && ends_with_itself(after));
    alone.map(|(_, formula, _)| formula)
}

/// All formulas between marks, in their order, each between the text before and the text behind it.
fn formulas(text: &str) -> impl Iterator<Item = (&str, &str, &str)> {
    const MARKS: [(&str, &str); 4] = [("$$", "$$"), ("$", "$"), (r"\(", r"\)"), (r"\[", r"\]")];
    let mut rest = text;
    std::iter::from_fn(move || {
        loop {
            let start = rest.find(['$', '\\'])?;
            let at = &rest[start..];
            let Some((open, close)) = MARKS.iter().find(|(open, _)| at.starts_with(open)) else {
                // A backslash and what it escapes, which may be a dollar.
                let next = at.chars().nth(1).map_or(0, char::len_utf8);
                rest = &at[1 + next..];
                continue;
            };
            let inner = &at[open.len()..];
            let end = inner.find(close)?;
            let before = &text[..text.len() - at.len()];
            rest = &inner[end + close.len()..];
            return Some((before, &inner[..end], rest));
        }
    })
}

/// The last number in prose with its sign, and the words behind it that make it another; `None` if it is a part of
/// something larger, as the 42 of `2^42` and `\sqrt{42}`.
fn last_number(text: &str) -> Option<&str> {
    const MINUS: [char; 3] = ['-', '−', '–'];
    static NUMBER: LazyLock<Regex> = LazyLock::new(|| {
        let whole = r"[0-9]+ [0-9]+/[0-9]+|(?:[0-9]+(?:,[0-9]{3})*(?:\.[0-9]+)?|\.[0-9]+)";
        Regex::new(&format!(r"[-−–]?(?:\\?[$€£])?(?:{whole}(?:[eE][-+]?[0-9]+|/[0-9]+)?)%?"))
            .expect("a pattern of this file")
    });
    let number = NUMBER.find_iter(text).last()?;
    let (before, after) = (&text[..number.start()], &text[number.end()..]);
    let end = number.end() + words_of_number(after);
    let unsigned = number.as_str().trim_start_matches(MINUS);
    let is_signed = unsigned.len() < number.len();
    // In `x-5` the minus is an operator, and in `2024-05` a hyphen.
    let is_operator = is_signed && before.ends_with(|c: char| c.is_alphanumeric() || c == ')');
    // `US$5` is no product.
    let is_money = unsigned.starts_with(['$', '€', '£', '\\']);
    let before = if is_money { before.trim_end_matches(char::is_alphabetic) } else { before };
    if continues(after) || (!is_operator && (is_begun(before) || is_compared(before))) {
        return None;
    }
    let start = if is_operator { number.end() - unsigned.len() } else { number.start() };
    Some(&text[start..end])
}

/// Whether a number behind `before` is an exponent, an index, an argument or a factor, or has a sign apart from it.
fn is_begun(before: &str) -> bool {
    static BEGUN: LazyLock<Regex> = LazyLock::new(|| {
        // Two stars behind a number or variable are a power, others open what is bold.
        let power = r"(?:[\p{N})]|\b\p{L})(?:\*\*| \*\* )";
        let sign = r"−\s+|(?:=|\bis)\s*[-–]\s+";
        Regex::new(&format!(r"(?:[\p{{L}}\p{{N}}_^{{√/]|{power}|[\p{{L}}√]\(|[0-9]:|{sign})$"))
            .expect("a pattern of this file")
    });
    BEGUN.is_match(last_chars(before))
}

/// Whether a number before `after` has a power or is a factor, as in `42x`.
fn continues(after: &str) -> bool {
    static CONTINUED: LazyLock<Regex> = LazyLock::new(|| {
        Regex::new(r"^(?:[\^√π²³]|\*\*[0-9(]|\\[A-Za-z]|/?[einxyz]\b)").expect("a pattern of this file")
    });
    CONTINUED.is_match(after)
}

/// `text` without what stands around an answer in prose: spaces, dollars, stars, the end of the sentence.
fn clean(text: &str) -> &str {
    /// Deeper wrapping is hostile.
    const MOST_LAYERS: usize = 8;
    let mut text = text.trim();
    for _ in 0..MOST_LAYERS {
        let before = text;
        for (open, close) in [("$$", "$$"), ("$", "$"), (r"\(", r"\)"), (r"\[", r"\]"), ("**", "**")] {
            let inner = text.strip_prefix(open).and_then(|text| text.strip_suffix(close));
            text = inner.filter(|inner| !inner.contains(open)).unwrap_or(text);
        }
        text = text.strip_suffix("**").unwrap_or(text);
        text = text.strip_suffix('.').unwrap_or(text).trim();
        if let Some(boxed) = last_boxed(text) {
            text = boxed;
        }
        if text == before {
            break;
        }
    }
    text
}

//! Answers in prose: after a phrase, in the last formula, or the last number.

use std::borrow::Cow;
use std::sync::LazyLock;

use regex::Regex;

use super::boxes::{Marked, formulas};
use super::chain::Chain;
use super::context::{hedges, is_joining_letter, is_negated, is_neutral, last_of, words_of_number};
use super::foreign::any_of;
use super::parse::{MOST_BYTES, parse};
use super::trim::clean;

/// Words that announce an answer, in the languages of the multilingual sets.
pub(super) static PHRASE: LazyLock<Regex> = LazyLock::new(|| {
    let english = r"answers?(?:\s+(?:for|of|to)\s+[^.:=?!\n]{1,60}?)?\s*(?:(?:is|are|should\s+be|must\s+be)(?-u:\b)|:|=)";
    let noun = any_of(
        r"respuesta réponse antwort lösung resposta risposta antwoord svaret? odpowiedź odpověď cevap đáp\s+án
          jawaban(?:nya)?",
    );
    let adjective = r"final|finale|correcta|correcte|correta|corretta|akhir|cuối\s+cùng";
    let is = r"(?:es|est|ist|lautet|é|è|is|är|er|to|je|là|adalah)\s|:";
    let latin = format!(r"(?:{noun})(?:\s+(?:{adjective}))?\s*(?:{is})");
    let other = any_of(
        r"ответ\s*[:—] 答案\s*(?:是|为|為|:) 故[选選]\s*:? 答え\s*(?:は|:) (?:정답|답)\s*(?:은|:)
          (?:الجواب|الإجابة)\s*(?:هو|هي|:) (?:उत्तर|উত্তর|คำตอบ(?:คือ)?)\s*:",
    );
    pattern(&format!(r"(?i)(?:{english}|{latin}|{other})(?:\s|:|\*)*"))
});

/// Text that is said to be the answer, up to the end of the sentence or an explanation.
pub(super) fn after_phrase(text: &str) -> Option<Cow<'_, str>> {
    static REASON: LazyLock<Regex> = LazyLock::new(|| {
        pattern(
            r",\s+(?:as|hence|so|which|(?:and\s+)?not|rather\s+than)(?-u:\b)|,?\s+(?:because|since)(?-u:\b)|[\s*]+—\s",
        )
    });
    static CONCLUSION: LazyLock<Regex> =
        LazyLock::new(|| pattern(r",\s+(?:as\s+a\s+result|hence|so)(?-u:\b)"));
    static THEREFORE: LazyLock<Regex> = LazyLock::new(|| {
        pattern(r"^(?i:therefore|thus|hence|then|simply|just|exactly|also|equal\s+to)\s+\**")
    });
    static THOUGHT: LazyLock<Regex> = LazyLock::new(|| {
        pattern(
            r"(?i)(?-u:\b)(?:might|may|would|could)\s+(?:also\s+)?(?:think|say|guess|expect|believe|assume|conclude)(?-u:\b)|(?-u:\b)mistake(?-u:\b)",
        )
    });
    let phrase = PHRASE.find_iter(text).last()?;
    let before = tail(&text[..phrase.start()]);
    let sentence = before.rfind(['.', '!', '?', '\n']).map_or(before, |at| &before[at..]);
    if THOUGHT.is_match(sentence) {
        return None;
    }
    if is_negated(&text[..phrase.start()]) || is_negated(phrase.as_str()) {
        return None;
    }
    let line = text[phrase.end()..].lines().next()?;
    let line = bold(phrase.as_str(), line).unwrap_or(line);
    let concludes = CONCLUSION.is_match(line);
    let line = REASON.split(line).next().unwrap_or(line);
    let line = THEREFORE.find(line).map_or(line, |found| &line[found.end()..]);
    if let Some(found) = in_sentence(line).filter(|_| !concludes) {
        return Some(found);
    }
    let neutral = formulas(line).next().filter(|formula| {
        let before = &line[..formula.start];
        !hedges(before) && is_neutral(before, &line[formula.end..], is_rounded(formula.content))
    });
    neutral.map(|formula| formula.content).or_else(|| line.split(". ").next()).map(Cow::Borrowed)
}

/// The only number in a sentence of words and names: `The largest $n$ is 34.`, `Jane started 3 hours ago.`
fn in_sentence(line: &str) -> Option<Cow<'_, str>> {
    static WORDS: LazyLock<Regex> =
        LazyLock::new(|| pattern(r"^[A-Z][A-Za-z'’]*(?:,?\s+(?:[A-Za-z'’-]+|\$[^$]*\$))+\s"));
    static DENIED: LazyLock<Regex> = LazyLock::new(|| {
        pattern(
            r"(?i)(?-u:\b)(?:wrong|incorrect|false|untrue|impossible|not|no|if|unless)(?-u:\b)|n['’]t(?-u:\b)|\?",
        )
    });
    static UNREAL: LazyLock<Regex> = LazyLock::new(|| {
        let words =
            "would|could|should|might|may|can|cannot|must|shall|thinks?|guess(?:es)?|believes?|claims?";
        pattern(&format!(r"(?i)(?-u:\b)(?:{words})(?-u:\b)"))
    });
    // `division by 7`, `the sum of 7`, `in line 7`.
    static OPERAND: LazyLock<Regex> = LazyLock::new(|| {
        let words = "of|by|with|from|after|before|in|into|on|at|for|per|until|since|line|and|or|the|these|those|all|other|others";
        pattern(&format!(r"(?i)(?-u:\b)(?:{words})\s+[$€£]?$"))
    });
    static JOINED: LazyLock<Regex> = LazyLock::new(|| {
        let words =
            "and|or|but|until|till|before|after|if|when|while|times|minus|plus|less|more|than|except|others?";
        pattern(&format!(r"(?i)(?-u:\b)(?:{words})(?-u:\b)"))
    });
    // A few words of one clause.
    static OBJECT: LazyLock<Regex> =
        LazyLock::new(|| pattern(r"^[%€]?(?:(?:\s?|-)[\p{L}'’]+(?:\^\{?[23]\}?)?){0,6}\s*[.!*]*$"));
    let sentence = line.split(". ").next().filter(|sentence| !DENIED.is_match(sentence))?;
    let has_number = |text: &str| text.contains(|c: char| c.is_ascii_digit());
    let mut names = formulas(sentence).map(|formula| formula.content);
    if !WORDS.is_match(sentence) || names.any(has_number) {
        return None;
    }
    if formulas(sentence).next().is_some() {
        return said_after(sentence);
    }
    let number = NUMBER.find(sentence)?;
    let (before, after) = (&sentence[..number.start()], &sentence[number.end()..]);
    let is_plain = !sentence.contains(['=', '<', '>', '\\', '/', '+', '*', '|', '(', ':']);
    let is_operand = OPERAND.is_match(before) && !before.trim_end().ends_with("total of");
    let is_object = !is_operand && OBJECT.is_match(after) && !JOINED.is_match(after);
    let is_said = is_plain && is_object && !hedges(sentence) && !UNREAL.is_match(sentence);
    last_number(sentence).filter(|_| is_said)
}

/// Returns true for a decimal, which "about" may precede.
fn is_rounded(answer: &str) -> bool {
    answer.contains('.')
}

/// Bold text in `line`, if `phrase` before it ends with the opening stars.
fn bold<'a>(phrase: &str, line: &'a str) -> Option<&'a str> {
    let (inner, after) = line.split_once("**").filter(|_| phrase.ends_with("**"))?;
    // `2**10` is a power, and `**3** million` another number.
    let is_power = after.starts_with(|c: char| c.is_alphanumeric() || c == '(');
    (!is_power && is_neutral("", after, true)).then_some(inner)
}

/// The value behind the last formula in `the value of $n$ is 34`, and the list in `the roots are 3 and 4`.
pub(super) fn said_after(text: &str) -> Option<Cow<'_, str>> {
    static SAID: LazyLock<Regex> = LazyLock::new(|| {
        let changes = r"(?:increase|decrease|grow|rise|fall|drop|shrink|change)(?:s|d)?\s+by";
        let copula = format!(
            r"(?:(?-u:\b)(?:is|are|was|were|be|equals?|es|est|ist|son|sont|sind|{changes})(?-u:\b)|=|:|是|为|為)"
        );
        let adverbs = r"(?:\s+(?:therefore|thus|then|hence|simply|just|exactly|equal\s+to|indeed|about|approximately|roughly))*";
        pattern(&format!(r"(?i){copula}{adverbs}[\s*]+"))
    });
    static CONDITION: LazyLock<Regex> =
        LazyLock::new(|| pattern(r"(?i)(?-u:\b)(?:before|until|if|unless|provided)(?-u:\b)"));
    static CLAUSE: LazyLock<Regex> = LazyLock::new(|| {
        pattern(
            r"\s+(?:that|which)\s+(?:meet|satisfy|fulfil|have|are|contain|divide|sum|work)(?-u:\b)[^.?!,;0-9]*\.?$",
        )
    });
    static CONCLUDES: LazyLock<Regex> = LazyLock::new(|| {
        pattern(
            r"(?i)^\s*(?:therefore|thus|hence|so|finally|consequently|then|in\s+(?:total|conclusion|summary)|final\s+answer)\b",
        )
    });
    let text = text.trim_end();
    let last = formulas(text).last();
    let rest = &text[last.map_or(0, |last| last.end)..];
    // The last sentence.
    let line = rest.lines().last()?;
    let start = line.trim_end_matches(['.', '*']).rfind(". ").map_or(0, |at| at + 2);
    let sentence = &line[start..];
    let is_later = rest.lines().count() > 1 || start > 0;
    if last.is_some() && is_later && !CONCLUDES.is_match(sentence) {
        return None;
    }
    let ends: Vec<usize> = SAID.find_iter(sentence).take(MOST_COPULAS).map(|found| found.end()).collect();
    // `12 numbers that meet the conditions` are 12.
    let value_at = |at: usize| {
        let value = &sentence[at..];
        (at, clean(CLAUSE.find(value).map_or(value, |found| &value[..found.start()])))
    };
    let list = ends.iter().map(|at| value_at(*at)).find(|(_, value)| LIST.is_match(value));
    let is_tuple =
        |value: &str| value.starts_with(['(', '[']) && value.contains(|c: char| c.is_ascii_digit());
    let starts_number =
        |value: &str| is_tuple(value) || NUMBER.find(value).is_some_and(|number| number.start() == 0);
    let number =
        ends.last().map(|at| value_at(*at)).filter(|(_, value)| last.is_some() && starts_number(value));
    let (at, value) = list.or(number)?;
    let before = format!("{}{}", tail(&text[..text.len() - sentence.len()]), &sentence[..at]);
    let value = if LIST.is_match(value) { with_commas(value) } else { unmarked(value) };
    let rest = &sentence[at..];
    let is_value = !value.contains(['$', '?']) && parse(&value).is_some();
    let is_bounded = hedges(rest) || CONDITION.is_match(rest);
    let is_asked = sentence.ends_with('?');
    (is_value && !is_bounded && !is_asked && is_neutral(&before, "", is_rounded(&value))).then_some(value)
}

/// Limit of the copulas of a sentence that are tried.
const MOST_COPULAS: usize = 20;

/// Several numbers, each with or without a name.
static LIST: LazyLock<Regex> = LazyLock::new(|| {
    let item = r"(?:[a-zA-Z](?:_\{?[0-9]\}?)?\s*=\s*)?[-−]?[0-9]+(?:\.[0-9]+|/[0-9]+)?";
    pattern(&format!(r"^{item}(?:{JOINT}{item})+$"))
});

/// A comma or a word between the items of a list.
const JOINT: &str =
    r"(?:\s*,\s*(?:and|or)\s+|\s*,\s+|\s+(?:and|or|et|ou|und|oder|y|e|и|или)\s+|\s*(?:和|或)\s*)";

/// A list with commas between its items.
fn with_commas(list: &str) -> Cow<'_, str> {
    static JOINTS: LazyLock<Regex> = LazyLock::new(|| pattern(JOINT));
    JOINTS.replace_all(list, ", ")
}

/// Limit of the characters in which a term of LaTeX is searched.
const MOST_TERM: usize = 300;

/// The end of a text, long enough for the patterns of the context.
fn tail(text: &str) -> &str {
    const MOST_CHARS: usize = 120;
    last_of(text, MOST_CHARS)
}

/// The last formula, or the last ones that are joined.
pub(super) fn last_formula(text: &str) -> Option<Cow<'_, str>> {
    let all: Vec<Marked> = formulas(text).collect();
    let chain = Chain::last(text, &all)?;
    let is_neutral = is_neutral(&text[..chain.start], &text[chain.end..], is_rounded(chain.content()));
    if !is_neutral || chain.is_formula() {
        return None;
    }
    Some(if chain.is_several() { chain.joined(clean).into() } else { unmarked(clean(chain.content())) })
}

/// The formulas that end a sentence as its predicate: `the roots are $1$ and $2$.`
pub(super) fn said_formula(text: &str) -> Option<Cow<'_, str>> {
    static COPULA: LazyLock<Regex> =
        LazyLock::new(|| pattern(r"(?i)(?:(?-u:\b)(?:is|are|equals?)|[=:])\s*$"));
    let all: Vec<Marked> = formulas(text).collect();
    let chain = Chain::last(text, &all)?;
    let ends = ["", "."].contains(&text[chain.end..].trim()) && COPULA.is_match(tail(&text[..chain.start]));
    if ends { last_formula(text) } else { None }
}

/// `1, 2` from `$1$, $2$`; `None` unless the text is several formulas that are joined.
pub(super) fn joined_formulas(text: &str) -> Option<String> {
    let all: Vec<Marked> = formulas(text).collect();
    let chain = Chain::last(text, &all).filter(Chain::is_several)?;
    let is_all = text[..chain.start].trim().is_empty() && ["", "."].contains(&text[chain.end..].trim());
    is_all.then(|| chain.joined(clean))
}

/// A term of LaTeX at the end of a sentence without marks, such as `2\sqrt{3}`.
pub(super) fn last_latex(text: &str) -> Option<&str> {
    static TERM: LazyLock<Regex> = LazyLock::new(|| {
        let group = r"\{[^{}\n]*(?:\{[^{}\n]*\}[^{}\n]*)*\}";
        let fraction = format!(r"\\[dt]?frac\s*(?:[0-9]{{2}}|{group}\s*{group})");
        let root = format!(r"\\sqrt\s*(?:\[[0-9]+\])?(?:[0-9]|{group})");
        let part = format!(
            r"(?:{fraction}|{root}|\\pi(?-u:\b)|\\binom\s*{group}\s*{group}|[0-9]+(?:\.[0-9]+)?|\^(?:[0-9]|{group})|[-+/()]|\\cdot(?-u:\b))"
        );
        pattern(&format!(r"(?:^|[\s:=*])(-?{part}(?: ?{part})*)"))
    });
    let line = text.lines().last()?;
    let text = last_of(line, MOST_TERM);
    let terms = TERM.captures_iter(text).filter_map(|found| found.get(1));
    let term = terms.filter(|term| term.as_str().contains('\\')).last()?;
    let (start, term) = (term.start(), term.as_str().trim_end());
    let end = start + term.len();
    let is_last = last_number(&text[end..]).is_none();
    let is_whole = is_neutral(&text[..start], &text[end..], is_rounded(term))
        && !text[end..].trim_start().starts_with(['\\', '{', '_', '}']);
    (is_last && is_whole && parse(term).is_some()).then_some(term)
}

static NUMBER: LazyLock<Regex> = LazyLock::new(|| {
    let grouped = r"[0-9]{1,3}(?: [0-9]{3})+(?:\.[0-9]+)?";
    // A decimal with a comma, or a pair.
    let comma = r"(?:[0-9]{1,3}(?:[. ][0-9]{3})+|[0-9]+),[0-9]{1,2}(?-u:\b)";
    let whole =
        format!(r"[0-9]+ [0-9]+/[0-9]+|{comma}|{grouped}|(?:[0-9]+(?:,[0-9]{{3}})*(?:\.[0-9]+)?|\.[0-9]+)");
    pattern(&format!(r"[-−–]?(?:\\?[$€£])?(?:{whole})(?:[eE][-+]?[0-9]+|/[0-9]+)?%?"))
});

/// The last number in prose with its sign, and words after it that change it. `None` if it is part of
/// something larger, as the 42 in `2^42` and `\sqrt{42}`.
pub(super) fn last_number(text: &str) -> Option<Cow<'_, str>> {
    const MINUS: [char; 3] = ['-', '−', '–'];
    let number = NUMBER.find_iter(text).last()?;
    let measure = MEASURED.captures_iter(text).last().filter(|measure| ends(measure, 0) > number.start());
    let measured = measure.and_then(|parts| parts.get(1).zip(parts.get(2)));
    let number = measured.map_or(number, |(number, _)| number);
    let end = measured.map_or(number.end(), |(_, unit)| unit.end());
    let (before, after) = (&text[..number.start()], &text[end..]);
    let words = words_of_number(after);
    let unsigned = number.as_str().trim_start_matches(MINUS);
    // `US$5` is not a product.
    let is_money = unsigned.starts_with(['$', '€', '£', '\\']);
    let before = if is_money { before.trim_end_matches(char::is_alphabetic) } else { before };
    // In `x-5` the minus is an operator, in `2024-05` a hyphen, and `x5` is a name.
    let is_joined = before.ends_with(|c: char| is_joining_letter(c) || c == ')');
    let is_whole = !is_joined
        && !COMPARED.is_match(&after[words..])
        && is_neutral(before, &after[words..], is_rounded(unsigned));
    is_whole.then(|| match measured {
        Some((number, unit)) => format!("{} {}", number.as_str(), unit.as_str()).into(),
        None => text[number.start()..end + words].into(),
    })
}

/// Words that make the number before them a difference or conditional: `40 cm more than that`, `40 cm if dry`.
static COMPARED: LazyLock<Regex> = LazyLock::new(|| {
    pattern(r"(?i)^(?:\s+[\p{L}'’-]+){0,3}\s+(?:(?:more|less|fewer|[a-z]+er)\s+than|if|unless|until)(?-u:\b)")
});

/// A number with a square or cubic unit, whose power is no number of its own.
static MEASURED: LazyLock<Regex> = LazyLock::new(|| {
    let unit = r"(?:[kcdm]?m|ft|in|yd|mi|[кдсм]?м)(?:/s)?\^(?:[23]|\{[23]\})";
    pattern(&format!(r"({})\s?({unit})", NUMBER.as_str()))
});

fn ends(parts: &regex::Captures, group: usize) -> usize {
    parts.get(group).map_or(0, |part| part.end())
}

/// Removes marks: `3 million` from `$3$ million` and `**3** million`, `-5` from `-$5$`, and `1, 2` from `$1$, $2$`.
pub(super) fn unmarked(text: &str) -> Cow<'_, str> {
    static MARKED: LazyLock<Regex> = LazyLock::new(|| {
        let (open, close) = (r"(?:\*\*|\$|\\\()?", r"(?:\*\*|\$|\\\))");
        pattern(&format!(
            r"^(?:([-−–])\s*{open}([0-9.,/]+){close}|{open}([^$*\\]+|\\[^$*()]+){close})\s*(\\?%|[A-Za-z ]*)$"
        ))
    });
    if text.len() > MOST_BYTES {
        return text.into();
    }
    match MARKED.captures(text) {
        Some(parts) => {
            let part = |at| parts.get(at).map_or("", |part| part.as_str());
            format!("{}{}{} {}", part(1), part(2), part(3), part(4)).trim().to_owned().into()
        }
        None => joined_formulas(text).map_or(text.into(), Cow::Owned),
    }
}

fn pattern(pattern: &str) -> Regex {
    Regex::new(pattern).expect("a pattern of this file")
}

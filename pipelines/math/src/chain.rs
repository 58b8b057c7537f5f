//! Several boxes or formulas that are one answer: `\boxed{2}, \boxed{6}` is a list of two.

use std::sync::LazyLock;

use regex::Regex;

use super::boxes::Marked;
use super::foreign::any_of;

/// Text between two answers.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Joint {
    Comma,
    And,
    Or,
    Union,
    /// A sign between operands of a formula.
    Operator,
}

/// The last answers of a text that belong together.
pub(super) struct Chain<'a> {
    /// Start of the first one, with its name and a bracket, and end of the last one, with a bracket.
    pub(super) start: usize,
    pub(super) end: usize,
    items: Vec<Marked<'a>>,
    joints: Vec<Joint>,
    names: Vec<&'a str>,
    brackets: Option<(&'static str, &'static str)>,
}

/// Limit of the items of a chain.
const MOST_ITEMS: usize = 100;

/// Limit of the bytes between two items.
const MOST_BETWEEN: usize = 160;

impl<'a> Chain<'a> {
    /// The last of `all` and those before it that are joined to it.
    pub(super) fn last(text: &'a str, all: &[Marked<'a>]) -> Option<Self> {
        let (last, before) = all.split_last()?;
        Some(Self::ending(text, last, before))
    }

    fn ending(text: &'a str, last: &Marked<'a>, before: &[Marked<'a>]) -> Self {
        let mut items = vec![*last];
        let (mut joints, mut names) = (Vec::new(), Vec::new());
        for item in before.iter().rev().take(MOST_ITEMS) {
            let Some((joint, name)) = joint(&text[item.end..items[items.len() - 1].start]) else { break };
            items.push(*item);
            joints.push(joint);
            names.push(name);
        }
        items.reverse();
        joints.reverse();
        let mut start = items[0].start;
        if items.len() > 1 {
            let name = name_before(&text[..start]);
            start -= name.len();
            names.push(name.trim_start_matches(['$', ' ']));
        }
        names.reverse();
        if items.len() > 1 {
            start = item_start(&text[..start]);
        }
        let mut chain = Self { start, end: last.end, items, joints, names, brackets: None };
        chain.take_brackets(text);
        chain
    }

    /// Takes the brackets around a tuple or a set of boxes.
    fn take_brackets(&mut self, text: &str) {
        const BRACKETS: [(&str, &str); 6] = [
            (r"\left(", r"\right)"),
            (r"\left\{", r"\right\}"),
            (r"\{", r"\}"),
            ("(", ")"),
            ("{", "}"),
            ("[", "]"),
        ];
        if self.items.len() < 2 {
            return;
        }
        let (before, after) = (text[..self.start].trim_end(), text[self.end..].trim_start());
        let around = |(open, close): &(&str, &str)| before.ends_with(open) && after.starts_with(close);
        if let Some((open, close)) = BRACKETS.into_iter().find(around) {
            self.start = before.len() - open.len();
            self.end = text.len() - after.len() + close.len();
            self.brackets = Some((open, close));
        }
    }

    /// Returns true if there are several different items.
    pub(super) fn is_several(&self) -> bool {
        self.items.iter().any(|item| item.content.trim() != self.items[0].content.trim())
    }

    /// The last item.
    pub(super) fn content(&self) -> &'a str {
        self.items[self.items.len() - 1].content
    }

    /// Returns true if the items are operands of a formula.
    pub(super) fn is_formula(&self) -> bool {
        self.joints.contains(&Joint::Operator)
    }

    /// Returns true if a value that is no item of the chain follows: `\boxed{5} \text{ or } 6`.
    pub(super) fn is_continued(&self, text: &str) -> bool {
        static MORE: LazyLock<Regex> = LazyLock::new(|| {
            let and = r"[,;&]|\b(?:and|also|as\s+well\s+as)\b|\\(?:land|wedge|cup)\b|和|与|と|및";
            let or = r"\b(?:or|else)\b|\\(?:lor|vee)\b|或者?|または|또는";
            pattern(&format!(
                r"^(?:\s*(?P<or>(?:[,;]\s*)?(?:{or}))|(?:[^\S\n]*(?:{and})\s*)+|[^\S\n]+)\s*(?P<name>{NAME})?[-−(\[{{\\\s]*(?:[0-9]|[dt]?frac\b|sqrt\b|pi\b)"
            ))
        });
        let after = &text[self.end..];
        let end = after.char_indices().nth(80).map_or(after.len(), |(end, _)| end);
        let after = plain_words(&after[..end]);
        let Some(found) = MORE.captures(&after) else { return false };
        // `x = \boxed{5} and y = 6` has another value of another name.
        let name = found.name("name").map(|name| name.as_str().trim_end_matches([' ', '=']));
        let own = name_before(&text[..self.items[0].start]).trim_matches([' ', '=', '$', '\n']);
        let same = name.is_none_or(|name| own.is_empty() || name == own);
        same || found.name("or").is_some()
    }

    /// All items as one text, each cleaned by `clean`.
    pub(super) fn joined(&self, clean: impl Fn(&'a str) -> &'a str) -> String {
        let mut joined = String::new();
        for (at, item) in self.items.iter().enumerate() {
            if at > 0 {
                joined.push_str(match self.joints[at - 1] {
                    Joint::Comma => ", ",
                    Joint::And => r" \text{ and } ",
                    Joint::Or => r" \text{ or } ",
                    Joint::Union => r" \cup ",
                    Joint::Operator => " ",
                });
            }
            joined.push_str(self.names[at]);
            joined.push_str(clean(item.content));
        }
        match self.brackets {
            Some((open, close)) => format!("{open}{joined}{close}"),
            None => joined,
        }
    }
}

/// Start of the mark of a list's item at the end of `before`: `1. ` or `- `.
fn item_start(before: &str) -> usize {
    static MARK: LazyLock<Regex> = LazyLock::new(|| pattern(&format!(r"(?:^|\n)\s*{ITEM}[$*]*$")));
    let tail = before.char_indices().rev().take(40).last().map_or(0, |(start, _)| start);
    MARK.find(&before[tail..]).map_or(before.len(), |found| tail + found.start())
}

/// The mark of a list's item.
const ITEM: &str = r"(?:[-*•]|\(?[0-9]{1,2}[.)]|\(?[a-z]\))\s";

/// A name with its equals sign: `x =`, `x_{1} =`, `f(2) =`.
const NAME: &str =
    r"(?:\\?[A-Za-z]+'*(?:_(?:[A-Za-z0-9]|\{[A-Za-z0-9]+\}))?(?:\([A-Za-z0-9,]+\))?\s*(?:=|\\in\b)\s*)";

/// The name that ends `before`, with spaces and dollars before it.
fn name_before(before: &str) -> &str {
    static ENDS: LazyLock<Regex> = LazyLock::new(|| pattern(&format!(r"(?:^|[\s$(\[,;:]){NAME}$")));
    let tail = before.char_indices().rev().take(40).last().map_or(0, |(start, _)| start);
    let found = ENDS.find(&before[tail..]).map_or("", |found| found.as_str());
    found.strip_prefix(['(', '[', ',', ';', ':', '\n']).unwrap_or(found)
}

/// The joint that a text between two items is, and the name of the item behind it; `None` if it joins nothing.
fn joint(between: &str) -> Option<(Joint, &str)> {
    static NAMED: LazyLock<Regex> = LazyLock::new(|| pattern(&format!(r"{NAME}[\s$]*$")));
    if between.len() > MOST_BETWEEN {
        return None;
    }
    let (words, name) = match NAMED.find(between) {
        Some(found) => (&between[..found.start()], found.as_str().trim_end_matches(['$', ' ', '\n'])),
        None => (between, ""),
    };
    let is_amp = words.contains(r"\&");
    let words = plain_words(words);
    if is_amp && words.trim().trim_matches('\\').trim().is_empty() {
        return Some((Joint::And, name));
    }
    let joint = if OPERATOR.is_match(&words) {
        Joint::Operator
    } else if LISTED.is_match(&words) {
        if OR.is_match(&words) {
            Joint::Or
        } else if AND.is_match(&words) {
            Joint::And
        } else {
            Joint::Comma
        }
    } else if words.trim() == r"\cup" || words.trim() == "∪" {
        Joint::Union
    } else if NUMBERED.is_match(&words) && !CONCLUDES.is_match(&words) {
        Joint::Comma
    } else if name.is_empty() || !words.trim().is_empty() {
        let one_clause = !words.contains(['.', '?', '!', ':', '=', '\n']) && !DERIVES.is_match(&words);
        match (one_clause && AND.is_match(&words), one_clause && OR.is_match(&words)) {
            (_, true) => Joint::Or,
            (true, _) => Joint::And,
            _ => return None,
        }
    } else {
        return None;
    };
    Some((joint, name))
}

/// `text` without marks of formulas and of bold text, spacing commands, and the braces of words.
fn plain_words(text: &str) -> String {
    static MARKS: LazyLock<Regex> = LazyLock::new(|| {
        let text = r"\\(?:text|textrm|textnormal|textit|textbf|mathrm|mbox|hbox)\s*\{([^{}]*)\}";
        let spaces = r"\\[()\[\],;:! ]|\\q?quad\b|\\(?:text|math)?rm\b|\\hspace\{[^{}]*\}|\\\\|[~&`]";
        pattern(&format!(r"{text}|\$|\*\*|{spaces}"))
    });
    MARKS.replace_all(text, " $1 ").into_owned()
}

/// Only words and signs of a list, or the marks of its items.
static LISTED: LazyLock<Regex> = LazyLock::new(|| {
    let words = r"\b(?:and|or|also|as\s+well\s+as|along\s+with|together\s+with|either|the|other|y|et|und|oder|ou|e|o|и|или)\b";
    let signs = r"[,;|]|\\mid\b|\\(?:lor|vee|land|wedge)\b|和|与|與|或者|或|及|以及|と|または|및|또는|와|과";
    let item = format!(r"\.?\s*(?:\n|^)\s*{ITEM}");
    let several = r"\.?\s*\n\s*\n\s*|\n|\.|-{3,}";
    let other = r"\(?(?:alternatively|equivalently|maybe|perhaps|possibly)\b";
    pattern(&format!(r"^(?:{item}|{several}|\s|{words}|{signs}|{other})*$"))
});

/// Signs of a formula and the variable before them. A lone minus may be a dash.
static OPERATOR: LazyLock<Regex> = LazyLock::new(|| {
    let sign = r"[+*/^:{}<>~_]|[-−]\s*$|\\(?:cdot|times|div|to|leq?|geq?|lt|gt|pm|mapsto)\b";
    pattern(&format!(r"^[^\S\n]*(?:[a-z][^\S\n]*)?(?:{sign})[^\p{{L}}\p{{N}}\n.,;]{{0,8}}[a-z]?\s*$"))
});

/// Words that number the later answer as another one.
static NUMBERED: LazyLock<Regex> = LazyLock::new(|| {
    let parts = r"(?:part|case|question|problem|root|solution|value|blank)\s*(?:\(?[0-9]{1,2}\b|\(?[a-hA-H]\b|I{2,3}\b)";
    pattern(&format!(
        r"(?i)\b(?:{parts}|(?:the|a)\s+(?:second|third|fourth|fifth|other)\b|another\b|the\s+remaining)"
    ))
});

/// Words that make the later answer the only one.
static CONCLUDES: LazyLock<Regex> = LazyLock::new(|| {
    pattern(
        r"(?i)\b(?:therefore|thus|hence|so|total|sum|product|difference|final|finally|combined|combining|altogether|wrong|incorrect|instead|rather|no|not|but)\b",
    )
});

static AND: LazyLock<Regex> = LazyLock::new(|| {
    pattern(
        r"(?i)\b(?:and|also|as\s+well\s+as|along\s+with|y|et|und|e|и)\b|\\(?:land|wedge)\b|和|与|與|及|と|및|와|과",
    )
});

static OR: LazyLock<Regex> =
    LazyLock::new(|| pattern(r"(?i)\b(?:or|oder|ou|o|или)\b|\\(?:lor|vee)\b|或|または|또는"));

/// Words that make the later answer replace the earlier one, or follow from it.
static DERIVES: LazyLock<Regex> = LazyLock::new(|| {
    let words = any_of(
        r"actually the\s+(?:final\s+|correct\s+)?answer too adding because becomes but follows gets?
          giv(?:es|ing) hence implies instead means no not obtain rather since so then therefore thus
          wait yield(?:s|ing)? wrong incorrect",
    );
    pattern(&format!(r"(?i)\b(?:{words})\b|\\(?:Right|right|to|implies|iff|Longright)|[<>+*/^-]"))
});

fn pattern(pattern: &str) -> Regex {
    Regex::new(pattern).expect("a pattern of this file")
}

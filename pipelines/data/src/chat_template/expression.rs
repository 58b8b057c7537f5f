//! Expressions of Jinja2, parsed with its precedence and written for minijinja.

use super::dialect::{MAX_DEPTH, MAX_STEPS};

/// A token of a tag.
pub(super) struct Token<'a> {
    /// Text for minijinja; strings have its escapes.
    text: String,
    /// The text of a name or keyword.
    pub(super) name: Option<&'a str>,
    kind: Kind,
    /// Line ends before the token and in it.
    lines: usize,
}

#[derive(Clone, Copy, PartialEq, Eq)]
enum Kind {
    Name,
    Number,
    Text,
    Operator,
}

const OPERATORS: [&str; 32] = [
    "**", "//", "==", "!=", ">=", "<=", "+", "-", "*", "/", "%", "~", ">", "<", "=", ".", ":", "|", ",", ";",
    "(", ")", "[", "]", "{", "}", "!", "&", "^", "@", "$", "?",
];

/// Tokens of the tag that `text` starts with, and its length up to `close`; `None` if it is not a tag.
pub(super) fn lexed<'a>(text: &'a str, close: &str) -> Option<(Vec<Token<'a>>, usize)> {
    let (mut tokens, mut at, mut depth, mut lines) = (Vec::new(), 0, 0_usize, 0);
    loop {
        let rest = &text[at..];
        let first = rest.chars().next()?;
        if depth == 0 {
            let marked = rest.strip_prefix(['-', '+']).is_some_and(|rest| rest.starts_with(close));
            if marked || rest.starts_with(close) {
                return Some((tokens, at + usize::from(marked)));
            }
        }
        if first.is_whitespace() {
            lines += usize::from(first == '\n');
            at += first.len_utf8();
            continue;
        }
        let (text, kind, length) = if first.is_alphabetic() || first == '_' {
            let length = rest.find(|it: char| !it.is_alphanumeric() && it != '_').unwrap_or(rest.len());
            (rest[..length].to_owned(), Kind::Name, length)
        } else if first.is_ascii_digit() {
            let length = number(rest, tokens.last());
            (rest[..length].to_owned(), Kind::Number, length)
        } else if matches!(first, '"' | '\'') {
            let length = string_length(rest, first)?;
            // What Python's escapes do not allow is an invalid one for minijinja too.
            let value = unescaped(&rest[1..length - 1]).map_or("\"\\u\"".to_owned(), |value| quoted(&value));
            (value, Kind::Text, length)
        } else {
            let operator = OPERATORS.iter().find(|operator| rest.starts_with(**operator))?;
            match first {
                '(' | '[' | '{' => depth += 1,
                ')' | ']' | '}' => depth = depth.checked_sub(1)?,
                _ => {}
            }
            ((*operator).to_owned(), Kind::Operator, operator.len())
        };
        let lines = std::mem::take(&mut lines) + rest[..length].matches('\n').count();
        let name = (kind == Kind::Name).then(|| &rest[..length]);
        tokens.push(Token { text, name, kind, lines });
        at += length;
    }
}

/// Length of the number at the start of `text`. After a dot it is an index, without a fraction.
fn number(text: &str, before: Option<&Token>) -> usize {
    let bytes = text.as_bytes();
    let digits = |from: usize, is: fn(&u8) -> bool| {
        bytes[from..].iter().take_while(|byte| is(byte) || **byte == b'_').count()
    };
    let is_index = before.is_some_and(|token| token.text == ".");
    if matches!(bytes, [b'0', b'x' | b'X' | b'o' | b'O' | b'b' | b'B', ..]) && !is_index {
        return 2 + digits(2, u8::is_ascii_hexdigit);
    }
    let mut length = digits(0, u8::is_ascii_digit);
    if is_index {
        return length;
    }
    if bytes.get(length) == Some(&b'.') && bytes.get(length + 1).is_some_and(u8::is_ascii_digit) {
        length += 1 + digits(length + 1, u8::is_ascii_digit);
    }
    if matches!(bytes.get(length), Some(b'e' | b'E')) {
        let signed = length + 1 + usize::from(matches!(bytes.get(length + 1), Some(b'+' | b'-')));
        if bytes.get(signed).is_some_and(u8::is_ascii_digit) {
            length = signed + digits(signed, u8::is_ascii_digit);
        }
    }
    length
}

/// Length of the string literal at the start of `text`.
fn string_length(text: &str, quote: char) -> Option<usize> {
    let mut chars = text.char_indices().skip(1);
    loop {
        match chars.next()? {
            (at, char) if char == quote => return Some(at + 1),
            (_, '\\') => {
                chars.next()?;
            }
            _ => {}
        }
    }
}

/// The text of a string literal, with Python's escapes; `None` if one is invalid.
fn unescaped(text: &str) -> Option<String> {
    let mut value = String::new();
    let mut high = None;
    let mut chars = text.char_indices();
    while let Some((_, char)) = chars.next() {
        if char != '\\' {
            value.push(char);
            continue;
        }
        let (at, escape) = chars.next()?;
        let mut hex = |count: usize| {
            let digits = text.get(at + 1..at + 1 + count)?;
            let code =
                digits.bytes().all(|it| it.is_ascii_hexdigit()).then(|| u32::from_str_radix(digits, 16));
            chars.nth(count - 1);
            code?.ok()
        };
        let code = match escape {
            '\n' => continue,
            '\\' | '\'' | '"' => u32::from(escape),
            'a' => 7,
            'b' => 8,
            't' => 9,
            'n' => 10,
            'v' => 11,
            'f' => 12,
            'r' => 13,
            'x' => hex(2)?,
            'u' => hex(4)?,
            'U' => hex(8)?,
            '0'..='7' => {
                let digits = text[at..].bytes().take(3).take_while(|it| matches!(it, b'0'..=b'7')).count();
                for _ in 1..digits {
                    chars.next();
                }
                u32::from_str_radix(&text[at..at + digits], 8).ok()?
            }
            // A character by its name, which only Python knows.
            'N' => return None,
            other => {
                value.extend(['\\', other]);
                continue;
            }
        };
        // Halves of a character beyond 16 bits.
        match (high.take(), code) {
            (None, 0xd800..=0xdbff) => high = Some(code),
            (Some(high), 0xdc00..=0xdfff) => {
                value.push(char::from_u32(0x10000 + ((high - 0xd800) << 10) + (code - 0xdc00))?);
            }
            (None, code) => value.push(char::from_u32(code)?),
            (Some(_), _) => return None,
        }
    }
    high.is_none().then_some(value)
}

/// A string literal of minijinja.
fn quoted(value: &str) -> String {
    let mut literal = String::from('"');
    for char in value.chars() {
        match char {
            '\\' => literal.push_str("\\\\"),
            '"' => literal.push_str("\\\""),
            '\n' => literal.push_str("\\n"),
            '\r' => literal.push_str("\\r"),
            char => literal.push(char),
        }
    }
    literal + "\""
}

/// Parser of a tag's tokens. A method returns the text for minijinja, or `None` where Jinja2 finds an error.
pub(super) struct Expressions<'a> {
    tokens: &'a [Token<'a>],
    at: usize,
    depth: usize,
    steps: usize,
}

impl<'a> Expressions<'a> {
    pub(super) fn new(tokens: &'a [Token<'a>]) -> Self {
        Expressions { tokens, at: 0, depth: 0, steps: 0 }
    }

    /// One expression, or several as a tuple.
    pub(super) fn all(&mut self) -> Option<String> {
        let all = self.listed(None)?;
        (self.at == self.tokens.len()).then_some(all)
    }

    /// A statement: its keywords as they are, with the expressions between them.
    pub(super) fn statement(&mut self) -> Option<String> {
        let mut text = self.next()?;
        match self.tokens[0].name? {
            // The targets of a loop are no expression, which `in` would be a part of.
            "for" => {
                while !self.is_name("in") {
                    text += &self.next()?;
                }
                text += &self.next()?;
            }
            "set" => {
                let target = self.targets()?;
                text += &target;
                if self.skip("=") {
                    let value = self.listed(None)?;
                    let kept = target.contains('.').then(|| format!("__kept(({value}))"));
                    text += " = ";
                    text += &kept.unwrap_or(value);
                }
            }
            _ => {}
        }
        let keywords: &[&str] = match self.tokens[0].name? {
            "for" => &["recursive"],
            "import" | "from" | "include" => {
                &["as", "import", "ignore", "missing", "with", "without", "context"]
            }
            _ => &[],
        };
        while let Some(token) = self.peek() {
            let is_plain = matches!(&*token.text, "=" | "," | "|" | ":")
                || token.name.is_some_and(|name| keywords.contains(&name));
            text += &if is_plain { self.next()? } else { self.condition()? };
        }
        Some(text)
    }

    /// Targets of an assignment, up to `=` or the end.
    fn targets(&mut self) -> Option<String> {
        let mut text = String::new();
        while self.peek().is_some_and(|token| !matches!(&*token.text, "=" | "|")) {
            text += &self.next()?;
        }
        Some(text)
    }

    /// Returns true if the tag has too many operators.
    pub(super) fn is_long(&self) -> bool {
        self.steps > MAX_STEPS
    }

    /// Counts an operator, filter or call.
    fn step(&mut self) -> Option<()> {
        self.steps += 1;
        (!self.is_long()).then_some(())
    }

    fn peek(&self) -> Option<&'a Token<'a>> {
        self.tokens.get(self.at)
    }

    fn is(&self, operator: &str) -> bool {
        self.peek().is_some_and(|token| token.kind == Kind::Operator && token.text == operator)
    }

    fn is_name(&self, name: &str) -> bool {
        self.peek().is_some_and(|token| token.name == Some(name))
    }

    /// The next token, with the line ends before it.
    fn next(&mut self) -> Option<String> {
        let token = self.peek()?;
        self.at += 1;
        Some(format!("{} {}", "\n".repeat(token.lines), token.text))
    }

    /// Line ends before the next token, which the caller writes otherwise.
    fn lines(&mut self) -> Option<String> {
        let lines = "\n".repeat(self.peek()?.lines);
        self.at += 1;
        Some(lines)
    }

    fn skip(&mut self, operator: &str) -> bool {
        let is = self.is(operator);
        self.at += usize::from(is);
        is
    }

    /// Reads `operator`, which must be next.
    fn expect(&mut self, operator: &str) -> Option<String> {
        if self.is(operator) { self.next() } else { None }
    }

    /// Expressions with commas, up to `close` or the end of the tag.
    fn listed(&mut self, close: Option<&str>) -> Option<String> {
        let mut text = String::new();
        while self.peek().is_some() && close.is_none_or(|close| !self.is(close)) {
            text += &self.condition()?;
            if !self.is(",") {
                break;
            }
            text += &self.next()?;
        }
        Some(text)
    }

    fn condition(&mut self) -> Option<String> {
        self.depth += 1;
        if self.depth > MAX_DEPTH {
            return None;
        }
        let mut text = self.logical()?;
        while self.is_name("if") {
            self.step()?;
            text += &self.next()?;
            text += &self.logical()?;
            if self.is_name("else") {
                text += &self.next()?;
                text += &self.condition()?;
            }
        }
        self.depth -= 1;
        Some(text)
    }

    /// Comparisons with `and`, `or` and `not`, in whose precedence both dialects agree.
    fn logical(&mut self) -> Option<String> {
        let mut text = String::new();
        loop {
            while self.is_name("not") {
                self.step()?;
                text += &self.next()?;
            }
            text += &self.sum()?;
            while let Some(token) = self.peek() {
                let is_in = token.name == Some("in");
                let is_not_in = token.name == Some("not")
                    && self.tokens.get(self.at + 1).is_some_and(|token| token.name == Some("in"));
                if is_not_in {
                    text += &self.next()?;
                } else if !is_in && !matches!(&*token.text, "==" | "!=" | ">" | "<" | ">=" | "<=") {
                    break;
                }
                self.step()?;
                text += &self.next()?;
                text += &self.sum()?;
            }
            if !self.is_name("and") && !self.is_name("or") {
                return Some(text);
            }
            self.step()?;
            text += &self.next()?;
        }
    }

    fn sum(&mut self) -> Option<String> {
        self.operators(&["+", "-"], |it| {
            it.operators(&["~"], |it| {
                it.operators(&["*", "/", "//", "%"], |it| it.operators(&["**"], Self::unary))
            })
        })
    }

    /// Operators of one precedence, from the left.
    fn operators(
        &mut self,
        these: &[&str],
        mut operand: impl FnMut(&mut Self) -> Option<String>,
    ) -> Option<String> {
        let mut left = operand(self)?;
        while let Some(operator) = these.iter().find(|operator| self.is(operator)) {
            self.step()?;
            let lines = self.lines()?;
            let right = operand(self)?;
            left = match *operator {
                "%" => format!(" __modulo({left},{lines}{right})"),
                "~" => format!(" __joined({left},{lines}{right})"),
                "+" | "*" | "**" => format!(" __checked({left} {operator}{lines}{right})"),
                _ => format!(" ({left} {operator}{lines}{right})"),
            };
        }
        Some(left)
    }

    fn unary(&mut self) -> Option<String> {
        let operand = self.signed()?;
        self.filtered(operand)
    }

    fn signed(&mut self) -> Option<String> {
        if self.is("-") || self.is("+") {
            self.step()?;
        }
        if self.is("-") {
            let lines = self.lines()?;
            self.depth += 1;
            let operand = if self.depth > MAX_DEPTH { None } else { self.signed() }?;
            self.depth -= 1;
            return Some(format!(" (-{lines}{operand})"));
        }
        if self.is("+") {
            let lines = self.lines()?;
            return Some(lines + &self.signed()?);
        }
        let primary = self.primary()?;
        self.postfix(primary)
    }

    fn primary(&mut self) -> Option<String> {
        let token = self.peek()?;
        match (token.kind, &*token.text) {
            (Kind::Name, "not" | "and" | "or" | "in" | "is" | "if" | "else") => None,
            (Kind::Name | Kind::Number, _) => self.next(),
            (Kind::Text, _) => {
                let mut text = self.next()?;
                while self.peek().is_some_and(|token| token.kind == Kind::Text) {
                    text += &self.next()?;
                }
                Some(text)
            }
            (_, "(") => self.enclosed(")"),
            (_, "[") => self.enclosed("]"),
            (_, "{") => self.dictionary(),
            _ => None,
        }
    }

    /// A bracket, expressions with commas and the bracket that closes it.
    fn enclosed(&mut self, close: &str) -> Option<String> {
        let (open, listed) = (self.next()?, self.listed(Some(close))?);
        Some(format!("{open}{listed}{}", self.expect(close)?))
    }

    fn dictionary(&mut self) -> Option<String> {
        let mut text = self.next()?;
        while !self.is("}") {
            text += &self.condition()?;
            text += &self.expect(":")?;
            text += &self.condition()?;
            if !self.is(",") {
                break;
            }
            text += &self.next()?;
        }
        Some(text + &self.expect("}")?)
    }

    fn postfix(&mut self, mut value: String) -> Option<String> {
        loop {
            if self.is(".") || self.is("[") || self.is("(") {
                self.step()?;
            }
            if self.is(".") {
                let lines = self.lines()?;
                value = format!("{value}{lines}.{}", self.next()?.trim_start_matches(' '));
            } else if self.is("[") {
                value = self.subscript(&value)?;
            } else if self.is("(") {
                value += &self.arguments()?;
            } else {
                return Some(value);
            }
        }
    }

    /// An item of `value`, or a slice of it.
    fn subscript(&mut self, value: &str) -> Option<String> {
        let lines = self.lines()?;
        let mut parts = Vec::new();
        let mut part = String::new();
        loop {
            if self.is("]") || self.is(":") {
                let is_end = self.is("]");
                let line = self.lines()?;
                parts.push(std::mem::take(&mut part) + &line);
                if is_end {
                    break;
                }
            } else if part.is_empty() {
                part = self.listed(None)?;
            } else {
                return None;
            }
        }
        if let [item] = &parts[..] {
            return Some(format!("{value}[{lines}{item}]"));
        }
        let or_none =
            |part: &String| if part.trim().is_empty() { format!("{part} none") } else { part.clone() };
        parts.resize(parts.len().max(3), String::new());
        let [start, stop, step] = &parts[..] else { return None };
        let [start, stop, step] = [start, stop, step].map(or_none);
        Some(format!(" __slice({value},{lines}{start},{stop},{step})"))
    }

    /// Arguments of a call, with their parentheses.
    fn arguments(&mut self) -> Option<String> {
        let mut text = format!("{}(", self.lines()?);
        while !self.is(")") {
            while self.is("*") || self.is("**") {
                text += &self.next()?;
            }
            let is_named = self.peek()?.kind == Kind::Name
                && self.tokens.get(self.at + 1).is_some_and(|token| token.text == "=");
            if is_named {
                text += &self.next()?;
                text += &self.next()?;
            }
            text += &self.condition()?;
            if !self.is(",") {
                break;
            }
            text += &self.next()?;
        }
        Some(text + &self.expect(")")?)
    }

    /// Filters and tests of `value`.
    fn filtered(&mut self, mut value: String) -> Option<String> {
        loop {
            if self.is("|") || self.is_name("is") {
                self.step()?;
            }
            if self.is("|") {
                value += &self.next()?;
                value += &self.dotted()?;
                if self.is("(") {
                    value += &self.arguments()?;
                }
            } else if self.is_name("is") {
                value = self.test(&value)?;
            } else if self.is("(") {
                value += &self.arguments()?;
            } else {
                return Some(value);
            }
        }
    }

    /// A name of a filter or test.
    fn dotted(&mut self) -> Option<String> {
        let mut name = if self.peek()?.kind == Kind::Name { self.next()? } else { return None };
        while self.skip(".") {
            name = format!("{name}.{}", self.next()?.trim());
        }
        Some(name)
    }

    fn test(&mut self, value: &str) -> Option<String> {
        let mut text = format!(" ({value}{}", self.next()?);
        if self.is_name("not") {
            text += &self.next()?;
        }
        text += &self.dotted()?;
        if self.is("(") {
            text += &self.arguments()?;
        } else if self.peek().is_some_and(|token| {
            let ends = ["else", "or", "and", "if", "in", "not", "is"];
            token.kind != Kind::Operator && !token.name.is_some_and(|name| ends.contains(&name))
                || matches!(&*token.text, "[" | "{")
        }) {
            let argument = self.primary()?;
            text = format!("{text}({})", self.postfix(argument)?);
        }
        Some(text + ")")
    }
}

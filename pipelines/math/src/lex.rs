//! Tokenizer of LaTeX and plain notation.

use num_bigint::BigInt;
use num_rational::BigRational;

use super::expr::{Constant, Number};
use super::foreign::{is_foreign_letter, is_mark};
use super::symbols::{SHORT_WORDS, TWO_SIGNS, command, function, letter, named, phrase, symbol};
use super::token::Token;

/// Tokens of `text`; `None` if some part of it is unknown. With `decimal_comma`, `3,5` is a decimal.
pub(super) fn lex(text: &str, decimal_comma: bool) -> Option<Vec<Token>> {
    let mut lexer =
        Lexer { rest: text, depth: 0, decimal_comma, in_brace: false, system: None, tokens: Vec::new() };
    while !lexer.rest.is_empty() {
        lexer.next()?;
    }
    Some(lexer.tokens)
}

pub(super) struct Lexer<'a> {
    pub(super) rest: &'a str,
    /// Number of open brackets, inside which a comma never groups digits.
    pub(super) depth: usize,
    pub(super) decimal_comma: bool,
    /// True in a brace that opens a system of equations.
    in_brace: bool,
    /// In a system of equations; true for `cases`, where columns are values and their conditions.
    system: Option<bool>,
    tokens: Vec<Token>,
}

impl Lexer<'_> {
    fn next(&mut self) -> Option<()> {
        let first = self.rest.chars().next()?;
        if first.is_whitespace() || first == '~' {
            self.rest = &self.rest[first.len_utf8()..];
        } else if first.is_ascii_digit() || (first == '.' && self.digits_at(1) > 0) {
            let number = self.number()?;
            self.tokens.push(Token::Number(number));
        } else if starts_word(first) {
            self.letters();
        } else if first == '\\' {
            self.command()?;
        } else {
            self.sign(first)?;
        }
        Some(())
    }

    fn push(&mut self, token: Token) {
        match token {
            Token::Open('(' | '[' | '{') => self.depth += 1,
            Token::Close('(' | '[' | '{') => self.depth = self.depth.saturating_sub(1),
            _ => {}
        }
        self.tokens.push(token);
    }

    pub(super) fn take(&mut self, prefix: &str) -> bool {
        let taken = self.rest.strip_prefix(prefix);
        self.rest = taken.unwrap_or(self.rest);
        taken.is_some()
    }

    fn skip_spaces(&mut self) {
        self.rest = self.rest.trim_start();
    }

    pub(super) fn digits_at(&self, start: usize) -> usize {
        self.rest.bytes().skip(start).take_while(u8::is_ascii_digit).count()
    }

    pub(super) fn take_digits(&mut self, digits: &mut String) -> usize {
        let count = self.digits_at(0);
        digits.push_str(&self.rest[..count]);
        self.rest = &self.rest[count..];
        count
    }

    /// A run of letters: a function, a word, or a product of variables.
    fn letters(&mut self) {
        if let Some(half) = half_of_day(self.rest) {
            self.rest = &self.rest[half.len()..];
            self.tokens.push(Token::Word(half.replace('.', "").to_ascii_lowercase()));
            return;
        }
        let (run, rest) = self.rest.split_at(word_length(self.rest));
        self.rest = rest;
        if run == "Rs" {
            self.rest = self.rest.strip_prefix('.').unwrap_or(self.rest);
            self.tokens.push(Token::Word("₹".to_owned()));
            return;
        }
        let lower = run.to_lowercase();
        if run == "oo" || ["infinity", "inf"].contains(&&*lower) {
            self.tokens.push(Token::Constant(Constant::Infinity));
        } else if run == "sqrt" {
            self.tokens.push(Token::SquareRoot);
        } else if run == "frac" && rest.starts_with('{') {
            self.tokens.push(Token::Fraction);
        } else if let Some(function) = function(run) {
            self.tokens.push(Token::Function(function));
        } else if let Some(token) = named(run) {
            self.tokens.push(token);
        } else if let Some(token) = phrase(&lower) {
            self.tokens.push(token);
        } else if ["am", "pm"].contains(&&*lower) && matches!(self.tokens.last(), Some(Token::Number(_))) {
            self.tokens.push(Token::Word(lower));
        } else if run.bytes().all(|byte| byte.is_ascii_uppercase()) {
            // `AB` is a line segment, not a product.
            self.tokens.push(Token::Symbol(run.to_owned()));
        } else if !run.is_ascii() {
            self.tokens.push(Token::Word(lower));
        } else if run.len() == 1 || (run.len() == 2 && !SHORT_WORDS.contains(&&*lower)) {
            self.tokens.extend(run.chars().map(letter));
        } else {
            self.tokens.push(Token::Word(lower));
        }
    }

    fn command(&mut self) -> Option<()> {
        let length = self.rest[1..].bytes().take_while(u8::is_ascii_alphabetic).count();
        if length == 0 {
            return self.escaped();
        }
        // In `\quadx` the space behind the command is lost.
        let space = ["quad", "qquad"].into_iter().find(|space| self.rest[1..].starts_with(space));
        let length = space.map_or(length, str::len);
        let (name, rest) = self.rest[1..].split_at(length);
        self.rest = rest;
        match name {
            "left" | "right" | "big" | "Big" | "bigg" | "Bigg" | "bigl" | "bigr" | "Bigl" | "Bigr" => {
                return self.sized(name);
            }
            "bf" | "rm" | "it" | "boldsymbol" | "bm" | "displaystyle" | "textstyle" | "limits" | "quad"
            | "qquad" | "space" | "thinspace" | "enspace" => {}
            "text" | "textbf" | "textit" | "textrm" | "textnormal" | "textsf" | "texttt" | "textup"
            | "mathrm" | "mathbf" | "mathsf" | "mbox" | "hbox" | "operatorname" | "mathit" | "mathbb"
            | "mathcal" => self.text(name)?,
            "large" | "Large" | "LARGE" | "huge" | "Huge" | "small" | "checkmark" | "underline" => {}
            "color" | "textcolor" | "phantom" | "hphantom" => {
                self.group()?;
            }
            "angle" | "measuredangle" | "triangle" => self.figure(name)?,
            "overline" | "vec" | "hat" | "bar" | "widehat" | "tilde" | "overrightarrow" => {
                self.accent(name)?
            }
            "frac" | "dfrac" | "tfrac" | "cfrac" | "nicefrac" | "sfrac" => self.two_digits(Token::Fraction),
            "binom" | "dbinom" | "tbinom" => self.two_digits(Token::Choose),
            "sqrt" => {
                self.skip_spaces();
                // LaTeX reads `\sqrt12` as the root of 1, times 2, which its author hardly means.
                if self.digits_at(0) > 1 {
                    return None;
                }
                self.tokens.push(Token::SquareRoot);
            }
            "begin" | "end" => return self.environment(name == "begin"),
            _ => {
                let token = command(name)?;
                self.push(token);
            }
        }
        Some(())
    }

    /// A backslash before a character that is not a letter.
    fn escaped(&mut self) -> Option<()> {
        let second = self.rest[1..].chars().next()?;
        self.rest = &self.rest[1 + second.len_utf8()..];
        match second {
            '{' => self.push(Token::Open('{')),
            '}' => self.push(Token::Close('{')),
            '%' => self.push(Token::Percent),
            '\\' => self.push(if self.system.is_some() { Token::Comma } else { Token::NextRow }),
            '|' => self.push(Token::Bar),
            '$' => self.push(Token::Word("$".to_owned())),
            ',' | ';' | ':' | '!' | ' ' | '(' | ')' | '[' | ']' => {}
            _ => return None,
        }
        Some(())
    }

    /// After `\left` and similar commands: a bar gets a direction, and a dot is dropped.
    fn sized(&mut self, name: &str) -> Option<()> {
        self.skip_spaces();
        if self.take("|") || self.take(r"\vert") {
            let token = if name.starts_with("left") { Token::Open('|') } else { Token::Close('|') };
            self.push(token);
        } else if self.take(".") {
            // `\right.` ends a system.
            return (name == "right" && self.tokens.len() > 1 && !self.in_brace).then_some(());
        } else if name == "left"
            && self.rest.starts_with(r"\{")
            && self.rest[2..].trim_start().starts_with(r"\begin")
        {
            self.rest = &self.rest[2..];
            self.in_brace = true;
        }
        Some(())
    }

    /// `\text{...}`: words, or a formula in upright letters.
    fn text(&mut self, command: &str) -> Option<()> {
        let content = self.group()?;
        let is_euler = content == "e";
        let content = content.trim();
        let content = content.strip_suffix('.').unwrap_or(content);
        // Dollars end and begin a formula in words, unless they are escaped.
        let content = content.replace(r"\ ", " ").replace('~', " ").replace(r"\$", "\u{1}");
        let content = content.replace('$', "").replace('\u{1}', "$").trim().to_owned();
        let is_abbreviated =
            content.chars().all(|c| c.is_alphabetic() || " .".contains(c)) && half_of_day(&content).is_none();
        let content = if is_abbreviated { content.replace('.', "") } else { content };
        let is_math = command.starts_with("math") || command == "operatorname";
        let is_variable = command == "mathbf" && content.len() == 1 && content.starts_with(is_latin);
        if is_variable || is_euler || (is_math && content == "i") {
            self.tokens.extend(content.chars().map(letter));
        } else if content.chars().all(|c| c.is_alphabetic() || is_mark(c) || c == ' ') {
            for word in content.split_whitespace() {
                let lower = word.to_lowercase();
                // A single letter keeps its case, since it may be a variable.
                let plain = if word.len() == 1 { word.to_owned() } else { lower.clone() };
                self.tokens.push(phrase(&lower).unwrap_or(Token::Word(plain)));
            }
        } else {
            self.tokens.extend(lex_upright(&content)?);
        }
        Some(())
    }

    /// The content of the braces that follow.
    fn group(&mut self) -> Option<&str> {
        self.skip_spaces();
        let inner = self.rest.strip_prefix('{')?;
        let mut depth = 1;
        let end = inner.bytes().position(|byte| {
            depth += i32::from(byte == b'{') - i32::from(byte == b'}');
            depth == 0
        })?;
        self.rest = &inner[end + 1..];
        Some(&inner[..end])
    }

    /// `\angle ABC` and `\triangle ABC` are names.
    fn figure(&mut self, command: &str) -> Option<()> {
        self.skip_spaces();
        let content = match self.rest.starts_with('{') {
            true => self.group()?,
            false => {
                let (name, rest) = self.rest.split_at(word_length(self.rest));
                self.rest = rest;
                name
            }
        };
        let is_name = !content.is_empty() && content.bytes().all(|byte| byte.is_ascii_alphabetic());
        let kind = if command == "triangle" { "triangle" } else { "angle" };
        let name = is_name.then(|| Token::Symbol(format!("{kind} {content}")))?;
        self.tokens.push(name);
        Some(())
    }

    /// A letter with an accent is another variable, and a bar or an arrow over two points is their segment.
    fn accent(&mut self, command: &str) -> Option<()> {
        let content = self.group()?.trim();
        let is_segment = content.len() == 2 && content.bytes().all(|byte| byte.is_ascii_uppercase());
        let name = match content.len() {
            2 if is_segment && ["overline", "bar"].contains(&command) => content.to_owned(),
            2 if is_segment => format!("{command} {content}"),
            1 if content.as_bytes()[0].is_ascii_alphabetic() => format!("{command} {content}"),
            _ => return None,
        };
        self.tokens.push(Token::Symbol(name));
        Some(())
    }

    /// `\frac12`: without braces each argument is one digit.
    fn two_digits(&mut self, token: Token) {
        self.tokens.push(token);
        for _ in 0..2 {
            self.skip_spaces();
            if self.digits_at(0) == 0 {
                return;
            }
            let digit = self.rest.as_bytes()[0] - b'0';
            let value = BigRational::from(BigInt::from(digit));
            self.tokens.push(Token::Number(Number { value, places: None }));
            self.rest = &self.rest[1..];
        }
    }

    /// A matrix, or a system, whose rows are a list.
    fn environment(&mut self, begins: bool) -> Option<()> {
        const MATRICES: [&str; 5] = ["matrix", "pmatrix", "bmatrix", "smallmatrix", "array"];
        const SYSTEMS: [&str; 7] = ["cases", "aligned", "align", "align*", "gathered", "split", "array"];
        let inner = self.rest.strip_prefix('{')?;
        let (name, rest) = inner.split_once('}')?;
        self.rest = rest;
        if begins && name == "array" {
            self.skip_spaces();
            self.rest = self.rest.strip_prefix('{')?.split_once('}')?.1;
        }
        let is_system = name != "array" || self.in_brace;
        if SYSTEMS.contains(&name) && is_system {
            self.system = begins.then(|| name == "cases");
            self.in_brace &= begins;
            if self.tokens.last() == Some(&Token::Comma) {
                self.tokens.pop();
            }
            return Some(());
        }
        let is_matrix = MATRICES.contains(&name) && self.system.is_none();
        is_matrix.then(|| self.push(if begins { Token::BeginMatrix } else { Token::EndMatrix }))
    }

    fn sign(&mut self, first: char) -> Option<()> {
        for degree in [r"^\circ", r"^{\circ}", r"^ \circ", r"^{ \circ }"] {
            if self.take(degree) {
                self.push(Token::Degree);
                return Some(());
            }
        }
        for prime in [r"^\prime", r"^{\prime}"] {
            if self.take(prime) {
                self.push(Token::Prime);
                return Some(());
            }
        }
        for (text, token) in TWO_SIGNS {
            if self.take(text) {
                self.push(token.clone());
                return Some(());
            }
        }
        self.rest = &self.rest[first.len_utf8()..];
        // The columns of aligned equations are parts of one.
        if first == '&' && self.system == Some(false) {
            return Some(());
        }
        let token = symbol(first)?;
        self.push(token);
        Some(())
    }
}

/// Tokens of a `\text{...}` that is more than words; it cannot contain another `\text`.
fn lex_upright(text: &str) -> Option<Vec<Token>> {
    if text.contains(r"\text") {
        return None;
    }
    // `km/h`: an upright letter is a unit if a number precedes it.
    let upright = |token| match token {
        Token::Symbol(name) => Token::Word(name),
        other => other,
    };
    Some(lex(text, false)?.into_iter().map(upright).collect())
}

/// Returns true for the first letter of a word or of a product, Greek excluded.
fn starts_word(c: char) -> bool {
    is_latin(c) || is_foreign_letter(c)
}

fn is_latin(c: char) -> bool {
    let code = c as u32;
    c.is_ascii_alphabetic()
        || (c.is_alphabetic() && ((0xc0..0x250).contains(&code) || (0x1e00..0x1f00).contains(&code)))
}

/// Bytes of the letters of one script at the start of `text`.
fn word_length(text: &str) -> usize {
    let is_foreign = text.starts_with(is_foreign_letter);
    let belongs = |c: &char| {
        if is_foreign { is_foreign_letter(*c) || is_mark(*c) } else { is_latin(*c) || is_mark(*c) }
    };
    text.chars().take_while(belongs).map(char::len_utf8).sum()
}

/// `a.m.` or `p.m.` at the start of `text`.
fn half_of_day(text: &str) -> Option<&str> {
    let found =
        text.get(..3).filter(|found| ["a.m", "p.m"].iter().any(|half| found.eq_ignore_ascii_case(half)))?;
    let follows = text[found.len()..].starts_with(is_latin);
    let length = if text[found.len()..].starts_with('.') { 4 } else { 3 };
    (!follows).then_some(&text[..length])
}

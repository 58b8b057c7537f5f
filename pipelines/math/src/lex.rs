//! Tokenizer of LaTeX and plain notation.

use num_bigint::BigInt;
use num_rational::BigRational;

use super::expr::{Constant, Function, Number, Relation};

#[derive(Clone, Debug, PartialEq)]
pub(super) enum Token {
    Number(Number),
    Constant(Constant),
    Symbol(String),
    Word(String),
    Function(Function),
    /// `\frac`, which takes two arguments.
    Fraction,
    /// `\binom`, which takes two arguments.
    Choose,
    /// `\sqrt`, with an optional degree in square brackets.
    SquareRoot,
    Plus,
    Minus,
    PlusMinus,
    MinusPlus,
    Times,
    Divide,
    Power,
    Subscript,
    Factorial,
    Percent,
    Degree,
    Comma,
    And,
    Or,
    Colon,
    /// `(`, `[`, `{` of a set, `<` for a group's brace, and `f`, `c`, `|` for floor, ceiling and absolute
    /// value.
    Open(char),
    /// Closes the [`Token::Open`] with the same character.
    Close(char),
    /// `|`, which may open or close.
    Bar,
    Relation(Relation),
    Union,
    EmptySet,
    BeginMatrix,
    EndMatrix,
    NextCell,
    NextRow,
}

/// Limit of digits in a literal, and of the power of ten in its exponent.
const MOST_DIGITS: usize = 300;

/// Tokens of `text`; `None` if some part of it is unknown.
pub(super) fn lex(text: &str) -> Option<Vec<Token>> {
    let mut lexer = Lexer { rest: text, depth: 0, tokens: Vec::new() };
    while !lexer.rest.is_empty() {
        lexer.next()?;
    }
    Some(lexer.tokens)
}

struct Lexer<'a> {
    rest: &'a str,
    /// Number of open brackets, inside which a comma never groups digits.
    depth: usize,
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
        } else if first.is_ascii_alphabetic() {
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

    fn take(&mut self, prefix: &str) -> bool {
        let taken = self.rest.strip_prefix(prefix);
        self.rest = taken.unwrap_or(self.rest);
        taken.is_some()
    }

    fn skip_spaces(&mut self) {
        self.rest = self.rest.trim_start();
    }

    fn digits_at(&self, start: usize) -> usize {
        self.rest.bytes().skip(start).take_while(u8::is_ascii_digit).count()
    }

    fn take_digits(&mut self, digits: &mut String) -> usize {
        let count = self.digits_at(0);
        digits.push_str(&self.rest[..count]);
        self.rest = &self.rest[count..];
        count
    }

    /// `12`, `1,234`, `0.5`, `1.5e-3`, `0.\overline{3}`.
    fn number(&mut self) -> Option<Number> {
        let mut digits = String::new();
        let first = self.take_digits(&mut digits);
        if (1..=3).contains(&first) && !digits.starts_with('0') {
            self.take_groups(&mut digits);
        }
        let mut places = None;
        if self.rest.starts_with('.') && !self.rest.starts_with("..") {
            self.rest = &self.rest[1..];
            let count = self.take_digits(&mut digits);
            // `5.` is an integer at the end of a sentence.
            places = (count > 0).then_some(count as i32);
            if self.rest.starts_with(r"\overline{") {
                return self.repeating(&digits, count as u32);
            }
        }
        if digits.len() > MOST_DIGITS {
            return None;
        }
        let mut exponent = -places.unwrap_or(0);
        if let Some(power) = self.take_exponent()? {
            exponent += power;
            places = places.map(|places| places - power);
        }
        let value = BigRational::from(digits.parse::<BigInt>().ok()?) * power_of_ten(exponent);
        Some(Number { value, places })
    }

    /// Takes groups of thousands: `,234` outside of brackets, `{,}234` and `\,234` anywhere.
    fn take_groups(&mut self, digits: &mut String) {
        let separators = if self.depth == 0 { &[",", r",\!", "{,}", r"\,"][..] } else { &["{,}", r"\,"][..] };
        for separator in separators {
            let groups = |rest: &str| {
                let mut length = 0;
                while let Some(group) = rest[length..].strip_prefix(separator) {
                    if group.bytes().take_while(u8::is_ascii_digit).count() != 3 {
                        break;
                    }
                    length += separator.len() + 3;
                }
                length
            };
            let length = groups(self.rest);
            // `1,234,5` does not group digits.
            let follows = self.rest[length..].strip_prefix(separator).unwrap_or_default();
            if length > 0 && !follows.starts_with(|c: char| c.is_ascii_digit()) {
                digits.extend(self.rest[..length].chars().filter(char::is_ascii_digit));
                self.rest = &self.rest[length..];
                return;
            }
        }
    }

    /// The power in `e5` or `E-5`, if digits follow; otherwise `e` is Euler's number.
    fn take_exponent(&mut self) -> Option<Option<i32>> {
        let Some(after) = self.rest.strip_prefix(['e', 'E']) else { return Some(None) };
        let unsigned = after.strip_prefix(['+', '-']).unwrap_or(after);
        let count = unsigned.bytes().take_while(u8::is_ascii_digit).count();
        if count == 0 {
            return Some(None);
        }
        let length = after.len() - unsigned.len() + count;
        let power: i32 = after[..length].parse().ok()?;
        self.rest = &after[length..];
        (power.unsigned_abs() as usize <= MOST_DIGITS).then_some(Some(power))
    }

    /// A number from its digits, with `places` decimals, and a repeating period.
    fn repeating(&mut self, digits: &str, places: u32) -> Option<Number> {
        self.take(r"\overline{");
        let mut period = String::new();
        let count = self.take_digits(&mut period);
        if count == 0 || digits.len() + count > MOST_DIGITS || !self.take("}") {
            return None;
        }
        let before = BigRational::from(format!("0{digits}").parse::<BigInt>().ok()?);
        let nines = power_of_ten(count as i32) - BigRational::from(BigInt::from(1));
        let period = BigRational::from(period.parse::<BigInt>().ok()?) / nines;
        Some(Number { value: (before + period) * power_of_ten(-(places as i32)), places: None })
    }

    /// A run of letters: a function, a word, or a product of variables.
    fn letters(&mut self) {
        let length = self.rest.bytes().take_while(u8::is_ascii_alphabetic).count();
        let (run, rest) = self.rest.split_at(length);
        self.rest = rest;
        let lower = run.to_ascii_lowercase();
        if run == "oo" || ["infinity", "inf"].contains(&&*lower) {
            self.tokens.push(Token::Constant(Constant::Infinity));
        } else if run == "sqrt" {
            self.tokens.push(Token::SquareRoot);
        } else if let Some(function) = function(run) {
            self.tokens.push(Token::Function(function));
        } else if let Some(token) = named(run) {
            self.tokens.push(token);
        } else if let Some(token) = phrase(&lower) {
            self.tokens.push(token);
        } else if run.bytes().all(|byte| byte.is_ascii_uppercase()) {
            // `AB` is a line segment, not a product.
            self.tokens.push(Token::Symbol(run.to_owned()));
        } else if length == 1 || (length == 2 && !SHORT_WORDS.contains(&&*lower)) {
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
        let (name, rest) = self.rest[1..].split_at(length);
        self.rest = rest;
        match name {
            "left" | "right" | "big" | "Big" | "bigg" | "Bigg" | "bigl" | "bigr" | "Bigl" | "Bigr" => {
                return self.sized(name);
            }
            "bf" | "boldsymbol" | "bm" | "displaystyle" | "textstyle" | "limits" | "quad" | "qquad"
            | "space" => {}
            "text" | "textbf" | "textit" | "textrm" | "mathrm" | "mathbf" | "mbox" | "operatorname"
            | "mathit" | "mathbb" | "mathcal" => self.text()?,
            "frac" | "dfrac" | "tfrac" | "cfrac" => self.two_digits(Token::Fraction),
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
            '\\' => self.push(Token::NextRow),
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
            return None;
        }
        Some(())
    }

    /// `\text{...}`: words, or a formula in upright letters.
    fn text(&mut self) -> Option<()> {
        self.skip_spaces();
        let inner = self.rest.strip_prefix('{')?;
        let end = inner.find(['{', '}']).filter(|&end| inner.as_bytes()[end] == b'}')?;
        self.rest = &inner[end + 1..];
        let content = inner[..end].trim();
        if content.bytes().all(|byte| byte.is_ascii_alphabetic() || byte == b' ') {
            for word in content.split_ascii_whitespace() {
                let lower = word.to_ascii_lowercase();
                // A single letter keeps its case, since it may be a variable.
                let plain = if word.len() == 1 { word.to_owned() } else { lower.clone() };
                self.tokens.push(phrase(&lower).unwrap_or(Token::Word(plain)));
            }
        } else {
            self.tokens.extend(lex_upright(content)?);
        }
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

    fn environment(&mut self, begins: bool) -> Option<()> {
        let inner = self.rest.strip_prefix('{')?;
        let (name, rest) = inner.split_once('}')?;
        if !["matrix", "pmatrix", "bmatrix", "smallmatrix", "array"].contains(&name) {
            return None;
        }
        self.rest = rest;
        if begins && name == "array" {
            self.skip_spaces();
            self.rest = self.rest.strip_prefix('{')?.split_once('}')?.1;
        }
        self.push(if begins { Token::BeginMatrix } else { Token::EndMatrix });
        Some(())
    }

    fn sign(&mut self, first: char) -> Option<()> {
        for degree in [r"^\circ", r"^{\circ}", r"^ \circ", r"^{ \circ }"] {
            if self.take(degree) {
                self.push(Token::Degree);
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
        let token = symbol(first)?;
        self.push(token);
        Some(())
    }
}

/// Tokens of a `\text{...}` that is more than words; it cannot contain another `\text`.
fn lex_upright(text: &str) -> Option<Vec<Token>> {
    if text.contains('\\') {
        return None;
    }
    // `km/h`: an upright letter is a unit if a number precedes it.
    let upright = |token| match token {
        Token::Symbol(name) => Token::Word(name),
        other => other,
    };
    Some(lex(text)?.into_iter().map(upright).collect())
}

fn power_of_ten(power: i32) -> BigRational {
    num_traits::Pow::pow(BigRational::from(BigInt::from(10)), power)
}

/// Runs of two letters that are words or units, not products.
const SHORT_WORDS: [&str; 37] = [
    "no", "on", "is", "if", "to", "of", "in", "at", "as", "by", "we", "so", "it", "an", "am", "pm", "do",
    "up", "go", "cm", "mm", "km", "kg", "mg", "ml", "ft", "mi", "hr", "oz", "lb", "st", "nd", "rd", "th",
    "us", "he", "me",
];

const TWO_SIGNS: [(&str, Token); 9] = [
    ("**", Token::Power),
    ("<=", Token::Relation(Relation::LessEqual)),
    (">=", Token::Relation(Relation::GreaterEqual)),
    ("!=", Token::Relation(Relation::NotEqual)),
    ("==", Token::Relation(Relation::Equal)),
    ("=<", Token::Relation(Relation::LessEqual)),
    ("+/-", Token::PlusMinus),
    ("+-", Token::PlusMinus),
    ("·", Token::Times),
];

fn symbol(first: char) -> Option<Token> {
    Some(match first {
        '+' => Token::Plus,
        '-' | '−' | '–' => Token::Minus,
        '±' => Token::PlusMinus,
        '∓' => Token::MinusPlus,
        '*' | '×' | '⋅' => Token::Times,
        '/' | '÷' => Token::Divide,
        '^' => Token::Power,
        '_' => Token::Subscript,
        '!' => Token::Factorial,
        '%' => Token::Percent,
        '°' => Token::Degree,
        ',' | ';' => Token::Comma,
        ':' => Token::Colon,
        '(' => Token::Open('('),
        ')' => Token::Close('('),
        '[' => Token::Open('['),
        ']' => Token::Close('['),
        '{' => Token::Open('<'),
        '}' => Token::Close('<'),
        '|' => Token::Bar,
        '&' => Token::NextCell,
        '=' => Token::Relation(Relation::Equal),
        '≈' => Token::Relation(Relation::About),
        '≠' => Token::Relation(Relation::NotEqual),
        '<' => Token::Relation(Relation::Less),
        '≤' => Token::Relation(Relation::LessEqual),
        '>' => Token::Relation(Relation::Greater),
        '≥' => Token::Relation(Relation::GreaterEqual),
        '∈' => Token::Relation(Relation::In),
        '∪' => Token::Union,
        '∅' => Token::EmptySet,
        '√' => Token::SquareRoot,
        '∞' => Token::Constant(Constant::Infinity),
        'π' => Token::Constant(Constant::Pi),
        'α' => Token::Symbol("alpha".into()),
        'β' => Token::Symbol("beta".into()),
        'θ' => Token::Symbol("theta".into()),
        'λ' => Token::Symbol("lambda".into()),
        '$' | '€' | '£' => Token::Word(first.to_string()),
        _ => return None,
    })
}

fn letter(letter: char) -> Token {
    match letter {
        'e' => Token::Constant(Constant::E),
        'i' => Token::Constant(Constant::I),
        other => Token::Symbol(other.to_string()),
    }
}

/// Words with a meaning in mathematics, or units.
fn phrase(word: &str) -> Option<Token> {
    match word {
        "and" => Some(Token::And),
        "or" => Some(Token::Or),
        "percent" => Some(Token::Percent),
        "degree" | "degrees" => Some(Token::Degree),
        _ => None,
    }
}

/// Numbers and variables with names of several letters, spelled the same in LaTeX and plain notation.
fn named(name: &str) -> Option<Token> {
    const SYMBOLS: [&str; 14] = [
        "alpha", "beta", "gamma", "delta", "epsilon", "theta", "lambda", "sigma", "omega", "Omega", "Delta",
        "Gamma", "phi", "rho",
    ];
    match name {
        "pi" => Some(Token::Constant(Constant::Pi)),
        _ if SYMBOLS.contains(&name) => Some(Token::Symbol(name.to_owned())),
        _ => None,
    }
}

fn function(name: &str) -> Option<Function> {
    use Function::*;
    Some(match name {
        "sin" => Sin,
        "cos" => Cos,
        "tan" => Tan,
        "cot" => Cot,
        "sec" => Sec,
        "csc" => Csc,
        "arcsin" | "asin" => Arcsin,
        "arccos" | "acos" => Arccos,
        "arctan" | "atan" => Arctan,
        "sinh" => Sinh,
        "cosh" => Cosh,
        "tanh" => Tanh,
        "exp" => Exp,
        "ln" => Ln,
        "log" | "lg" => Log,
        "abs" => Abs,
        "floor" => Floor,
        "ceil" => Ceiling,
        _ => return None,
    })
}

/// A LaTeX command that is a single token.
fn command(name: &str) -> Option<Token> {
    if let Some(function) = function(name) {
        return Some(Token::Function(function));
    }
    Some(match name {
        "cdot" | "times" | "ast" => Token::Times,
        "div" => Token::Divide,
        "pm" => Token::PlusMinus,
        "mp" => Token::MinusPlus,
        "infty" => Token::Constant(Constant::Infinity),
        "leq" | "le" | "leqslant" => Token::Relation(Relation::LessEqual),
        "geq" | "ge" | "geqslant" => Token::Relation(Relation::GreaterEqual),
        "lt" => Token::Relation(Relation::Less),
        "gt" => Token::Relation(Relation::Greater),
        "neq" | "ne" => Token::Relation(Relation::NotEqual),
        "approx" => Token::Relation(Relation::About),
        "in" => Token::Relation(Relation::In),
        "cup" => Token::Union,
        "emptyset" | "varnothing" => Token::EmptySet,
        "degree" => Token::Degree,
        "lbrace" => Token::Open('{'),
        "rbrace" => Token::Close('{'),
        "lbrack" => Token::Open('['),
        "rbrack" => Token::Close('['),
        "langle" => Token::Open('('),
        "rangle" => Token::Close('('),
        "lfloor" => Token::Open('f'),
        "rfloor" => Token::Close('f'),
        "lceil" => Token::Open('c'),
        "rceil" => Token::Close('c'),
        "lvert" => Token::Open('|'),
        "rvert" => Token::Close('|'),
        "vert" | "mid" => Token::Bar,
        "varphi" => Token::Symbol("phi".into()),
        "mu" | "nu" | "xi" | "tau" | "psi" | "chi" | "eta" | "zeta" | "kappa" | "ell" => {
            Token::Symbol(name.to_owned())
        }
        _ => return named(name),
    })
}

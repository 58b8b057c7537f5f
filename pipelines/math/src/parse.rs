//! Parser of tokens into an expression: recursive descent with bounds on length, depth and size.
//!
//! ```text
//! list     = relation { "," relation }
//! relation = union { ("=" | "<" | ...) union }
//! union    = ratio { "∪" ratio }
//! ratio    = sum { ":" sum }
//! sum      = product { ("+" | "-") product }
//! product  = sign { ("*" | "/" | nothing) sign }
//! sign     = "-" sign | power
//! power    = postfix [ "^" exponent ]
//! postfix  = primary { "!" | "%" | "°" | "_" name }
//! ```

use num_bigint::BigInt;
use num_rational::BigRational;
use num_traits::{One, Signed};

use super::expr::{Brackets, Constant, Expr, Function, Number, Relation, Scale};
use super::lex::{Token, lex};
use super::unit::take_unit;

/// Limit of a text's bytes; a longer text is not parsed.
pub(crate) const MOST_BYTES: usize = 1000;

/// Limit of nested brackets, powers and signs.
const MOST_DEPTH: usize = 40;

/// Limit of an expression's nodes.
const MOST_NODES: usize = 400;

/// A parsed answer.
#[derive(Clone, Debug, PartialEq)]
pub(super) struct Answer {
    pub(super) expr: Expr,
    /// Canonical spelling of the unit.
    pub(super) unit: Option<String>,
}

/// Parses `text`; `None` if it is not known mathematics.
pub(super) fn parse(text: &str) -> Option<Answer> {
    if text.len() > MOST_BYTES {
        return None;
    }
    let mut tokens = lex(text)?;
    let unit = take_unit(&mut tokens)?;
    let mut parser =
        Parser { tokens: &tokens, position: 0, depth: 0, nodes: 0, sign: Sign::Upper, forked: false };
    let expr = parser.list()?;
    (parser.position == tokens.len()).then_some(Answer { expr, unit })
}

/// The sign that `±` stands for; the upper one is plus.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Sign {
    Upper,
    Lower,
}

struct Parser<'a> {
    tokens: &'a [Token],
    position: usize,
    depth: usize,
    nodes: usize,
    sign: Sign,
    /// True once a `±` was parsed.
    forked: bool,
}

impl Parser<'_> {
    fn peek(&self) -> Option<&Token> {
        self.tokens.get(self.position)
    }

    fn take(&mut self, token: &Token) -> bool {
        let found = self.peek() == Some(token);
        self.position += usize::from(found);
        found
    }

    fn expect(&mut self, token: &Token) -> Option<()> {
        self.take(token).then_some(())
    }

    /// Counts a new node.
    fn node(&mut self, expr: Expr) -> Option<Expr> {
        self.nodes += 1;
        (self.nodes <= MOST_NODES).then_some(expr)
    }

    /// Runs `inner` one level deeper.
    fn deeper<T>(&mut self, inner: impl FnOnce(&mut Self) -> Option<T>) -> Option<T> {
        if self.depth == MOST_DEPTH {
            return None;
        }
        self.depth += 1;
        let result = inner(self);
        self.depth -= 1;
        result
    }

    /// A single item is itself, several are a bare list.
    fn list(&mut self) -> Option<Expr> {
        let mut items = self.items(true)?;
        if items.len() == 1 {
            return items.pop();
        }
        let bounds =
            |item: &Expr| matches!(item, Expr::Relation(_, relations) if !relations[0].gives_a_value());
        let said = |word| self.tokens.contains(word) && items.iter().any(bounds);
        let joined = match (said(&Token::And), said(&Token::Or)) {
            (true, false) => Brackets::Both,
            (false, true) => Brackets::Either,
            _ => Brackets::Bare,
        };
        self.node(Expr::Sequence(joined, items))
    }

    /// Items between commas. With `forks`, an item with `±` becomes two.
    fn items(&mut self, forks: bool) -> Option<Vec<Expr>> {
        let forks = forks && self.sign == Sign::Upper;
        let mut items = Vec::new();
        loop {
            let start = self.position;
            let outer = std::mem::replace(&mut self.forked, false);
            items.push(self.relation()?);
            if self.forked && forks {
                self.position = start;
                self.sign = Sign::Lower;
                items.push(self.relation()?);
                self.sign = Sign::Upper;
                self.forked = false;
            }
            self.forked |= outer;
            if !self.take_comma() {
                return Some(items);
            }
            // `1, 2, and 3`
            while self.take_comma() {}
        }
    }

    /// Takes a comma, or a word in its place.
    fn take_comma(&mut self) -> bool {
        [Token::Comma, Token::And, Token::Or].iter().any(|token| self.take(token))
    }

    fn relation(&mut self) -> Option<Expr> {
        let mut sides = vec![self.union()?];
        let mut relations: Vec<Relation> = Vec::new();
        while let Some(&Token::Relation(relation)) = self.peek() {
            self.position += 1;
            relations.push(relation);
            sides.push(self.union()?);
        }
        if relations.is_empty() { sides.pop() } else { self.node(Expr::Relation(sides, relations)) }
    }

    fn union(&mut self) -> Option<Expr> {
        let mut parts = vec![self.ratio()?];
        while self.take(&Token::Union) {
            parts.push(self.ratio()?);
        }
        if parts.len() == 1 { parts.pop() } else { self.node(Expr::Union(parts)) }
    }

    /// `3:4` is a pair, not a quotient, since it may be a time or a score.
    fn ratio(&mut self) -> Option<Expr> {
        let mut parts = vec![self.sum()?];
        while self.take(&Token::Colon) {
            parts.push(self.sum()?);
        }
        if parts.len() == 1 {
            return parts.pop();
        }
        parts.insert(0, Expr::Words(":".to_owned()));
        self.node(Expr::Sequence(Brackets::Square, parts))
    }

    fn sum(&mut self) -> Option<Expr> {
        let mut terms = vec![self.product()?];
        loop {
            let minus = match self.peek() {
                Some(Token::Plus) => false,
                Some(Token::Minus) => true,
                Some(Token::PlusMinus) => self.fork(false),
                Some(Token::MinusPlus) => self.fork(true),
                _ => break,
            };
            self.position += 1;
            let term = self.product()?;
            terms.push(if minus { self.node(Expr::Neg(Box::new(term)))? } else { term });
        }
        if terms.len() == 1 { terms.pop() } else { self.node(Expr::Add(terms)) }
    }

    /// Returns true if a `±`, or a `∓` if `swapped`, is a minus here.
    fn fork(&mut self, swapped: bool) -> bool {
        self.forked = true;
        (self.sign == Sign::Lower) != swapped
    }

    fn product(&mut self) -> Option<Expr> {
        let mut product = self.sign()?;
        loop {
            if self.take(&Token::Times) {
                let factor = self.sign()?;
                product = self.times(product, factor)?;
            } else if self.take(&Token::Divide) {
                let divisor = self.sign()?;
                product = self.node(Expr::Div(Box::new(product), Box::new(divisor)))?;
            } else if let Some(mixed) = self.mixed_number(&product) {
                product = self.node(mixed)?;
            } else if self.starts_factor() {
                let factor = self.power()?;
                product = self.times(product, factor)?;
            } else {
                return Some(product);
            }
        }
    }

    fn times(&mut self, left: Expr, right: Expr) -> Option<Expr> {
        let factors = match left {
            Expr::Mul(mut factors) => {
                factors.push(right);
                factors
            }
            left => vec![left, right],
        };
        self.node(Expr::Mul(factors))
    }

    /// `3 1/2` and `3\frac{1}{2}`: an integer followed by a proper fraction is a sum.
    fn mixed_number(&mut self, whole: &Expr) -> Option<Expr> {
        let whole = literal(whole)?;
        if !matches!(self.tokens[self.position - 1], Token::Number(_)) || !whole.value.is_integer() {
            return None;
        }
        use Token::{Close, Divide, Fraction, Number as N, Open};
        let (top, bottom, length) = match &self.tokens[self.position..] {
            [N(top), Divide, N(bottom), ..] => (top, bottom, 3),
            [Fraction, N(top), N(bottom), ..] => (top, bottom, 3),
            [Fraction, Open('<'), N(top), Close('<'), Open('<'), N(bottom), Close('<'), ..] => {
                (top, bottom, 7)
            }
            _ => return None,
        };
        let proper = top.value.is_integer() && bottom.value.is_integer() && top.value < bottom.value;
        if !proper || whole.places.is_some() || top.places.is_some() || bottom.places.is_some() {
            return None;
        }
        let part = &top.value / &bottom.value;
        let value = if whole.value.is_negative() { whole.value - part } else { whole.value + part };
        self.position += length;
        Some(Expr::Number(Number { value, places: None }))
    }

    /// Returns true if an implicit product continues. A number does not continue one: `2 3` may be anything.
    fn starts_factor(&self) -> bool {
        match self.peek() {
            Some(
                Token::Constant(_)
                | Token::Symbol(_)
                | Token::Function(_)
                | Token::Fraction
                | Token::Choose
                | Token::SquareRoot
                | Token::BeginMatrix
                | Token::Open(_),
            ) => true,
            // A bar after a factor closes an open absolute value; otherwise it opens one, as in `2|x|`.
            Some(Token::Bar) => !self.bar_is_open(),
            _ => false,
        }
    }

    /// Returns true if an odd number of plain bars precedes.
    fn bar_is_open(&self) -> bool {
        self.tokens[..self.position].iter().filter(|token| **token == Token::Bar).count() % 2 == 1
    }

    fn sign(&mut self) -> Option<Expr> {
        let minus = match self.peek() {
            Some(Token::Plus) => false,
            Some(Token::Minus) => true,
            Some(Token::PlusMinus) => self.fork(false),
            Some(Token::MinusPlus) => self.fork(true),
            _ => return self.power(),
        };
        self.position += 1;
        let operand = self.deeper(Self::sign)?;
        if minus { self.node(Expr::Neg(Box::new(operand))) } else { Some(operand) }
    }

    fn power(&mut self) -> Option<Expr> {
        let base = self.postfix()?;
        if !self.take(&Token::Power) {
            return Some(base);
        }
        let exponent = self.deeper(Self::sign)?;
        self.node(Expr::Pow(Box::new(base), Box::new(exponent)))
    }

    fn postfix(&mut self) -> Option<Expr> {
        let mut operand = self.primary()?;
        loop {
            operand = if self.take(&Token::Factorial) {
                self.node(Expr::Call(Function::Factorial, vec![operand]))?
            } else if self.take(&Token::Percent) {
                self.node(Expr::Scaled(Scale::Percent, Box::new(operand)))?
            } else if self.take(&Token::Degree) {
                self.node(Expr::Scaled(Scale::Degree, Box::new(operand)))?
            } else if self.take(&Token::Subscript) {
                let Expr::Symbol(name) = operand else { return None };
                Expr::Symbol(format!("{name}_{}", self.index()?))
            } else {
                return Some(operand);
            };
        }
    }

    /// The index of a variable: names and numbers.
    fn index(&mut self) -> Option<String> {
        let braced = self.take(&Token::Open('<'));
        let mut index = String::new();
        loop {
            match self.peek()? {
                Token::Number(number) => index.push_str(&number.value.to_string()),
                Token::Symbol(name) | Token::Word(name) => index.push_str(name),
                Token::Constant(Constant::I) => index.push('i'),
                Token::Constant(Constant::E) => index.push('e'),
                _ => return None,
            }
            self.position += 1;
            if !braced || self.take(&Token::Close('<')) {
                return Some(index);
            }
        }
    }

    fn primary(&mut self) -> Option<Expr> {
        self.deeper(Self::primary_within)
    }

    fn primary_within(&mut self) -> Option<Expr> {
        let token = self.peek()?.clone();
        self.position += 1;
        let expr = match token {
            Token::Number(number) => Expr::Number(number),
            Token::Constant(constant) => Expr::Constant(constant),
            Token::Symbol(name) => Expr::Symbol(name),
            Token::Word(word) => self.words(word),
            Token::EmptySet => Expr::Sequence(Brackets::Braces, Vec::new()),
            Token::Function(function) => self.function(function)?,
            Token::Fraction => {
                let (top, bottom) = (self.argument()?, self.argument()?);
                // `dy/dx` is not a quotient in which the d cancels.
                if is_differential(&top) && is_differential(&bottom) {
                    return None;
                }
                Expr::Div(Box::new(top), Box::new(bottom))
            }
            Token::Choose => Expr::Call(Function::Binomial, vec![self.argument()?, self.argument()?]),
            Token::SquareRoot => self.root()?,
            Token::BeginMatrix => self.matrix()?,
            Token::Open(bracket) => return self.bracketed(bracket),
            Token::Bar => {
                let inner = self.sum()?;
                self.expect(&Token::Bar)?;
                Expr::Call(Function::Abs, vec![inner])
            }
            _ => return None,
        };
        self.node(expr)
    }

    fn words(&mut self, first: String) -> Expr {
        let mut words = first;
        while let Some(Token::Word(word)) = self.tokens.get(self.position) {
            words = format!("{words} {word}");
            self.position += 1;
        }
        let mut letters = words.chars();
        match (letters.next(), letters.next()) {
            (Some(letter), None) if letter.is_ascii_alphabetic() => Expr::Symbol(words),
            _ => Expr::Words(words),
        }
    }

    /// The content of brackets whose opening one was read: a group, a tuple, a set, an interval.
    fn bracketed(&mut self, open: char) -> Option<Expr> {
        let function = match open {
            'f' => Some(Function::Floor),
            'c' => Some(Function::Ceiling),
            '|' => Some(Function::Abs),
            _ => None,
        };
        if let Some(function) = function {
            let inner = self.sum()?;
            self.expect(&Token::Close(open))?;
            return self.node(Expr::Call(function, vec![inner]));
        }
        if open == '{' && self.take(&Token::Close('{')) {
            return self.node(Expr::Sequence(Brackets::Braces, Vec::new()));
        }
        let mut items = self.items(open == '{')?;
        let &Token::Close(close) = self.peek()? else { return None };
        self.position += 1;
        let brackets = match (open, close, items.len()) {
            ('(', '(', 1) | ('[', '[', 1) | ('<', '<', 1) => return items.pop(),
            // Braces without a backslash are a set if they hold several items.
            ('{', '{', _) | ('<', '<', _) => Brackets::Braces,
            ('(', '(', _) => Brackets::Round,
            ('[', '[', _) => Brackets::Square,
            ('(', '[', 2) => Brackets::OpenClosed,
            ('[', '(', 2) => Brackets::ClosedOpen,
            _ => return None,
        };
        self.node(Expr::Sequence(brackets, items))
    }

    /// The argument of a LaTeX command: a group, or the next token.
    fn argument(&mut self) -> Option<Expr> {
        self.primary()
    }

    fn root(&mut self) -> Option<Expr> {
        let mut degree = Expr::Number(Number { value: BigRational::from(BigInt::from(2)), places: None });
        if self.take(&Token::Open('[')) {
            degree = self.sum()?;
            self.expect(&Token::Close('['))?;
        }
        Some(Expr::Call(Function::Root, vec![degree, self.argument()?]))
    }

    /// A function with its power, base and argument: `\sin^2 x`, `\log_2 8`, `\sin 2x`.
    fn function(&mut self, function: Function) -> Option<Expr> {
        let mut base = None;
        let mut power = None;
        loop {
            if base.is_none() && function == Function::Log && self.take(&Token::Subscript) {
                base = Some(self.argument()?);
            } else if power.is_none() && self.take(&Token::Power) {
                power = Some(self.deeper(Self::sign)?);
            } else {
                break;
            }
        }
        let argument = self.deeper(Self::function_argument)?;
        let inverse = power.as_ref().is_some_and(|power| {
            matches!(power, Expr::Neg(one) if matches!(&**one, Expr::Number(one) if one.value.is_one()))
        });
        if inverse {
            let inverse = match function {
                Function::Sin => Function::Arcsin,
                Function::Cos => Function::Arccos,
                Function::Tan => Function::Arctan,
                _ => return None,
            };
            return Some(Expr::Call(inverse, vec![argument]));
        }
        let arguments = if function == Function::Log {
            let ten = Expr::Number(Number { value: BigRational::from(BigInt::from(10)), places: None });
            vec![base.unwrap_or(ten), argument]
        } else {
            vec![argument]
        };
        let call = self.node(Expr::Call(function, arguments))?;
        Some(match power {
            Some(power) => Expr::Pow(Box::new(call), Box::new(power)),
            None => call,
        })
    }

    /// The content of parentheses, or all factors up to the next function: `\sin 2x \cos x` is a product of
    /// two.
    fn function_argument(&mut self) -> Option<Expr> {
        if let Some(Token::Open(_)) = self.peek() {
            return self.primary();
        }
        let mut argument = self.sign()?;
        while self.starts_factor() && !matches!(self.peek(), Some(Token::Function(_) | Token::Open('('))) {
            let factor = self.power()?;
            argument = self.times(argument, factor)?;
        }
        if self.take(&Token::Divide) {
            // `\sin x/2` is ambiguous.
            return None;
        }
        Some(argument)
    }

    fn matrix(&mut self) -> Option<Expr> {
        let mut rows = vec![Vec::new()];
        while !self.take(&Token::EndMatrix) {
            let cell = self.sum()?;
            rows.last_mut()?.push(cell);
            if self.take(&Token::NextRow) {
                if self.peek() != Some(&Token::EndMatrix) {
                    rows.push(Vec::new());
                }
            } else if !self.take(&Token::NextCell) && self.peek() != Some(&Token::EndMatrix) {
                return None;
            }
        }
        let width = rows[0].len();
        (width > 0 && rows.iter().all(|row| row.len() == width)).then_some(Expr::Matrix(rows))
    }
}

/// Returns true if it starts with the `d` of a derivative, alone or as part of a variable's name.
fn is_differential(expr: &Expr) -> bool {
    let first = match expr {
        Expr::Mul(factors) => &factors[0],
        other => other,
    };
    matches!(first, Expr::Symbol(name) if name == "d")
}

/// A literal or its negation.
pub(super) fn literal(expr: &Expr) -> Option<Number> {
    match expr {
        Expr::Number(number) => Some(number.clone()),
        Expr::Neg(inner) => match &**inner {
            Expr::Number(number) if !number.value.is_negative() => {
                Some(Number { value: -&number.value, places: number.places })
            }
            _ => None,
        },
        _ => None,
    }
}

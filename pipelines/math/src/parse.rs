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

use num_traits::Signed;

use super::congruence::split_modulus;
use super::expr::{Brackets, Expr, Function, Number, Relation, Scale};
use super::lex::lex;
use super::name::take_names;
use super::region::without_points;
use super::rewrite::rewrite;
use super::token::Token;
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
    /// Modulus of a congruence.
    pub(super) modulus: Option<Expr>,
}

/// Parses `text`; `None` if it is not known mathematics.
pub(super) fn parse(text: &str) -> Option<Answer> {
    parse_with(text, false)
}

/// Parses `text`, with `decimal_comma` in numbers.
pub(super) fn parse_with(text: &str, decimal_comma: bool) -> Option<Answer> {
    if text.len() > MOST_BYTES {
        return None;
    }
    let (text, modulus) = split_modulus(text);
    let modulus = match modulus {
        Some(modulus) => Some(expression(&lex(modulus, decimal_comma)?)?),
        None => None,
    };
    let mut tokens = lex(text, decimal_comma)?;
    rewrite(&mut tokens);
    take_names(&mut tokens);
    let unit = take_unit(&mut tokens)?;
    Some(Answer { expr: expression(&tokens)?, unit, modulus })
}

/// Parses all `tokens`.
fn expression(tokens: &[Token]) -> Option<Expr> {
    let mut parser = Parser { tokens, position: 0, depth: 0, nodes: 0, sign: Sign::Upper, forked: false };
    let expr = parser.list()?;
    (parser.position == tokens.len()).then_some(expr)
}

/// The sign that `±` stands for; the upper one is plus.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Sign {
    Upper,
    Lower,
}

pub(super) struct Parser<'a> {
    pub(super) tokens: &'a [Token],
    pub(super) position: usize,
    depth: usize,
    nodes: usize,
    sign: Sign,
    /// True once a `±` was parsed.
    forked: bool,
}

impl Parser<'_> {
    pub(super) fn peek(&self) -> Option<&Token> {
        self.tokens.get(self.position)
    }

    pub(super) fn take(&mut self, token: &Token) -> bool {
        let found = self.peek() == Some(token);
        self.position += usize::from(found);
        found
    }

    pub(super) fn expect(&mut self, token: &Token) -> Option<()> {
        self.take(token).then_some(())
    }

    /// Counts a new node.
    pub(super) fn node(&mut self, expr: Expr) -> Option<Expr> {
        self.nodes += 1;
        (self.nodes <= MOST_NODES).then_some(expr)
    }

    /// Runs `inner` one level deeper.
    pub(super) fn deeper<T>(&mut self, inner: impl FnOnce(&mut Self) -> Option<T>) -> Option<T> {
        if self.depth == MOST_DEPTH {
            return None;
        }
        self.depth += 1;
        let result = inner(self);
        self.depth -= 1;
        result
    }

    /// A single item is itself, several are a bare list.
    pub(super) fn list(&mut self) -> Option<Expr> {
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
    pub(super) fn items(&mut self, forks: bool) -> Option<Vec<Expr>> {
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

    pub(super) fn relation(&mut self) -> Option<Expr> {
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
        if self.take(&Token::SetMinus) {
            let removed = self.ratio()?;
            return self.node(without_points(&parts[0], removed)?);
        }
        while self.take(&Token::Union) {
            parts.push(self.ratio()?);
        }
        if parts.len() == 1 {
            return parts.pop();
        }
        let mut all = Vec::new();
        for part in &parts {
            let Expr::Sequence(Brackets::Braces, items) = part else { return self.node(Expr::Union(parts)) };
            all.extend(items.iter().cloned());
        }
        // A union of finite sets is a set, in which an element counts once.
        let mut items: Vec<Expr> = Vec::new();
        for item in all {
            if !items.contains(&item) {
                items.push(item);
            }
        }
        self.node(Expr::Sequence(Brackets::Braces, items))
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

    pub(super) fn sum(&mut self) -> Option<Expr> {
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
        let sum = if terms.len() == 1 { terms.pop()? } else { self.node(Expr::Add(terms))? };
        self.infix(sum)
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
                let mixed = self.node(mixed)?;
                product = self.scaled(mixed)?;
            } else if self.starts_factor() {
                let factor = self.power()?;
                product = self.times(product, factor)?;
            } else {
                return Some(product);
            }
        }
    }

    pub(super) fn times(&mut self, left: Expr, right: Expr) -> Option<Expr> {
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
    pub(super) fn starts_factor(&self) -> bool {
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
            // `5!7!`
            Some(Token::Number(_)) => self.tokens[self.position - 1] == Token::Factorial,
            // A bar after a factor closes an open absolute value; otherwise it opens one, as in `2|x|`.
            Some(Token::Bar) => !self.bar_is_open(),
            _ => false,
        }
    }

    /// Returns true if an odd number of plain bars precedes.
    fn bar_is_open(&self) -> bool {
        self.tokens[..self.position].iter().filter(|token| **token == Token::Bar).count() % 2 == 1
    }

    pub(super) fn sign(&mut self) -> Option<Expr> {
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

    pub(super) fn power(&mut self) -> Option<Expr> {
        let base = self.primary()?;
        let base = self.postfix(base)?;
        if !self.take(&Token::Power) {
            return Some(base);
        }
        let rest = &self.tokens[self.position..];
        let is_group = matches!(rest, [Token::Open('<'), ..] | [Token::Number(_), Token::Subscript, ..]);
        if !is_group {
            let exponent = self.deeper(Self::sign)?;
            return self.node(Expr::Pow(Box::new(base), Box::new(exponent)));
        }
        let exponent = self.primary()?;
        // `x^{2}_{1}` is `x_{1}^{2}`.
        let base = if self.take(&Token::Subscript) { self.indexed(base)? } else { base };
        let power = self.node(Expr::Pow(Box::new(base), Box::new(exponent)))?;
        self.postfix(power)
    }

    /// `operand` with the percent or degree sign that follows.
    fn scaled(&mut self, operand: Expr) -> Option<Expr> {
        if self.take(&Token::Percent) {
            self.node(Expr::Scaled(Scale::Percent, Box::new(operand)))
        } else if self.take(&Token::Degree) {
            self.node(Expr::Scaled(Scale::Degree, Box::new(operand)))
        } else {
            Some(operand)
        }
    }

    /// A variable with the index that follows.
    fn indexed(&mut self, variable: Expr) -> Option<Expr> {
        let Expr::Symbol(name) = variable else { return None };
        Some(Expr::Symbol(format!("{name}_{}", self.index()?)))
    }

    /// `operand` with the signs that follow.
    fn postfix(&mut self, mut operand: Expr) -> Option<Expr> {
        loop {
            operand = if self.take(&Token::Factorial) {
                self.node(Expr::Call(Function::Factorial, vec![operand]))?
            } else if matches!(self.peek(), Some(Token::Percent | Token::Degree)) {
                self.scaled(operand)?
            } else if self.take(&Token::Subscript) {
                self.indexed(operand)?
            } else if self.take(&Token::Prime) {
                let Expr::Symbol(name) = operand else { return None };
                Expr::Symbol(format!("{name}'"))
            } else {
                return Some(operand);
            };
        }
    }
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

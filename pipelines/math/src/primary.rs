//! Parser of the parts of a formula: names, brackets, functions, roots and matrices.

use num_bigint::BigInt;
use num_rational::BigRational;
use num_traits::One;

use super::expr::{Brackets, Constant, Expr, Function, Number, Relation};
use super::parse::Parser;
use super::token::Token;

impl Parser<'_> {
    /// The index of a variable: names and numbers, and in braces their sums.
    pub(super) fn index(&mut self) -> Option<String> {
        let braced = self.take(&Token::Open('<'));
        let mut index = String::new();
        loop {
            match self.peek()? {
                Token::Number(number) => index.push_str(&number.value.to_string()),
                Token::Symbol(name) | Token::Word(name) => index.push_str(name),
                Token::Constant(Constant::I) => index.push('i'),
                Token::Constant(Constant::E) => index.push('e'),
                Token::Plus if braced => index.push('+'),
                Token::Minus if braced => index.push('-'),
                _ => return None,
            }
            self.position += 1;
            if !braced || self.take(&Token::Close('<')) {
                return Some(index);
            }
        }
    }

    pub(super) fn primary(&mut self) -> Option<Expr> {
        self.deeper(Self::primary_within)
    }

    fn primary_within(&mut self) -> Option<Expr> {
        if let Some((call, length)) = combination(&self.tokens[self.position..]) {
            self.position += length;
            return self.node(call);
        }
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
        let words = canonical(&words);
        let mut letters = words.chars();
        match (letters.next(), letters.next()) {
            (Some(letter), None) if letter.is_ascii_alphabetic() => Expr::Symbol(words),
            _ => Expr::Words(words),
        }
    }

    /// `1 \over 2` and `16 \choose 2` behind their first part.
    pub(super) fn infix(&mut self, first: Expr) -> Option<Expr> {
        if self.take(&Token::Over) {
            let below = self.sum()?;
            return self.node(Expr::Div(Box::new(first), Box::new(below)));
        }
        if self.take(&Token::ChooseInfix) {
            let below = self.sum()?;
            return self.node(Expr::Call(Function::Binomial, vec![first, below]));
        }
        Some(first)
    }

    /// The condition of a set such as `{x | x > 3}` or `{x in R : x > 3}`, whose opening brace was read.
    fn condition(&mut self) -> Option<Expr> {
        use Token::{Bar, Close, Colon, Open, Relation as Is, Symbol, Word};
        let length = match &self.tokens[self.position..] {
            [Symbol(_), Bar | Colon, ..] => 2,
            [Symbol(_), Is(Relation::In), Symbol(_) | Word(_), Bar | Colon, ..] => 4,
            _ => return None,
        };
        // A second bar would be an absolute value.
        let rest = &self.tokens[self.position + length..];
        let end = rest.iter().position(|token| *token == Close('{'))?;
        if rest[..end].iter().any(|token| matches!(token, Bar | Open('{'))) {
            return None;
        }
        self.position += length;
        let condition = self.list()?;
        self.expect(&Close('{'))?;
        matches!(
            condition,
            Expr::Relation(..) | Expr::Sequence(Brackets::Both | Brackets::Either | Brackets::Bare, _)
        )
        .then_some(condition)
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
        if open == '{'
            && let Some(condition) = self.condition()
        {
            return Some(condition);
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

/// Words without their article, and without the ends of plurals.
fn canonical(words: &str) -> String {
    let bare = ["a ", "an ", "the "].iter().find_map(|article| words.strip_prefix(article)).unwrap_or(words);
    let singular = |word: &str| {
        let is_plural = word.len() > 4 && word.is_ascii() && word.ends_with('s') && !word.ends_with("ss");
        word[..word.len() - usize::from(is_plural)].to_owned()
    };
    bare.split(' ').map(singular).collect::<Vec<_>>().join(" ")
}

/// The binomial in `C(5,2)`, `C_5^2`, `{}_5C_2` or `5C2`, and its number of tokens.
fn combination(tokens: &[Token]) -> Option<(Expr, usize)> {
    use Token::{Close, Comma, Number as N, Open, Power, Subscript, Symbol};
    let braced = |at: usize| match tokens.get(at..)? {
        [N(number), ..] => Some((number, at + 1)),
        [Open('<'), N(number), Close('<'), ..] => Some((number, at + 3)),
        _ => None,
    };
    let is_c = |token: &Token| matches!(token, Symbol(name) | Token::Word(name) if name == "C");
    let (top, below, length) = match tokens {
        [c, Open('('), N(top), Comma, N(below), Close('('), ..] if is_c(c) => (top, below, 6),
        [c, Subscript, ..] if is_c(c) => {
            let (top, at) = braced(2)?;
            let (below, end) = braced(at + 1).filter(|_| tokens[at] == Power)?;
            (top, below, end)
        }
        [Open('<'), Close('<'), Subscript | Power, ..] => {
            let (top, at) = braced(3)?;
            let (below, end) = braced(at + 2).filter(|_| is_c(&tokens[at]) && tokens[at + 1] == Subscript)?;
            (top, below, end)
        }
        [Subscript | Power, ..] => {
            let (top, at) = braced(1)?;
            let (below, end) = braced(at + 2).filter(|_| is_c(&tokens[at]) && tokens[at + 1] == Subscript)?;
            (top, below, end)
        }
        [N(top), c, N(below), ..] if is_c(c) => (top, below, 3),
        _ => return None,
    };
    let counts = |number: &Number| number.value.is_integer() && number.places.is_none();
    let is_known = counts(top) && counts(below) && top.value >= below.value;
    let parts = vec![Expr::Number(top.clone()), Expr::Number(below.clone())];
    is_known.then_some((Expr::Call(Function::Binomial, parts), length))
}

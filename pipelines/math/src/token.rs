//! Tokens of mathematical text.

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
    /// `\over` and `\choose`, between two arguments in a group.
    Over,
    ChooseInfix,
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
    Prime,
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
    /// `\int`, `\gcd` and similar commands, which only a name contains.
    Operator(String),
    Union,
    /// `\setminus`.
    SetMinus,
    EmptySet,
    BeginMatrix,
    EndMatrix,
    NextCell,
    NextRow,
}

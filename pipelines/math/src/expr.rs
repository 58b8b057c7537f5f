//! Expressions that answers are parsed into.

use std::collections::BTreeSet;

use num_rational::BigRational;

/// A formula, or a collection of formulas.
#[derive(Clone, Debug, PartialEq)]
pub(super) enum Expr {
    /// An exact number.
    Number(Number),
    /// A named number.
    Constant(Constant),
    /// A variable.
    Symbol(String),
    /// Words, in lower case.
    Words(String),
    Neg(Box<Expr>),
    Add(Vec<Expr>),
    Mul(Vec<Expr>),
    Div(Box<Expr>, Box<Expr>),
    Pow(Box<Expr>, Box<Expr>),
    Call(Function, Vec<Expr>),
    /// An expression in percent or degrees.
    Scaled(Scale, Box<Expr>),
    /// Several expressions, with or without brackets.
    Sequence(Brackets, Vec<Expr>),
    /// A union of two or more sets.
    Union(Vec<Expr>),
    /// Rows of equal length.
    Matrix(Vec<Vec<Expr>>),
    /// Sides with the relations between neighbours.
    Relation(Vec<Expr>, Vec<Relation>),
}

/// A literal.
#[derive(Clone, Debug, PartialEq)]
pub(super) struct Number {
    pub(super) value: BigRational,
    /// Decimal places, which an exponent may make negative; `None` without a decimal point.
    pub(super) places: Option<i32>,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Constant {
    Pi,
    E,
    I,
    Infinity,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Function {
    Sin,
    Cos,
    Tan,
    Cot,
    Sec,
    Csc,
    Arcsin,
    Arccos,
    Arctan,
    Sinh,
    Cosh,
    Tanh,
    Exp,
    Ln,
    /// Base and number.
    Log,
    /// Degree and radicand.
    Root,
    Abs,
    Floor,
    Ceiling,
    Factorial,
    Binomial,
}

impl Function {
    /// Returns true if it has jumps or branch cuts in the complex plane, so that an identity may hold for
    /// reals only.
    pub(super) fn has_branches(self) -> bool {
        use Function::*;
        matches!(self, Arcsin | Arccos | Arctan | Ln | Log | Root | Abs | Floor | Ceiling)
    }
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Scale {
    Percent,
    Degree,
}

/// Brackets of a sequence.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Brackets {
    /// None, as in `1, 2`.
    Bare,
    /// None; bounds that all hold: `x > 1 and x < 3`.
    Both,
    /// None; bounds of which one holds: `x < 1 or x > 3`.
    Either,
    /// A set.
    Braces,
    /// A tuple, or an open interval.
    Round,
    /// A vector, or a closed interval.
    Square,
    /// `(a, b]`.
    OpenClosed,
    /// `[a, b)`.
    ClosedOpen,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Relation {
    Equal,
    /// `≈`, which a rounded number follows.
    About,
    NotEqual,
    Less,
    LessEqual,
    Greater,
    GreaterEqual,
    In,
    /// `\equiv`.
    Congruent,
}

impl Relation {
    /// Returns true if its right side is the value of its left side.
    pub(super) fn gives_a_value(&self) -> bool {
        matches!(self, Self::Equal | Self::About | Self::Congruent)
    }

    /// The relation with its sides exchanged.
    pub(super) fn swapped(self) -> Self {
        match self {
            Self::Less => Self::Greater,
            Self::LessEqual => Self::GreaterEqual,
            Self::Greater => Self::Less,
            Self::GreaterEqual => Self::LessEqual,
            same => same,
        }
    }
}

impl Expr {
    /// Direct parts.
    pub(super) fn children(&self) -> Vec<&Expr> {
        match self {
            Self::Number(_) | Self::Constant(_) | Self::Symbol(_) | Self::Words(_) => Vec::new(),
            Self::Neg(a) | Self::Scaled(_, a) => vec![a],
            Self::Div(a, b) | Self::Pow(a, b) => vec![a, b],
            Self::Add(parts) | Self::Mul(parts) | Self::Call(_, parts) => parts.iter().collect(),
            Self::Sequence(_, parts) | Self::Union(parts) | Self::Relation(parts, _) => {
                parts.iter().collect()
            }
            Self::Matrix(rows) => rows.iter().flatten().collect(),
        }
    }

    /// Names of all variables.
    pub(super) fn symbols(&self) -> BTreeSet<&str> {
        match self {
            Self::Symbol(name) => BTreeSet::from([name.as_str()]),
            other => other.children().into_iter().flat_map(Self::symbols).collect(),
        }
    }

    /// Returns true if `holds` is true for this expression or a part of it.
    pub(super) fn any(&self, holds: &impl Fn(&Expr) -> bool) -> bool {
        holds(self) || self.children().into_iter().any(|child| child.any(holds))
    }

    /// `self - other`.
    pub(super) fn minus(&self, other: &Expr) -> Expr {
        Self::Add(vec![self.clone(), Self::Neg(Box::new(other.clone()))])
    }
}

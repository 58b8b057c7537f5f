//! What an answer is read into.

use std::collections::BTreeSet;

use num_rational::BigRational;

/// A formula, or what formulas are put together to.
#[derive(Clone, Debug, PartialEq)]
pub(super) enum Expr {
    /// An exact number.
    Number(Number),
    /// A number with a name.
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
    /// A number of percent or of degrees.
    Scaled(Scale, Box<Expr>),
    /// Several expressions, in brackets or bare.
    Sequence(Brackets, Vec<Expr>),
    /// Two or more sets.
    Union(Vec<Expr>),
    /// Rows of equal length.
    Matrix(Vec<Vec<Expr>>),
    /// Sides, and the relations between each and the next.
    Relation(Vec<Expr>, Vec<Relation>),
}

/// A literal.
#[derive(Clone, Debug, PartialEq)]
pub(super) struct Number {
    pub(super) value: BigRational,
    /// For one with a decimal point: the last digit's place is `10^-places`.
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
    /// Of the base and the number.
    Log,
    /// Of the degree and the radicand.
    Root,
    Abs,
    Floor,
    Ceiling,
    Factorial,
    Binomial,
}

impl Function {
    /// Whether it jumps or forks somewhere in the complex plane, so that an identity may hold for reals alone.
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

/// What stands around a sequence.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Brackets {
    /// Nothing, as in `1, 2`.
    Bare,
    /// Nothing, around bounds that all hold: `x > 1 and x < 3`.
    Both,
    /// Nothing, around bounds of which one holds: `x < 1 or x > 3`.
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
    /// `≈`, which a number that is rounded stands behind.
    About,
    NotEqual,
    Less,
    LessEqual,
    Greater,
    GreaterEqual,
    In,
}

impl Relation {
    /// Whether what stands behind it is the value of what stands before it.
    pub(super) fn gives_a_value(&self) -> bool {
        matches!(self, Self::Equal | Self::About)
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
    /// The parts directly below.
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

    /// The names of all variables.
    pub(super) fn symbols(&self) -> BTreeSet<&str> {
        match self {
            Self::Symbol(name) => BTreeSet::from([name.as_str()]),
            other => other.children().into_iter().flat_map(Self::symbols).collect(),
        }
    }

    /// Whether `holds` for this or for a part of it.
    pub(super) fn any(&self, holds: &impl Fn(&Expr) -> bool) -> bool {
        holds(self) || self.children().into_iter().any(|child| child.any(holds))
    }

    /// `self - other`.
    pub(super) fn minus(&self, other: &Expr) -> Expr {
        Self::Add(vec![self.clone(), Self::Neg(Box::new(other.clone()))])
    }
}

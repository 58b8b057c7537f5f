//! Sums and products of matrices, as one matrix.

use std::borrow::Cow;

use super::expr::Expr;

/// Limit of the nodes in a computed matrix.
const MOST_NODES: usize = 2_000;

type Rows = Vec<Vec<Expr>>;

/// `expr` with its sums and products of matrices computed, where their shapes allow it; also as sides and items.
pub(super) fn with_matrices(expr: &Expr) -> Cow<'_, Expr> {
    let is_computed =
        |part: &Expr| matches!(part, Expr::Add(_) | Expr::Mul(_) | Expr::Neg(_) | Expr::Div(..));
    let has_matrix = |part: &Expr| part.any(&|inner| matches!(inner, Expr::Matrix(_)));
    if !expr.any(&|part| is_computed(part) && has_matrix(part)) {
        return Cow::Borrowed(expr);
    }
    let each = |parts: &[Expr]| parts.iter().map(|part| with_matrices(part).into_owned()).collect();
    match expr {
        Expr::Relation(sides, relations) => Cow::Owned(Expr::Relation(each(sides), relations.clone())),
        Expr::Sequence(brackets, items) => Cow::Owned(Expr::Sequence(*brackets, each(items))),
        _ => matrix(expr).map_or(Cow::Borrowed(expr), |rows| Cow::Owned(Expr::Matrix(rows))),
    }
}

/// The rows of a matrix; `None` if `expr` is none, or is too large.
fn matrix(expr: &Expr) -> Option<Rows> {
    let rows = match expr {
        Expr::Matrix(rows) => rows.clone(),
        Expr::Neg(inner) => mapped(&matrix(inner)?, |cell| Expr::Neg(Box::new(cell))),
        Expr::Div(above, below) => mapped(&matrix(above)?, |cell| Expr::Div(Box::new(cell), below.clone())),
        Expr::Add(terms) => {
            let mut terms = terms.iter();
            let first = matrix(terms.next()?)?;
            terms.try_fold(first, |sum, term| added(&sum, &matrix(term)?))?
        }
        Expr::Mul(factors) => product(factors)?,
        _ => return None,
    };
    let is_scalar = |cell: &Expr| !cell.any(&|part| matches!(part, Expr::Matrix(_)));
    let nodes: usize = rows.iter().flatten().map(size).sum();
    (nodes <= MOST_NODES && rows.iter().flatten().all(is_scalar)).then_some(rows)
}

/// Product of matrices from left to right, and of scalars.
fn product(factors: &[Expr]) -> Option<Rows> {
    let mut product: Option<Rows> = None;
    let mut scalars = Vec::new();
    for factor in factors {
        match (product.take(), matrix(factor)) {
            (Some(left), Some(right)) => product = Some(multiplied(&left, &right)?),
            (left, None) => {
                product = left;
                scalars.push(factor.clone());
            }
            (None, right) => product = right,
        }
    }
    let product = product?;
    if scalars.is_empty() {
        return Some(product);
    }
    Some(mapped(&product, |cell| Expr::Mul(scalars.iter().cloned().chain([cell]).collect())))
}

fn mapped(rows: &Rows, change: impl Fn(Expr) -> Expr) -> Rows {
    rows.iter().map(|row| row.iter().cloned().map(&change).collect()).collect()
}

fn added(one: &Rows, other: &Rows) -> Option<Rows> {
    if (one.len(), one[0].len()) != (other.len(), other[0].len()) {
        return None;
    }
    let sum = |(one, other): (&Expr, &Expr)| Expr::Add(vec![one.clone(), other.clone()]);
    Some(one.iter().zip(other).map(|(one, other)| one.iter().zip(other).map(sum).collect()).collect())
}

fn multiplied(one: &Rows, other: &Rows) -> Option<Rows> {
    let nodes = |rows: &Rows| rows.iter().flatten().map(size).sum::<usize>();
    let is_small = nodes(one) * other[0].len() + nodes(other) * one.len() <= MOST_NODES;
    if one[0].len() != other.len() || !is_small {
        return None;
    }
    let term = |row: &[Expr], inner: usize, column: usize| {
        Expr::Mul(vec![row[inner].clone(), other[inner][column].clone()])
    };
    let cell =
        |row: &[Expr], column| Expr::Add((0..other.len()).map(|inner| term(row, inner, column)).collect());
    Some(one.iter().map(|row| (0..other[0].len()).map(|column| cell(row, column)).collect()).collect())
}

/// Number of nodes.
fn size(expr: &Expr) -> usize {
    1 + expr.children().into_iter().map(size).sum::<usize>()
}

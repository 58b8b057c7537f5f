//! Named values in answers: `x = 1, y = 2` and `(x, y) = (1, 2)`.

use std::borrow::Cow;

use super::expr::{Brackets, Expr, Relation};

/// The name in `x = 5`, if the other sides do not contain it.
pub(super) fn assigned(relation: &Expr) -> Option<&str> {
    let Expr::Relation(sides, relations) = relation else { return None };
    let Expr::Symbol(name) = &sides[0] else { return None };
    let equal = relations.iter().all(|relation| relation.gives_a_value());
    (equal && sides[1..].iter().all(|side| !side.symbols().contains(name.as_str()))).then_some(name)
}

/// A name without its index: `x` of `x_1`.
fn base(name: &str) -> &str {
    name.split_once('_').map_or(name, |(base, _)| base)
}

/// Returns true if the items assign values to different names. `x_1` and `x_2` are values of one.
pub(super) fn names_differ(items: &[Expr]) -> bool {
    let names: Vec<&str> = items.iter().filter_map(assigned).map(base).collect();
    names.windows(2).any(|pair| pair[0] != pair[1])
}

/// Returns true if each item assigns a value to a name of its own.
pub(super) fn are_all_named(items: &[Expr]) -> bool {
    let names: Vec<&str> = items.iter().filter_map(assigned).collect();
    let is_new = |(at, name): (usize, &&str)| !names[..at].iter().any(|other| base(other) == base(name));
    names.len() == items.len() && names.iter().enumerate().all(is_new)
}

/// `count` tuples from `p = 5, q = 2, p = 7, q = 2`, if its names repeat in order.
pub(super) fn grouped(items: &[Expr], count: usize) -> Option<Vec<Expr>> {
    let size = items.len().checked_div(count).filter(|size| *size > 1 && size * count == items.len())?;
    let names: Vec<&str> = items.iter().map(assigned).collect::<Option<_>>()?;
    let repeat = names.chunks(size).all(|chunk| *chunk == names[..size]) && are_ordered(&names[..size]);
    let value = |item: &Expr| match item {
        Expr::Relation(sides, _) if sides.len() == 2 => Some(sides[1].clone()),
        _ => None,
    };
    let tuple = |chunk: &[Expr]| {
        Some(Expr::Sequence(Brackets::Round, chunk.iter().map(value).collect::<Option<_>>()?))
    };
    if repeat { items.chunks(size).map(tuple).collect() } else { None }
}

/// Returns true if `x = 1, y = 2` lists its names in order, like a tuple. `x = 1, x = 2` assigns one name
/// twice and does not.
pub(super) fn in_order(items: &[Expr]) -> bool {
    let names: Vec<&str> = items.iter().filter_map(assigned).collect();
    names.is_empty() || (names.len() == items.len() && are_ordered(&names))
}

/// Returns true for names in alphabetical order. Greek ones, as in `(r, theta)`, have any order.
fn are_ordered(names: &[&str]) -> bool {
    let is_greek = names.iter().any(|name| base(name).len() > 1);
    names.windows(2).all(|pair| if is_greek { pair[0] != pair[1] } else { pair[0] < pair[1] })
}

/// Returns true for `y` and `f(x)`, which name the same value.
pub(super) fn is_same_function(name: &str, other: &str) -> bool {
    matches!((name, other), ("y", "f(x)") | ("f(x)", "y"))
}

/// Returns true if a sum or product of several variables has a constant value, as in `m + n = 17`.
pub(super) fn is_sum_of_names(relation: &Expr) -> bool {
    let Expr::Relation(sides, relations) = relation else { return false };
    let is_name = |part: &Expr| match part {
        Expr::Symbol(_) => true,
        Expr::Neg(part) => matches!(**part, Expr::Symbol(_)),
        _ => false,
    };
    let (Expr::Add(parts) | Expr::Mul(parts)) = &sides[0] else { return false };
    let is_sum = parts.iter().all(is_name) && sides[0].symbols().len() == parts.len();
    is_sum && relations.as_slice() == [Relation::Equal] && sides[1].symbols().is_empty()
}

/// The names and the values of `(x, y) = (1, 2)`.
fn tuple(relation: &Expr) -> Option<(Vec<&str>, &[Expr])> {
    let Expr::Relation(sides, relations) = relation else { return None };
    match (sides.as_slice(), relations.as_slice()) {
        (
            [Expr::Sequence(Brackets::Round, names), Expr::Sequence(Brackets::Round, values)],
            [Relation::Equal],
        ) => {
            let names = symbols(names)?;
            (names.len() == values.len()).then_some((names, values.as_slice()))
        }
        _ => None,
    }
}

/// Different names.
fn symbols(names: &[Expr]) -> Option<Vec<&str>> {
    let mut symbols = Vec::with_capacity(names.len());
    for name in names {
        let Expr::Symbol(name) = name else { return None };
        symbols.push(name.as_str());
    }
    symbols.iter().enumerate().all(|(at, name)| !symbols[..at].contains(name)).then_some(symbols)
}

/// `x = 1, y = 2` for `(x, y) = (1, 2)`, and the bare tuples for several of them.
pub(super) fn without_tuple_names(expr: &Expr) -> Cow<'_, Expr> {
    if let Some((names, values)) = tuple(expr) {
        let named = |(name, value): (&&str, &Expr)| {
            Expr::Relation(vec![Expr::Symbol((*name).to_owned()), value.clone()], vec![Relation::Equal])
        };
        return Cow::Owned(Expr::Sequence(Brackets::Bare, names.iter().zip(values).map(named).collect()));
    }
    if let Expr::Relation(sides, relations) = expr
        && let ([Expr::Sequence(Brackets::Round, names), set], [Relation::In]) =
            (sides.as_slice(), relations.as_slice())
        && symbols(names).is_some_and(|names| are_ordered(&names))
    {
        return Cow::Borrowed(set);
    }
    if let Expr::Sequence(Brackets::Bare, items) = expr
        && let Some((names, _)) = tuple(&items[0])
        && are_ordered(&names)
    {
        let bare = |item: &Expr| match (item, tuple(item)) {
            (_, Some((its, values))) if its == names => {
                Some(Expr::Sequence(Brackets::Round, values.to_vec()))
            }
            (Expr::Sequence(Brackets::Round, values), None) if values.len() == names.len() => {
                Some(item.clone())
            }
            _ => None,
        };
        if let Some(items) = items.iter().map(bare).collect::<Option<Vec<_>>>() {
            return Cow::Owned(Expr::Sequence(Brackets::Bare, items));
        }
    }
    Cow::Borrowed(expr)
}

//! Inequalities as solution sets.

use std::cmp::Ordering;

use num_rational::BigRational;
use num_traits::Zero;

use super::evaluate::{Fuel, constant_value};
use super::expr::{Brackets, Constant, Expr, Function, Number, Relation};

/// An interval, with flags for closed ends.
struct Interval {
    low: Expr,
    has_low: bool,
    high: Expr,
    has_high: bool,
}

/// The variable that `expr` bounds, and the set of its values. Supported are `x > 3`, `1 <= x < 2`, `|x| < 3`, `x \ne
/// 3`, `x \in [2, 5]`, several of them joined by `or`, and two joined by `and`. A comma means `and` if both
/// can hold, as in `x > 2, x < 5`, and `or` in `x < 2, x > 5`. `order` compares two numbers.
pub(super) fn region<'a>(expr: &'a Expr, order: &Order) -> Option<(&'a str, Expr)> {
    match expr {
        Expr::Relation(sides, relations) => {
            if let ([Expr::Symbol(variable), set], [Relation::In]) = (sides.as_slice(), relations.as_slice())
            {
                return Some((variable, set.clone()));
            }
            if let ([Expr::Symbol(variable), hole], [Relation::NotEqual]) =
                (sides.as_slice(), relations.as_slice())
            {
                let (below, above) = (below(hole.clone(), false), above(hole.clone(), false));
                let is_number = hole.symbols().is_empty();
                return is_number.then(|| (variable.as_str(), Expr::Union(vec![below.set(), above.set()])));
            }
            match interval(expr) {
                Some((variable, interval)) => Some((variable, interval.set())),
                None => mirrored(sides, relations, order),
            }
        }
        Expr::Sequence(Brackets::Bare, items) => match both(items) {
            Some((variable, both)) if both.holds_somewhere(order)? => Some((variable, both.set())),
            _ => either(items, order),
        },
        Expr::Sequence(Brackets::Either, items) => either(items, order),
        Expr::Sequence(Brackets::Both, items) => {
            let (variable, both) = both(items)?;
            Some((variable, both.set()))
        }
        _ => None,
    }
}

/// The set in `|x| < 3` or `1 < |x| < 3`, whose bounds are positive.
fn mirrored<'a>(sides: &'a [Expr], relations: &[Relation], order: &Order) -> Option<(&'a str, Expr)> {
    let inner = |side: &'a Expr| match side {
        Expr::Call(Function::Abs, parts) => match parts.as_slice() {
            [Expr::Symbol(variable)] => Some(variable),
            _ => None,
        },
        _ => None,
    };
    let (at, variable) = sides.iter().enumerate().find_map(|(at, side)| Some((at, inner(side)?)))?;
    let mut plain = sides.to_vec();
    plain[at] = Expr::Symbol(variable.clone());
    let plain = Expr::Relation(plain, relations.to_vec());
    let (_, Interval { low, has_low, high, has_high }) = interval(&plain)?;
    let zero = Expr::Number(Number { value: BigRational::zero(), places: None });
    let negated = |bound: &Expr| Expr::Neg(Box::new(bound.clone()));
    let is_positive = |bound: &Expr| order(&zero, bound) == Some(Ordering::Less);
    if low == negated(&infinity()) {
        let both = Interval { low: negated(&high), has_low: has_high, high: high.clone(), has_high };
        return is_positive(&high).then(|| (variable.as_str(), both.set()));
    }
    let left = Interval { low: negated(&high), has_low: has_high, high: negated(&low), has_high: has_low };
    let is_known = is_positive(&low);
    let right = Interval { low, has_low, high, has_high };
    is_known.then(|| (variable.as_str(), Expr::Union(vec![left.set(), right.set()])))
}

/// Compares two numbers; `None` if it cannot.
pub(super) type Order<'a> = dyn Fn(&Expr, &Expr) -> Option<Ordering> + 'a;

fn either<'a>(items: &'a [Expr], order: &Order) -> Option<(&'a str, Expr)> {
    let (variable, _) = region(items.first()?, order)?;
    let mut parts = Vec::new();
    for item in items {
        match region(item, order)? {
            (other, _) if other != variable => return None,
            (_, Expr::Union(more)) => parts.extend(more),
            (_, part) => parts.push(part),
        }
    }
    Some((variable, Expr::Union(parts)))
}

fn both(items: &[Expr]) -> Option<(&str, Interval)> {
    let [one, other] = items else { return None };
    let ((variable, one), (its, other)) = (interval(one)?, interval(other)?);
    let both = one.and(other).filter(|_| variable == its)?;
    Some((variable, both))
}

/// The real numbers, which are written as a letter or in words.
pub(super) fn is_reals(expr: &Expr) -> bool {
    match expr {
        Expr::Symbol(name) => name == "R",
        Expr::Words(words) => {
            ["all real number", "all real", "real number", "real"].contains(&words.as_str())
        }
        _ => false,
    }
}

/// The interval of all real numbers.
pub(super) fn all_reals() -> Expr {
    Expr::Sequence(Brackets::Round, vec![Expr::Neg(Box::new(infinity())), infinity()])
}

/// The real numbers except a few points, as a union of intervals.
pub(super) fn without_points(set: &Expr, points: Expr) -> Option<Expr> {
    let all = Expr::Neg(Box::new(infinity()));
    let is_all = is_reals(set) || *set == all_reals();
    let Expr::Sequence(Brackets::Braces, points) = points else { return None };
    let fuel = Fuel::new(10_000);
    let mut sorted = Vec::with_capacity(points.len());
    for point in points {
        sorted.push((constant_value(&point, &fuel)?, point));
    }
    if !is_all || sorted.is_empty() {
        return None;
    }
    sorted.sort_by(|one, other| one.0.cmp(&other.0));
    let mut low = all;
    let mut parts = Vec::new();
    for (_, point) in sorted {
        parts.push(Expr::Sequence(Brackets::Round, vec![low, point.clone()]));
        low = point;
    }
    parts.push(Expr::Sequence(Brackets::Round, vec![low, infinity()]));
    Some(Expr::Union(parts))
}

fn infinity() -> Expr {
    Expr::Constant(Constant::Infinity)
}

fn below(high: Expr, has_high: bool) -> Interval {
    Interval { low: Expr::Neg(Box::new(infinity())), has_low: false, high, has_high }
}

fn above(low: Expr, has_low: bool) -> Interval {
    Interval { low, has_low, high: infinity(), has_high: false }
}

impl Interval {
    fn set(self) -> Expr {
        let brackets = match (self.has_low, self.has_high) {
            (false, false) => Brackets::Round,
            (false, true) => Brackets::OpenClosed,
            (true, false) => Brackets::ClosedOpen,
            (true, true) => Brackets::Square,
        };
        Expr::Sequence(brackets, vec![self.low, self.high])
    }

    /// Returns true if the interval is not empty; `None` if unknown.
    fn holds_somewhere(&self, order: &Order) -> Option<bool> {
        Some(match order(&self.low, &self.high)? {
            Ordering::Less => true,
            Ordering::Equal => self.has_low && self.has_high,
            Ordering::Greater => false,
        })
    }

    /// Intersection of two intervals, one unbounded above and the other unbounded below.
    fn and(self, other: Self) -> Option<Self> {
        let ends = |it: &Self| it.high != infinity();
        let (lower, upper) = match (ends(&self), ends(&other)) {
            (false, true) => (self, other),
            (true, false) => (other, self),
            _ => return None,
        };
        let begins_nowhere = upper.low == Expr::Neg(Box::new(infinity()));
        begins_nowhere.then_some(Self { high: upper.high, has_high: upper.has_high, ..lower })
    }
}

/// A variable between constant bounds.
fn interval(relation: &Expr) -> Option<(&str, Interval)> {
    use Relation::{Greater, GreaterEqual, Less, LessEqual};
    let Expr::Relation(sides, relations) = relation else { return None };
    let with = |relation: &Relation| matches!(relation, LessEqual | GreaterEqual);
    let (variable, interval) = match (sides.as_slice(), relations.as_slice()) {
        ([Expr::Symbol(variable), bound], [relation]) | ([bound, Expr::Symbol(variable)], [relation]) => {
            let is_first = matches!(&sides[0], Expr::Symbol(name) if name == variable);
            let interval = match if is_first { *relation } else { relation.swapped() } {
                Less | LessEqual => below(bound.clone(), with(relation)),
                Greater | GreaterEqual => above(bound.clone(), with(relation)),
                _ => return None,
            };
            (variable, interval)
        }
        ([low, Expr::Symbol(variable), high], [first @ (Less | LessEqual), second @ (Less | LessEqual)])
        | (
            [high, Expr::Symbol(variable), low],
            [second @ (Greater | GreaterEqual), first @ (Greater | GreaterEqual)],
        ) => {
            let (low, high) = (low.clone(), high.clone());
            (variable, Interval { low, has_low: with(first), high, has_high: with(second) })
        }
        _ => return None,
    };
    let is_constant = interval.low.symbols().is_empty() && interval.high.symbols().is_empty();
    is_constant.then_some((variable.as_str(), interval))
}

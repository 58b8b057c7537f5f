//! Whether a prediction is the gold answer, in another form or the same.
//!
//! In doubt it is not: a wrong answer that is rewarded does more harm than a right one that is missed.

use std::cell::Cell;

use num_rational::BigRational;
use num_traits::{Signed, ToPrimitive, Zero};

use super::ball::{Balls, Domain};
use super::evaluate::{Field, Fuel, PRIMES, constant_value, evaluate};
use super::expr::{Brackets, Constant, Expr, Number, Relation, Scale};
use super::parse::{Answer, literal};

/// Work on one pair of answers: some 20 ms.
const FUEL: u64 = 300_000;

/// Points at which two formulas are compared.
const POINTS: u64 = 12;

/// Real points; there are more, since a root or a logarithm may have a value at few of them.
const REAL_POINTS: u64 = 30;

/// Points of them at which both must have a value.
const ENOUGH_POINTS: usize = 4;

/// Whether `predicted` is right. A decimal number as gold is matched within `tolerance` of its size, and within half of
/// its last digit.
pub(super) fn is_right(gold: &Answer, predicted: &Answer, tolerance: f64) -> bool {
    if let (Some(gold), Some(predicted)) = (&gold.unit, &predicted.unit)
        && gold != predicted
    {
        return false;
    }
    let comparison = Comparison { tolerance, fuel: Fuel::new(FUEL), depth: Cell::new(0) };
    comparison.equal(&gold.expr, &predicted.expr)
}

struct Comparison {
    tolerance: f64,
    fuel: Fuel,
    /// Of conversions within each other.
    depth: Cell<usize>,
}

impl Comparison {
    fn equal(&self, gold: &Expr, predicted: &Expr) -> bool {
        const MOST_DEPTH: usize = 100;
        if self.fuel.burn(1).is_none() || self.depth.get() > MOST_DEPTH {
            return false;
        }
        self.depth.set(self.depth.get() + 1);
        let equal = gold == predicted || self.equal_parts(gold, predicted);
        self.depth.set(self.depth.get() - 1);
        equal
    }

    fn equal_parts(&self, gold: &Expr, predicted: &Expr) -> bool {
        use Expr::{Matrix, Relation, Sequence, Union};
        match (gold, predicted) {
            (Sequence(kind, gold), Sequence(other, predicted)) => {
                self.equal_sequences((*kind, gold), (*other, predicted))
            }
            (Matrix(gold), Matrix(predicted)) => {
                gold.len() == predicted.len()
                    && gold.iter().zip(predicted).all(|(gold, predicted)| self.equal_ordered(gold, predicted))
            }
            (Matrix(rows), Sequence(Brackets::Round | Brackets::Square, items)) => {
                self.equal_rows(rows, items, false)
            }
            (Sequence(Brackets::Round | Brackets::Square, items), Matrix(rows)) => {
                self.equal_rows(rows, items, true)
            }
            (Union(gold), Union(predicted)) => self.equal_unordered(gold, predicted),
            (Relation(..), Relation(..)) => self.equal_relations(gold, predicted),
            (Sequence(..) | Union(_), Relation(..)) if solution_set(predicted).is_some() => {
                solution_set(predicted)
                    .is_some_and(|set| is_list(gold) == is_list(&set) && self.equal(gold, &set))
            }
            (Relation(..), Sequence(..) | Union(_)) if solution_set(gold).is_some() => solution_set(gold)
                .is_some_and(|set| is_list(&set) == is_list(predicted) && self.equal(&set, predicted)),
            (gold, Relation(..)) => self.value(predicted).is_some_and(|value| self.equal(gold, value)),
            (Relation(..), predicted) => self.value(gold).is_some_and(|value| self.equal(value, predicted)),
            // The only element of a set.
            (Sequence(Brackets::Braces, items), scalar) if items.len() == 1 => self.equal(&items[0], scalar),
            (scalar, Sequence(Brackets::Braces, items)) if items.len() == 1 => self.equal(scalar, &items[0]),
            (Sequence(..) | Union(_) | Matrix(_), _) | (_, Sequence(..) | Union(_) | Matrix(_)) => false,
            _ => self.equal_scalars(gold, predicted),
        }
    }

    // Several values.

    fn equal_sequences(&self, gold: (Brackets, &[Expr]), predicted: (Brackets, &[Expr])) -> bool {
        use Brackets::{Bare, Both, Braces, Either, Round, Square};
        let ((kind, gold), (other, predicted)) = (gold, predicted);
        if gold.len() != predicted.len() {
            return false;
        }
        match (kind, other) {
            (Both, Either) | (Either, Both) => false,
            (Bare | Both | Either | Braces, Bare | Both | Either | Braces) => {
                // `x = 2, y = 1` says which is which, and `1, 2` does not.
                let named = |items: &[Expr]| names_differ(items);
                named(gold) == named(predicted) && self.equal_unordered(gold, predicted)
            }
            // Square ones would be a closed interval.
            (Bare, Round) => in_order(gold) && self.equal_ordered(gold, predicted),
            (Round, Bare) => in_order(predicted) && self.equal_ordered(gold, predicted),
            // Two values in square brackets may be a closed interval, which round ones are not.
            (Round, Square) | (Square, Round) => gold.len() > 2 && self.equal_ordered(gold, predicted),
            _ => kind == other && self.equal_ordered(gold, predicted),
        }
    }

    fn equal_ordered(&self, gold: &[Expr], predicted: &[Expr]) -> bool {
        gold.len() == predicted.len()
            && gold.iter().zip(predicted).all(|(gold, predicted)| self.equal(gold, predicted))
    }

    /// Each element has one of the other side's for itself.
    fn equal_unordered(&self, gold: &[Expr], predicted: &[Expr]) -> bool {
        let mut left: Vec<&Expr> = predicted.iter().collect();
        gold.len() == predicted.len()
            && gold.iter().all(|gold| {
                let found = left.iter().position(|predicted| self.equal(gold, predicted));
                found.map(|at| left.swap_remove(at)).is_some()
            })
    }

    /// A vector, standing or lying, or a list of rows; `sequence_is_gold` tells which side is which.
    fn equal_rows(&self, rows: &[Vec<Expr>], items: &[Expr], sequence_is_gold: bool) -> bool {
        let equal = |cell: &Expr, item: &Expr| {
            if sequence_is_gold { self.equal(item, cell) } else { self.equal(cell, item) }
        };
        let cells: Vec<&Expr> = rows.iter().flatten().collect();
        if (rows.len() == 1 || rows[0].len() == 1) && cells.len() == items.len() {
            return cells.iter().zip(items).all(|(cell, item)| equal(cell, item));
        }
        rows.len() == items.len()
            && rows.iter().zip(items).all(|(row, item)| match item {
                Expr::Sequence(Brackets::Round | Brackets::Square, items) => {
                    row.len() == items.len() && row.iter().zip(items).all(|(cell, item)| equal(cell, item))
                }
                _ => false,
            })
    }

    // Equations and inequalities.

    /// What `x = 2 + 3 = 5` says that x is: its last side, if all sides but a name at the front are the same.
    fn value<'a>(&self, relation: &'a Expr) -> Option<&'a Expr> {
        let Expr::Relation(sides, relations) = relation else { return None };
        if let ([name, set], [Relation::In]) = (sides.as_slice(), relations.as_slice()) {
            return matches!(name, Expr::Symbol(_)).then_some(set);
        }
        if relations.iter().any(|relation| *relation != Relation::Equal) {
            return None;
        }
        let values = if assigned(relation).is_some() { &sides[1..] } else { &sides[..] };
        let (last, rest) = values.split_last()?;
        rest.iter().all(|side| self.equal(last, side)).then_some(last)
    }

    fn equal_relations(&self, gold: &Expr, predicted: &Expr) -> bool {
        let (Expr::Relation(sides, relations), Expr::Relation(others, other_relations)) = (gold, predicted)
        else {
            return false;
        };
        if let (Some(name), Some(other)) = (assigned(gold), assigned(predicted))
            && name == other
        {
            let (Some(gold), Some(predicted)) = (self.value(gold), self.value(predicted)) else {
                return false;
            };
            return self.equal(gold, predicted);
        }
        match (relations.as_slice(), other_relations.as_slice()) {
            ([relation], [other]) => {
                self.equal_equations((&sides[0], *relation, &sides[1]), (&others[0], *other, &others[1]))
            }
            (relations, others_relations) if relations.len() == others_relations.len() => {
                let backwards: Vec<Relation> =
                    others_relations.iter().rev().map(|relation| relation.swapped()).collect();
                let reversed: Vec<Expr> = others.iter().rev().cloned().collect();
                (relations == others_relations && self.equal_ordered(sides, others))
                    || (relations == backwards && self.equal_ordered(sides, &reversed))
            }
            _ => false,
        }
    }

    /// Up to a constant factor: of any sign for an equation, a positive one for an inequality.
    fn equal_equations(&self, gold: (&Expr, Relation, &Expr), predicted: (&Expr, Relation, &Expr)) -> bool {
        let ((left, relation, right), (other_left, other, other_right)) = (gold, predicted);
        if relation == Relation::In || other == Relation::In {
            return relation == other && self.equal(left, other_left) && self.equal(right, other_right);
        }
        let difference = left.minus(right);
        // `x > 3` and `3 < x`.
        let directions =
            [(other, other_left.minus(other_right)), (other.swapped(), other_right.minus(other_left))];
        directions.iter().any(|(other, other_difference)| {
            relation == *other
                && self.factor(&difference, other_difference).is_some_and(|factor| {
                    let scaled = Expr::Number(Number { value: factor.clone(), places: None });
                    let scaled = Expr::Mul(vec![scaled, other_difference.clone()]);
                    let keeps =
                        matches!(relation, Relation::Equal | Relation::NotEqual) || factor.is_positive();
                    keeps && self.is_identity(&difference, &scaled)
                })
        })
    }

    /// The rational that `b` must be multiplied by to be `a`, if there is one: found at a point. 1 if they are not
    /// rational functions.
    fn factor(&self, a: &Expr, b: &Expr) -> Option<BigRational> {
        let at = |expr: &Expr| constant_value(&at_integers(expr), &self.fuel);
        match (at(a), at(b)) {
            (Some(a), Some(b)) if a.is_zero() || b.is_zero() => None,
            (Some(a), Some(b)) => Some(a / b),
            _ => Some(BigRational::from(num_bigint::BigInt::from(1))),
        }
    }

    // One value.

    /// A number of percent or degrees is also right without its sign, or as the plain number that it is.
    fn equal_scalars(&self, gold: &Expr, predicted: &Expr) -> bool {
        match (gold, predicted) {
            (Expr::Scaled(scale, gold), Expr::Scaled(other, predicted)) => {
                scale == other && self.equal_values(gold, predicted)
            }
            (Expr::Scaled(scale, inner), predicted) => {
                self.equal_values(inner, predicted) || self.equal_values(&plain(*scale, inner), predicted)
            }
            (gold, Expr::Scaled(scale, inner)) => {
                self.equal_values(gold, inner) || self.equal_values(gold, &plain(*scale, inner))
            }
            _ => self.equal_values(gold, predicted),
        }
    }

    fn equal_values(&self, gold: &Expr, predicted: &Expr) -> bool {
        if gold == predicted {
            return true;
        }
        let exact = |expr: &Expr| constant_value(expr, &self.fuel);
        match (exact(gold), exact(predicted)) {
            (Some(value), Some(other)) if value == other => return true,
            // Exact numbers that differ are the same only as far as a decimal tells.
            (Some(_), Some(_)) => return self.is_close(gold, predicted),
            _ => {}
        }
        self.is_close(gold, predicted) || self.is_identity(gold, predicted)
    }

    /// For a gold decimal: within the tolerance, and within half of the last digit.
    fn is_close(&self, gold: &Expr, predicted: &Expr) -> bool {
        let Some(Number { value, places: Some(places) }) = literal(gold) else { return false };
        let balls = Balls { domain: Domain::Real, point: 0 };
        let Some(value) = value.to_f64().filter(|_| predicted.symbols().is_empty()) else { return false };
        let Some(predicted) = evaluate(predicted, &balls, &self.fuel) else { return false };
        let distance = (predicted.value.re - value).abs();
        predicted.is_real() && distance <= (self.tolerance * value.abs()).min(0.5 * 10f64.powi(-places))
    }

    /// Whether two formulas have one value wherever they are evaluated.
    fn is_identity(&self, gold: &Expr, predicted: &Expr) -> bool {
        if gold.symbols() != predicted.symbols() && !is_rational(gold, predicted) {
            return false;
        }
        match self.is_rational_identity(gold, predicted) {
            Some(equal) => equal,
            None => self.is_numeric_identity(gold, predicted),
        }
    }

    /// `None` if they are not both rational functions.
    fn is_rational_identity(&self, gold: &Expr, predicted: &Expr) -> Option<bool> {
        let mut compared = PRIMES.map(|_| 0);
        for (point, which) in (0..POINTS).zip((0..PRIMES.len()).cycle()) {
            let field = Field { point, prime: PRIMES[which] };
            let values = (evaluate(gold, &field, &self.fuel), evaluate(predicted, &field, &self.fuel));
            match values {
                (Some(value), Some(other)) if value != other => return Some(false),
                (Some(_), Some(_)) => compared[which] += 1,
                _ => {}
            }
        }
        compared.iter().all(|&compared| compared >= ENOUGH_POINTS).then_some(true)
    }

    fn is_numeric_identity(&self, gold: &Expr, predicted: &Expr) -> bool {
        if gold.symbols().is_empty() {
            return self.agree(gold, predicted, Balls { domain: Domain::Real, point: 0 }) == Some(true);
        }
        let mut compared = 0;
        for point in 0..REAL_POINTS {
            match self.agree(gold, predicted, Balls { domain: Domain::Real, point }) {
                Some(true) => compared += 1,
                Some(false) => return false,
                None => {}
            }
        }
        // Off the real axis, roots and logarithms choose a branch, and forms that are equal for reals may differ.
        let forks = |expr: &Expr| {
            expr.any(&|part| match part {
                Expr::Call(function, _) => function.has_branches(),
                Expr::Pow(_, exponent) => {
                    !matches!(&**exponent, Expr::Number(number) if number.value.is_integer())
                }
                _ => false,
            })
        };
        if compared > 0 && (forks(gold) || forks(predicted)) {
            return compared >= ENOUGH_POINTS;
        }
        for point in 0..POINTS {
            match self.agree(gold, predicted, Balls { domain: Domain::Complex, point }) {
                Some(true) => compared += 1,
                Some(false) => return false,
                None => {}
            }
        }
        compared >= ENOUGH_POINTS
    }

    /// Whether the two agree at a point; `None` where neither has a value to compare. Among reals a value that is not
    /// real is none, so that forms with different domains are different.
    fn agree(&self, gold: &Expr, predicted: &Expr, balls: Balls) -> Option<bool> {
        let has_symbols = !gold.symbols().is_empty();
        let value = |expr: &Expr| {
            let ball = evaluate(expr, &balls, &self.fuel)?;
            (!has_symbols || balls.domain == Domain::Complex || ball.is_real()).then_some(ball)
        };
        match (value(gold), value(predicted)) {
            (Some(gold), Some(predicted)) if gold.is_precise() && predicted.is_precise() => {
                Some(gold.agrees(&predicted))
            }
            (None, None) => None,
            (Some(gold), Some(predicted)) if gold.agrees(&predicted) => None,
            _ => Some(false),
        }
    }
}

/// `x` of `x = 5`, and `f` of `f(x) = x^2`: a name that the other sides do not hold.
fn assigned(relation: &Expr) -> Option<&str> {
    const FUNCTIONS: [&str; 6] = ["f", "g", "h", "p", "P", "Q"];
    let Expr::Relation(sides, relations) = relation else { return None };
    let name = match &sides[0] {
        Expr::Symbol(name) => name,
        Expr::Mul(parts) => match parts.as_slice() {
            [Expr::Symbol(name), Expr::Symbol(_)] if FUNCTIONS.contains(&name.as_str()) => name,
            _ => return None,
        },
        _ => return None,
    };
    let equal = relations.iter().all(|relation| *relation == Relation::Equal);
    (equal && sides[1..].iter().all(|side| !side.symbols().contains(name.as_str()))).then_some(name)
}

/// Whether values are given to different names.
fn names_differ(items: &[Expr]) -> bool {
    let names: Vec<&str> = items.iter().filter_map(assigned).collect();
    names.windows(2).any(|pair| pair[0] != pair[1])
}

/// Whether `x = 1, y = 2` lists its names as a tuple would. `x = 1, x = 2` has two values of one name, and is none.
fn in_order(items: &[Expr]) -> bool {
    let names: Vec<&str> = items.iter().filter_map(assigned).collect();
    names.is_empty() || (names.len() == items.len() && names.windows(2).all(|pair| pair[0] < pair[1]))
}

/// Whether values are listed one by one, as an interval never does.
fn is_list(expr: &Expr) -> bool {
    use Brackets::{Bare, Both, Braces, Either};
    matches!(expr, Expr::Sequence(Bare | Both | Either | Braces, _))
}

fn is_rational(gold: &Expr, predicted: &Expr) -> bool {
    let transcendental = |expr: &Expr| {
        expr.any(&|part| matches!(part, Expr::Call(..) | Expr::Constant(_) | Expr::Scaled(Scale::Degree, _)))
    };
    !transcendental(gold) && !transcendental(predicted)
}

/// The number that `inner` percent or degrees are.
fn plain(scale: Scale, inner: &Expr) -> Expr {
    Expr::Mul(vec![
        Expr::Scaled(
            scale,
            Box::new(Expr::Number(Number {
                value: BigRational::from(num_bigint::BigInt::from(1)),
                places: None,
            })),
        ),
        inner.clone(),
    ])
}

/// `expr` with an integer for each variable.
fn at_integers(expr: &Expr) -> Expr {
    let each = |parts: &[Expr]| parts.iter().map(at_integers).collect();
    let boxed = |part: &Expr| Box::new(at_integers(part));
    match expr {
        Expr::Symbol(name) => {
            let value =
                BigRational::from(num_bigint::BigInt::from(2 + super::evaluate::draw(0, name) % 9973));
            Expr::Number(Number { value, places: None })
        }
        Expr::Neg(a) => Expr::Neg(boxed(a)),
        Expr::Add(parts) => Expr::Add(each(parts)),
        Expr::Mul(parts) => Expr::Mul(each(parts)),
        Expr::Div(a, b) => Expr::Div(boxed(a), boxed(b)),
        Expr::Pow(a, b) => Expr::Pow(boxed(a), boxed(b)),
        Expr::Call(function, parts) => Expr::Call(*function, each(parts)),
        other => other.clone(),
    }
}

/// `x > 3` and `1 <= x < 2` as intervals.
fn solution_set(relation: &Expr) -> Option<Expr> {
    use Relation::{Greater, GreaterEqual, Less, LessEqual};
    let Expr::Relation(sides, relations) = relation else { return None };
    let infinity = || Expr::Constant(Constant::Infinity);
    let is_variable = |side: &Expr| matches!(side, Expr::Symbol(_));
    let (low, low_relation, high, high_relation) = match (sides.as_slice(), relations.as_slice()) {
        ([variable, set], [Relation::In]) if is_variable(variable) => return Some(set.clone()),
        ([variable, bound], [relation]) if is_variable(variable) => match relation {
            Less | LessEqual => (Expr::Neg(Box::new(infinity())), Less, bound.clone(), *relation),
            Greater | GreaterEqual => (bound.clone(), relation.swapped(), infinity(), Less),
            _ => return None,
        },
        ([bound, variable], [relation]) if is_variable(variable) => match relation {
            Less | LessEqual => (bound.clone(), *relation, infinity(), Less),
            Greater | GreaterEqual => {
                (Expr::Neg(Box::new(infinity())), Less, bound.clone(), relation.swapped())
            }
            _ => return None,
        },
        ([low, variable, high], [first @ (Less | LessEqual), second @ (Less | LessEqual)])
            if is_variable(variable) =>
        {
            (low.clone(), *first, high.clone(), *second)
        }
        ([high, variable, low], [first @ (Greater | GreaterEqual), second @ (Greater | GreaterEqual)])
            if is_variable(variable) =>
        {
            (low.clone(), second.swapped(), high.clone(), first.swapped())
        }
        _ => return None,
    };
    if !low.symbols().is_empty() || !high.symbols().is_empty() {
        return None;
    }
    let brackets = match (low_relation, high_relation) {
        (Less, Less) => Brackets::Round,
        (Less, _) => Brackets::OpenClosed,
        (_, Less) => Brackets::ClosedOpen,
        _ => Brackets::Square,
    };
    Some(Expr::Sequence(brackets, vec![low, high]))
}

//! Comparison of a predicted answer with the gold answer, in any form.
//!
//! In doubt they differ: rewarding a wrong answer does more harm than missing a right one.

use std::cell::Cell;
use std::cmp::Ordering;

use num_rational::BigRational;
use num_traits::{Signed, ToPrimitive, Zero};

use super::Options;
use super::ball_arithmetic::{BallArithmetic, Domain};
use super::evaluate::{Fuel, constant_value, evaluate};
use super::expr::{Brackets, Expr, Function, Number, Relation, Scale};
use super::field::{Field, PRIMES};
use super::matrix::with_matrices;
use super::named::{
    are_all_named, assigned, grouped, in_order, is_same_function, is_sum_of_names, names_differ,
    without_tuple_names,
};
use super::parse::{Answer, literal};
use super::region::{all_reals, is_reals, region};
use super::unit::{changes_meaning, is_half_of_day};

/// Limit of work on a pair of answers: about 20 ms.
const FUEL: u64 = 300_000;

/// Number of points at which two formulas are compared.
const POINTS: u64 = 12;

/// Number of integer points; at many of them a binomial has no value.
const SMALL_POINTS: u64 = 40;

/// Number of real points; it is larger, since a root or a logarithm may be defined at few of them.
const REAL_POINTS: u64 = 30;

/// Number of these points at which both must be defined.
const ENOUGH_POINTS: usize = 4;

/// Returns true if `predicted` is right. A decimal gold number is matched within the relative tolerance, and
/// within half of its last digit.
///
/// If the gold number has no percent sign, a prediction in percent is right by value, and with `asks_percent`
/// also by number.
pub(super) fn is_right(gold: &Answer, predicted: &Answer, options: Options) -> bool {
    match (&gold.unit, &predicted.unit) {
        (Some(gold), Some(predicted)) if gold != predicted => return false,
        (None, Some(predicted)) if changes_meaning(predicted) => return false,
        _ => {}
    }
    let Options { tolerance, asks_percent, .. } = options;
    let comparison = Comparison { tolerance, asks_percent, fuel: Fuel::new(FUEL), depth: Cell::new(0) };
    if let Some(half) = gold.unit.as_deref().filter(|unit| is_half_of_day(unit)) {
        return predicted.unit.as_deref() == Some(half)
            && comparison.equal(&time(&gold.expr), &time(&predicted.expr));
    }
    let (gold_expr, predicted_expr) = (with_matrices(&gold.expr), with_matrices(&predicted.expr));
    let (expr, other) = (without_tuple_names(&gold_expr), without_tuple_names(&predicted_expr));
    match (&gold.modulus, &predicted.modulus) {
        (_, None) => comparison.equal(&expr, &other),
        (Some(modulus), Some(its)) => {
            comparison.equal(modulus, its) && comparison.equal_residues(&expr, &other, modulus)
        }
        (None, Some(_)) => false,
    }
}

/// A time with its minutes: `8` is `8:00`.
fn time(expr: &Expr) -> Expr {
    let Expr::Number(_) = expr else { return expr.clone() };
    let zero = Expr::Number(Number { value: BigRational::zero(), places: None });
    Expr::Sequence(Brackets::Square, vec![Expr::Words(":".to_owned()), expr.clone(), zero])
}

struct Comparison {
    tolerance: f64,
    asks_percent: bool,
    fuel: Fuel,
    /// Depth of nested conversions.
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
        self.equal_forms(gold, predicted) || self.equal_regions(gold, predicted)
    }

    fn equal_forms(&self, gold: &Expr, predicted: &Expr) -> bool {
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
            (gold, Relation(sides, _)) => {
                let value = || is_sum_of_names(predicted) && self.equal_values(gold, &sides[1]);
                self.values(predicted).into_iter().any(|value| self.equal(gold, value)) || value()
            }
            (Relation(..), predicted) => {
                self.values(gold).into_iter().any(|value| self.equal(value, predicted))
            }
            (Sequence(Brackets::Braces, items), Expr::Words(words))
            | (Expr::Words(words), Sequence(Brackets::Braces, items))
                if items.is_empty() =>
            {
                ["no solution", "no real solution", "empty set", "no value"].contains(&words.as_str())
            }
            // A set of one element equals the element.
            (Sequence(Brackets::Braces, items), scalar) if items.len() == 1 => self.equal(&items[0], scalar),
            (scalar, Sequence(Brackets::Braces, items)) if items.len() == 1 => self.equal(scalar, &items[0]),
            (Sequence(..) | Union(_) | Matrix(_), _) | (_, Sequence(..) | Union(_) | Matrix(_)) => false,
            _ => self.equal_scalars(gold, predicted),
        }
    }

    /// Compares congruences with the same modulus.
    fn equal_residues(&self, gold: &Expr, predicted: &Expr, modulus: &Expr) -> bool {
        if matches!((assigned(gold), assigned(predicted)), (Some(name), Some(other)) if name != other) {
            return false;
        }
        let residue = |expr: &Expr| match self.values(expr).first() {
            Some(value) => constant_value(value, &self.fuel),
            None => constant_value(expr, &self.fuel),
        };
        let modulus = constant_value(modulus, &self.fuel).filter(|modulus| !modulus.is_zero());
        match (residue(gold), residue(predicted), modulus) {
            (Some(gold), Some(predicted), Some(modulus)) => ((gold - predicted) / modulus).is_integer(),
            _ => self.equal(gold, predicted),
        }
    }

    // Several values.

    fn equal_sequences(&self, gold: (Brackets, &[Expr]), predicted: (Brackets, &[Expr])) -> bool {
        use Brackets::{Bare, Both, Braces, Either, Round, Square};
        let ((kind, gold), (other, predicted)) = (gold, predicted);
        if gold.len() != predicted.len() {
            return self.equal_regrouped((kind, gold), (other, predicted));
        }
        match (kind, other) {
            // `4, 5` is in the order of `AB = 4, CD = 5`.
            (Bare, Bare) if are_all_named(gold) && !predicted.iter().any(|it| assigned(it).is_some()) => {
                self.equal_ordered(gold, predicted)
            }
            (Both, Either) | (Either, Both) => false,
            (Bare | Both | Either | Braces, Bare | Both | Either | Braces) => {
                // `x = 2, y = 1` is named, and `1, 2` is not.
                let named = |items: &[Expr]| names_differ(items);
                named(gold) == named(predicted) && self.equal_unordered(gold, predicted)
            }
            // Square brackets would be a closed interval.
            (Bare, Round) => in_order(gold) && self.equal_ordered(gold, predicted),
            (Round, Bare) => in_order(predicted) && self.equal_ordered(gold, predicted),
            // Two values in square brackets may be a closed interval, which round ones are not.
            (Round, Square) | (Square, Round) => gold.len() > 2 && self.equal_ordered(gold, predicted),
            _ => kind == other && self.equal_ordered(gold, predicted),
        }
    }

    /// Compares sequences of different lengths: tuples with `p = 5, q = 2, p = 7, q = 2`, or a set that repeats
    /// elements.
    fn equal_regrouped(&self, gold: (Brackets, &[Expr]), predicted: (Brackets, &[Expr])) -> bool {
        use Brackets::{Bare, Braces};
        let ((kind, gold), (other, predicted)) = (gold, predicted);
        if !matches!((kind, other), (Bare | Braces, Bare | Braces)) {
            return false;
        }
        if let Some(tuples) = grouped(gold, predicted.len()) {
            return self.equal_unordered(&tuples, predicted);
        }
        if let Some(tuples) = grouped(predicted, gold.len()) {
            return self.equal_unordered(gold, &tuples);
        }
        let is_tuple = |item: &Expr| matches!(item, Expr::Sequence(Brackets::Round, _));
        // A bare list of numbers may count a value twice.
        let is_set = other == Braces || predicted.iter().all(is_tuple);
        is_set && predicted.len() > gold.len() && self.equal_unordered(gold, &self.distinct(predicted))
    }

    /// Items without those that equal an earlier one.
    fn distinct(&self, items: &[Expr]) -> Vec<Expr> {
        let mut kept: Vec<Expr> = Vec::with_capacity(items.len());
        for item in items {
            if !kept.iter().any(|other| self.equal(other, item)) {
                kept.push(item.clone());
            }
        }
        kept
    }

    fn equal_ordered(&self, gold: &[Expr], predicted: &[Expr]) -> bool {
        gold.len() == predicted.len()
            && gold.iter().zip(predicted).all(|(gold, predicted)| self.equal(gold, predicted))
    }

    /// Each element matches a different one of the other side.
    fn equal_unordered(&self, gold: &[Expr], predicted: &[Expr]) -> bool {
        let mut left: Vec<&Expr> = predicted.iter().collect();
        gold.len() == predicted.len()
            && gold.iter().all(|gold| {
                let found = left.iter().position(|predicted| self.equal(gold, predicted));
                found.map(|at| left.swap_remove(at)).is_some()
            })
    }

    /// Compares a row or column vector, or a list of rows, with a sequence; `sequence_is_gold` says which
    /// side is gold.
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

    /// The value that `x = 2 + 3 = 5` gives x: its last side, if all sides except a name at the front are
    /// equal. For `x = 1/3 ≈ 0.333` the rounded side is a value too.
    fn values<'a>(&self, relation: &'a Expr) -> Vec<&'a Expr> {
        let Expr::Relation(sides, relations) = relation else { return Vec::new() };
        if let ([name, set], [Relation::In]) = (sides.as_slice(), relations.as_slice()) {
            // Other sets are compared by `region`.
            let Expr::Sequence(Brackets::Braces, items) = set else { return Vec::new() };
            let is_name = matches!(name, Expr::Symbol(_));
            return if items.len() == 1 && is_name { vec![set] } else { Vec::new() };
        }
        if !relations.iter().all(|relation| relation.gives_a_value()) {
            return Vec::new();
        }
        // All names at the front, as in `x = y = 5`.
        let is_name = |side: &&Expr| matches!(side, Expr::Symbol(_));
        let names = sides[..sides.len() - 1].iter().take_while(is_name).count();
        let named = if assigned(relation).is_some() { names } else { 0 };
        let (values, links) = (&sides[named..], &relations[named..]);
        // A name has no rounded value: `x ≈ 5` may be anything near it.
        let is_rounded = relations.last() == Some(&Relation::About);
        let Some(last) = values.last().filter(|last| !is_rounded || places(last).is_some()) else {
            return Vec::new();
        };
        let agree = values.windows(2).zip(links).all(|(pair, link)| match link {
            Relation::About => self.rounds_to(&pair[0], &pair[1]),
            _ => self.equal(&pair[1], &pair[0]),
        });
        let before = values.len().checked_sub(2).filter(|_| is_rounded).map(|at| &values[at]);
        if agree { std::iter::once(last).chain(before).collect() } else { Vec::new() }
    }

    /// Returns true if `rounded` is a decimal within half of its last digit from `exact`.
    fn rounds_to(&self, exact: &Expr, rounded: &Expr) -> bool {
        places(rounded).is_some_and(|places| self.is_within(rounded, exact, 0.5 * 10f64.powi(-places)))
    }

    fn equal_relations(&self, gold: &Expr, predicted: &Expr) -> bool {
        let (Expr::Relation(sides, relations), Expr::Relation(others, other_relations)) = (gold, predicted)
        else {
            return false;
        };
        if let (Some(name), Some(other)) = (assigned(gold), assigned(predicted))
            && (name == other || is_same_function(name, other))
        {
            let others = self.values(predicted);
            return self.values(gold).into_iter().any(|value| others.iter().any(|it| self.equal(value, it)));
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

    /// Equality up to a constant factor, which must be positive for an inequality.
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

    /// The rational `q` with `a = q * b`, if there is one, computed at a point. 1 if they are not rational
    /// functions.
    fn factor(&self, a: &Expr, b: &Expr) -> Option<BigRational> {
        let at = |expr: &Expr| constant_value(&at_integers(expr), &self.fuel);
        match (at(a), at(b)) {
            (Some(a), Some(b)) if a.is_zero() || b.is_zero() => None,
            (Some(a), Some(b)) => Some(a / b),
            _ => Some(BigRational::from(num_bigint::BigInt::from(1))),
        }
    }

    /// Compares conditions on a variable as the sets of its values.
    fn equal_regions(&self, gold: &Expr, predicted: &Expr) -> bool {
        let is_set = |expr: &Expr| matches!(expr, Expr::Sequence(..) | Expr::Union(_)) || is_reals(expr);
        if is_reals(gold) != is_reals(predicted) && is_set(gold) && is_set(predicted) {
            let set = |expr: &Expr| if is_reals(expr) { all_reals() } else { expr.clone() };
            return set(gold) == set(predicted);
        }
        if is_reals(gold) && is_reals(predicted) {
            return true;
        }
        let order = |low: &Expr, high: &Expr| self.order(low, high);
        let (gold, predicted) = match (region(gold, &order), region(predicted, &order)) {
            (Some((variable, gold)), Some((other, predicted))) if variable == other => (gold, predicted),
            (Some((_, gold)), None) if is_set(predicted) => (gold, predicted.clone()),
            (None, Some((_, predicted))) if is_set(gold) => (gold.clone(), predicted),
            _ => return false,
        };
        is_list(&gold) == is_list(&predicted) && self.equal(&gold, &predicted)
    }

    /// Order of two numbers, exact or as far as rounding allows.
    fn order(&self, one: &Expr, other: &Expr) -> Option<Ordering> {
        let exact = |expr: &Expr| constant_value(expr, &self.fuel);
        if let (Some(one), Some(other)) = (exact(one), exact(other)) {
            return Some(one.cmp(&other));
        }
        let arithmetic = BallArithmetic { domain: Domain::Real, point: 0 };
        let value = |expr: &Expr| evaluate(expr, &arithmetic, &self.fuel).filter(|ball| ball.is_real());
        let (one, other) = (value(one)?, value(other)?);
        if one.agrees(&other) { Some(Ordering::Equal) } else { one.value.re.partial_cmp(&other.value.re) }
    }

    // One value.

    /// A number in percent or degrees is also right without its sign, or as the plain number.
    fn equal_scalars(&self, gold: &Expr, predicted: &Expr) -> bool {
        match (gold, predicted) {
            (Expr::Scaled(scale, gold), Expr::Scaled(other, predicted)) => {
                scale == other && self.equal_values(gold, predicted)
            }
            (Expr::Scaled(scale, inner), predicted) => {
                self.equal_values(inner, predicted) || self.equal_values(&plain(*scale, inner), predicted)
            }
            (gold, Expr::Scaled(scale, inner)) => {
                let drops_sign = *scale != Scale::Percent || self.asks_percent;
                (drops_sign && self.equal_values(gold, inner))
                    || self.equal_values(gold, &plain(*scale, inner))
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
            // Exact numbers that differ are equal only within the rounding of a decimal or of a float.
            (Some(value), Some(_)) => {
                return self.is_close(gold, predicted) || is_machine_rounded(&value, predicted);
            }
            _ => {}
        }
        self.is_close(gold, predicted) || self.is_identity(gold, predicted)
    }

    /// For a gold decimal: within the tolerance, and within half of the last digit.
    fn is_close(&self, gold: &Expr, predicted: &Expr) -> bool {
        let Some(Number { value, places: Some(places) }) = literal(gold) else { return false };
        let Some(value) = value.to_f64() else { return false };
        self.is_within(gold, predicted, (self.tolerance * value.abs()).min(0.5 * 10f64.powi(-places)))
    }

    /// Returns true if `other` is a real number within `distance` of `number`.
    fn is_within(&self, number: &Expr, other: &Expr, distance: f64) -> bool {
        let arithmetic = BallArithmetic { domain: Domain::Real, point: 0 };
        let value = literal(number).and_then(|number| number.value.to_f64());
        let Some(value) = value.filter(|_| other.symbols().is_empty()) else { return false };
        let Some(other) = evaluate(other, &arithmetic, &self.fuel) else { return false };
        other.is_real() && (other.value.re - value).abs() <= distance
    }

    /// Returns true if two formulas agree at all points where they are evaluated.
    fn is_identity(&self, gold: &Expr, predicted: &Expr) -> bool {
        if gold.symbols() != predicted.symbols() && !is_rational(gold, predicted) {
            return false;
        }
        let counts = |expr: &Expr| {
            expr.any(&|part| matches!(part, Expr::Call(Function::Factorial | Function::Binomial, _)))
        };
        let is_small = !gold.symbols().is_empty() && (counts(gold) || counts(predicted));
        match self.is_rational_identity(gold, predicted, is_small) {
            Some(equal) => equal,
            None => self.is_numeric_identity(gold, predicted),
        }
    }

    /// `None` unless both are rational functions, or, with `small` integers for the variables, have factorials.
    fn is_rational_identity(&self, gold: &Expr, predicted: &Expr, small: bool) -> Option<bool> {
        let mut compared = PRIMES.map(|_| 0);
        let points = if small { SMALL_POINTS } else { POINTS };
        for (point, which) in (0..points).zip((0..PRIMES.len()).cycle()) {
            let field = Field { point, prime: PRIMES[which], small };
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
            return self.agree(gold, predicted, BallArithmetic { domain: Domain::Real, point: 0 })
                == Some(true);
        }
        let mut compared = 0;
        for point in 0..REAL_POINTS {
            match self.agree(gold, predicted, BallArithmetic { domain: Domain::Real, point }) {
                Some(true) => compared += 1,
                Some(false) => return false,
                None => {}
            }
        }
        // Off the real axis, roots and logarithms have branches, and forms that are equal for reals may
        // differ.
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
            match self.agree(gold, predicted, BallArithmetic { domain: Domain::Complex, point }) {
                Some(true) => compared += 1,
                Some(false) => return false,
                None => {}
            }
        }
        compared >= ENOUGH_POINTS
    }

    /// Returns true if the two agree at a point; `None` if neither has a value there. Among reals, complex
    /// values do not count, so that forms with different domains differ.
    fn agree(&self, gold: &Expr, predicted: &Expr, arithmetic: BallArithmetic) -> Option<bool> {
        let has_symbols = !gold.symbols().is_empty();
        let value = |expr: &Expr| {
            let ball = evaluate(expr, &arithmetic, &self.fuel)?;
            (!has_symbols || arithmetic.domain == Domain::Complex || ball.is_real()).then_some(ball)
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

/// Returns true if `predicted` is a decimal with as many digits as a float prints, and right in the first 15.
fn is_machine_rounded(gold: &BigRational, predicted: &Expr) -> bool {
    const DIGITS: i32 = 15;
    let Some(Number { value, places: Some(places) }) = literal(predicted) else { return false };
    let ten = |power: i32| num_traits::Pow::pow(BigRational::from(num_bigint::BigInt::from(10)), power);
    let count = (value.abs() * ten(places)).to_integer().to_string().len() as i32;
    let half = ten(count - DIGITS - places) / num_bigint::BigInt::from(2);
    count >= DIGITS && (gold - value).abs() <= half
}

/// Returns true if values are listed, which an interval never does.
fn is_list(expr: &Expr) -> bool {
    use Brackets::{Bare, Both, Braces, Either};
    matches!(expr, Expr::Sequence(Bare | Both | Either | Braces, _))
}

/// Decimal places of a decimal.
fn places(expr: &Expr) -> Option<i32> {
    literal(expr)?.places
}

fn is_rational(gold: &Expr, predicted: &Expr) -> bool {
    let transcendental = |expr: &Expr| {
        expr.any(&|part| matches!(part, Expr::Call(..) | Expr::Constant(_) | Expr::Scaled(Scale::Degree, _)))
    };
    !transcendental(gold) && !transcendental(predicted)
}

/// The number that `inner` percent or degrees stand for.
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

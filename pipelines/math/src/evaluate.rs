//! Evaluation of expressions in different arithmetics.
//!
//! [`Exact`] has rationals, `field.rs` residues of a large prime, and `ball_arithmetic.rs` complex numbers with
//! error bounds. Every operation takes [`Fuel`], so that evaluation terminates.

use std::cell::Cell;

use num_bigint::BigInt;
use num_rational::BigRational;
use num_traits::{One, Pow, Signed, ToPrimitive, Zero};

use super::expr::{Constant, Expr, Function, Scale};

/// Remaining work; a unit takes about 60 ns.
#[derive(Debug)]
pub(super) struct Fuel(Cell<u64>);

impl Fuel {
    pub(super) fn new(units: u64) -> Self {
        Self(Cell::new(units))
    }

    /// Takes `units`; `None` if fewer are left.
    pub(super) fn burn(&self, units: u64) -> Option<()> {
        let left = self.0.get().checked_sub(units);
        self.0.set(left.unwrap_or(0));
        left.map(|_| ())
    }
}

/// An arithmetic for expressions; operations return `None` if it cannot represent the result.
pub(super) trait Arithmetic {
    /// A number.
    type Value: Clone;

    fn number(&self, number: &BigRational) -> Option<Self::Value>;
    fn constant(&self, constant: Constant) -> Option<Self::Value>;
    fn symbol(&self, name: &str) -> Option<Self::Value>;
    fn add(&self, a: &Self::Value, b: &Self::Value) -> Option<Self::Value>;
    fn mul(&self, a: &Self::Value, b: &Self::Value) -> Option<Self::Value>;
    fn div(&self, a: &Self::Value, b: &Self::Value) -> Option<Self::Value>;
    fn powi(&self, base: &Self::Value, exponent: i64) -> Option<Self::Value>;
    fn pow(&self, base: &Self::Value, exponent: &Self::Value) -> Option<Self::Value>;
    fn call(&self, function: Function, arguments: &[Self::Value]) -> Option<Self::Value>;
    /// Fuel for computing a result.
    fn cost(&self, value: &Self::Value) -> u64;
}

/// Limit of a root's degree.
const MOST_DEGREE: u32 = 64;

/// Fuel for a factorial that is not an exact number.
const FACTORIAL_FUEL: u64 = 1000;

/// Value of `expr`. `None` if it is undefined, `arithmetic` cannot represent it, or the fuel is spent.
pub(super) fn evaluate<A: Arithmetic>(expr: &Expr, arithmetic: &A, fuel: &Fuel) -> Option<A::Value> {
    fuel.burn(1)?;
    let value = |expr: &Expr| evaluate(expr, arithmetic, fuel);
    let result = match expr {
        Expr::Number(number) => arithmetic.number(&number.value),
        Expr::Constant(constant) => arithmetic.constant(*constant),
        Expr::Symbol(name) => arithmetic.symbol(name),
        Expr::Neg(a) => negate(&value(a)?, arithmetic),
        Expr::Add(terms) => fold(terms, value, |a, b| arithmetic.add(a, b)),
        Expr::Mul(factors) => fold(factors, value, |a, b| arithmetic.mul(a, b)),
        Expr::Div(a, b) => arithmetic.div(&value(a)?, &value(b)?),
        Expr::Pow(base, exponent) => {
            let known = constant_value(exponent, fuel);
            let integer = |value: &BigInt| value.to_i64();
            match known.as_ref().map(|known| (integer(known.numer()), known.denom().to_u32())) {
                Some((Some(exponent), Some(1))) => arithmetic.powi(&value(base)?, exponent),
                // Among reals, `x^{2/3}` is the square of the cube root, for negative numbers too.
                Some((Some(exponent), Some(degree))) if degree % 2 == 1 && degree <= MOST_DEGREE => {
                    let degree = arithmetic.number(&BigRational::from(BigInt::from(degree)))?;
                    let root = arithmetic.call(Function::Root, &[degree, value(base)?])?;
                    arithmetic.powi(&root, exponent)
                }
                _ => arithmetic.pow(&value(base)?, &value(exponent)?),
            }
        }
        Expr::Scaled(Scale::Percent, a) => arithmetic.div(&value(a)?, &arithmetic.number(&integer(100))?),
        Expr::Scaled(Scale::Degree, a) => {
            let pi = arithmetic.constant(Constant::Pi)?;
            let radian = arithmetic.div(&pi, &arithmetic.number(&integer(180))?)?;
            arithmetic.mul(&value(a)?, &radian)
        }
        Expr::Call(function, arguments) => match exact_call(*function, arguments, fuel) {
            Some(number) => arithmetic.number(&number),
            None => {
                if matches!(function, Function::Factorial | Function::Binomial) {
                    fuel.burn(FACTORIAL_FUEL)?;
                }
                let arguments: Option<Vec<_>> = arguments.iter().map(value).collect();
                arithmetic.call(*function, &arguments?)
            }
        },
        _ => None,
    }?;
    fuel.burn(arithmetic.cost(&result))?;
    Some(result)
}

fn negate<A: Arithmetic>(value: &A::Value, arithmetic: &A) -> Option<A::Value> {
    arithmetic.mul(value, &arithmetic.number(&integer(-1))?)
}

fn fold<V>(
    parts: &[Expr],
    value: impl Fn(&Expr) -> Option<V>,
    join: impl Fn(&V, &V) -> Option<V>,
) -> Option<V> {
    let (first, rest) = parts.split_first()?;
    rest.iter().try_fold(value(first)?, |sum, part| join(&sum, &value(part)?))
}

fn integer(value: i64) -> BigRational {
    BigRational::from(BigInt::from(value))
}

/// Exact value of an expression without variables, if it is rational.
pub(super) fn constant_value(expr: &Expr, fuel: &Fuel) -> Option<BigRational> {
    evaluate(expr, &Exact, fuel)
}

/// Value of a function of exact numbers, if it is rational.
fn exact_call(function: Function, arguments: &[Expr], fuel: &Fuel) -> Option<BigRational> {
    use Function::{Abs, Binomial, Ceiling, Factorial, Floor, Log, Root};
    if !matches!(function, Abs | Binomial | Ceiling | Factorial | Floor | Log | Root) {
        return None;
    }
    let arguments: Option<Vec<_>> = arguments.iter().map(|argument| constant_value(argument, fuel)).collect();
    match (function, arguments?.as_slice()) {
        (Abs, [a]) => Some(a.abs()),
        (Floor, [a]) => Some(a.floor()),
        (Ceiling, [a]) => Some(a.ceil()),
        (Factorial, [a]) => small(a, 170).map(factorial),
        (Binomial, [n, k]) => {
            let (n, k) = (small(n, 170)?, small(k, 170)?);
            if k > n { Some(integer(0)) } else { Some(factorial(n) / (factorial(k) * factorial(n - k))) }
        }
        (Root, [degree, a]) => exact_root(a, small(degree, MOST_DEGREE)?),
        (Log, [base, a]) => exact_log(base, a),
        _ => None,
    }
}

/// An integer from 0 to `most`.
fn small(value: &BigRational, most: u32) -> Option<u32> {
    let whole = value.is_integer().then(|| value.numer().to_u32())??;
    (whole <= most).then_some(whole)
}

fn factorial(n: u32) -> BigRational {
    (2..=n).fold(BigInt::one(), |product, factor| product * factor).into()
}

/// The real root, if it is rational.
fn exact_root(value: &BigRational, degree: u32) -> Option<BigRational> {
    if degree == 0 || (value.is_negative() && degree.is_multiple_of(2)) {
        return None;
    }
    let root = BigRational::new(value.numer().nth_root(degree), value.denom().nth_root(degree));
    (Pow::pow(&root, degree) == *value).then_some(root)
}

/// The integer exponent with `base^exponent = value`.
fn exact_log(base: &BigRational, value: &BigRational) -> Option<BigRational> {
    if !base.is_positive() || !value.is_positive() || base.is_one() {
        return None;
    }
    let exponent = (value.to_f64()?.ln() / base.to_f64()?.ln()).round();
    let exponent = (exponent.abs() < 512.0).then_some(exponent as i32)?;
    (Exact.powi(base, i64::from(exponent))? == *value).then(|| integer(i64::from(exponent)))
}

/// Rationals of bounded size, without variables.
pub(super) struct Exact;

/// Maximum bits of a numerator or denominator.
const MOST_BITS: u64 = 2048;

fn bits(value: &BigRational) -> u64 {
    value.numer().bits().max(value.denom().bits())
}

fn bounded(value: BigRational) -> Option<BigRational> {
    (bits(&value) <= MOST_BITS).then_some(value)
}

impl Arithmetic for Exact {
    type Value = BigRational;

    fn number(&self, number: &BigRational) -> Option<BigRational> {
        Some(number.clone())
    }

    fn constant(&self, _constant: Constant) -> Option<BigRational> {
        None
    }

    fn symbol(&self, _name: &str) -> Option<BigRational> {
        None
    }

    fn add(&self, a: &BigRational, b: &BigRational) -> Option<BigRational> {
        bounded(a + b)
    }

    fn mul(&self, a: &BigRational, b: &BigRational) -> Option<BigRational> {
        bounded(a * b)
    }

    fn div(&self, a: &BigRational, b: &BigRational) -> Option<BigRational> {
        if b.is_zero() { None } else { bounded(a / b) }
    }

    fn powi(&self, base: &BigRational, exponent: i64) -> Option<BigRational> {
        if base.is_zero() && exponent <= 0 {
            return None;
        }
        if bits(base).saturating_mul(exponent.unsigned_abs()) > MOST_BITS && !base.abs().is_one() {
            return None;
        }
        // Other bases have no powers this large; of 0, 1 and -1 only the exponent's parity matters.
        let exponent = if base.abs().is_one() || base.is_zero() { exponent % 2 + 2 } else { exponent };
        Some(Pow::pow(base, exponent as i32))
    }

    fn pow(&self, base: &BigRational, exponent: &BigRational) -> Option<BigRational> {
        if base.is_negative() {
            return None;
        }
        let root = exact_root(base, exponent.denom().to_u32().filter(|degree| *degree <= MOST_DEGREE)?)?;
        self.powi(&root, exponent.numer().to_i64()?)
    }

    fn call(&self, function: Function, arguments: &[BigRational]) -> Option<BigRational> {
        match (function, arguments) {
            (Function::Root, [degree, a]) => exact_root(a, small(degree, MOST_DEGREE)?),
            _ => None,
        }
    }

    fn cost(&self, value: &BigRational) -> u64 {
        // A greatest common divisor takes as many steps as bits, over as many words.
        let bits = bits(value);
        4 + bits * bits / 2048
    }
}

/// 64 random bits for a variable at a point: SplitMix64 (Steele et al., 2014) of both.
pub(super) fn draw(point: u64, name: &str) -> u64 {
    let seed = u64::from(crc32fast::hash(name.as_bytes())) << 32 | point;
    let mut z = seed.wrapping_add(0x9e37_79b9_7f4a_7c15);
    z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    z ^ (z >> 31)
}

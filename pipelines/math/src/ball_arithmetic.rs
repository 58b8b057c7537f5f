//! Ball arithmetic: complex numbers with a bound on their rounding error.
//!
//! Two balls agree if rounding can explain their distance. So `sqrt(10^12 + 1)` is not `10^6`, and a long sum
//! that loses digits still equals its short form.

use num_complex::Complex64;
use num_rational::BigRational;
use num_traits::ToPrimitive;

use super::evaluate::{Arithmetic, draw};
use super::expr::{Constant, Function};

/// A value and the bound of its error.
#[derive(Clone, Copy, Debug)]
pub(super) struct Ball {
    pub(super) value: Complex64,
    error: f64,
}

impl Ball {
    /// `None` if it is not finite. Real and imaginary parts within the error are set to zero.
    fn new(mut value: Complex64, error: f64) -> Option<Self> {
        let error = error + value.norm() * f64::EPSILON;
        if value.im.abs() <= error {
            value.im = 0.0;
        }
        if value.re.abs() <= error {
            value.re = 0.0;
        }
        (value.is_finite() && error.is_finite()).then_some(Self { value, error })
    }

    /// Returns true if the imaginary part is zero.
    pub(super) fn is_real(&self) -> bool {
        self.value.im == 0.0
    }

    /// Returns true if enough digits are left to distinguish it from other numbers.
    pub(super) fn is_precise(&self) -> bool {
        self.error <= 1e-9 * self.value.norm().max(1.0)
    }

    /// Returns true if the two may be the same number.
    pub(super) fn agrees(&self, other: &Self) -> bool {
        (self.value - other.value).norm() <= 4.0 * (self.error + other.error)
    }

    /// Applies `function`. The new error is the change of its value when the argument moves by the error.
    fn map(&self, function: impl Fn(Complex64) -> Complex64) -> Option<Self> {
        let value = function(self.value);
        let step = self.error.max(f64::EPSILON * self.value.norm());
        let moved = (function(self.value + step) - value).norm();
        let moved = if moved.is_finite() { moved } else { (function(self.value - step) - value).norm() };
        Self::new(value, 2.0 * moved + 4.0 * f64::EPSILON * value.norm())
    }
}

/// Range of random variables.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Domain {
    /// Real numbers of both signs with absolute values from a hundredth to thirty.
    Real,
    /// Complex numbers near the unit circle, in all quadrants.
    Complex,
}

/// Arithmetic with a random ball for each variable.
pub(super) struct BallArithmetic {
    pub(super) domain: Domain,
    /// Seed of the variables.
    pub(super) point: u64,
}

impl Arithmetic for BallArithmetic {
    type Value = Ball;

    fn number(&self, number: &BigRational) -> Option<Ball> {
        Ball::new(number.to_f64()?.into(), 0.0)
    }

    fn constant(&self, constant: Constant) -> Option<Ball> {
        match constant {
            Constant::Pi => Ball::new(std::f64::consts::PI.into(), 0.0),
            Constant::E => Ball::new(std::f64::consts::E.into(), 0.0),
            Constant::I => Some(Ball { value: Complex64::I, error: 0.0 }),
            Constant::Infinity => None,
        }
    }

    fn symbol(&self, name: &str) -> Option<Ball> {
        let random = draw(self.point, name);
        // Two numbers of 26 bits: a size, and a sign or an angle.
        let first = (random >> 38) as f64 / f64::from(1 << 26);
        let second = ((random >> 12) & ((1 << 26) - 1)) as f64 / f64::from(1 << 26);
        let value = match self.domain {
            Domain::Real => {
                // Near zero, near one and further away, in turn.
                let size = 10f64.powi((self.point % 3) as i32 - 1) * (0.1 + 2.9 * first);
                Complex64::from(if second < 0.4 { -size } else { size })
            }
            Domain::Complex => Complex64::from_polar(0.5 + first, second * std::f64::consts::TAU),
        };
        Some(Ball { value, error: 0.0 })
    }

    fn add(&self, a: &Ball, b: &Ball) -> Option<Ball> {
        Ball::new(a.value + b.value, a.error + b.error)
    }

    fn mul(&self, a: &Ball, b: &Ball) -> Option<Ball> {
        let error = a.value.norm() * b.error + b.value.norm() * a.error + a.error * b.error;
        let value = a.value * b.value;
        Ball::new(value, error + 2.0 * f64::EPSILON * value.norm())
    }

    fn div(&self, a: &Ball, b: &Ball) -> Option<Ball> {
        let room = b.value.norm() - b.error;
        if room <= 0.0 {
            return None;
        }
        let value = a.value / b.value;
        Ball::new(value, (a.error + value.norm() * b.error) / room + 4.0 * f64::EPSILON * value.norm())
    }

    fn powi(&self, base: &Ball, exponent: i64) -> Option<Ball> {
        if exponent == 0 {
            return if base.value.norm() > base.error { Ball::new(1.0.into(), 0.0) } else { None };
        }
        let one = Ball { value: 1.0.into(), error: 0.0 };
        let (mut result, mut square, mut left) = (one, *base, exponent.unsigned_abs());
        while left > 0 {
            if left % 2 == 1 {
                result = self.mul(&result, &square)?;
            }
            left /= 2;
            if left > 0 {
                square = self.mul(&square, &square)?;
            }
        }
        if exponent < 0 { self.div(&one, &result) } else { Some(result) }
    }

    fn pow(&self, base: &Ball, exponent: &Ball) -> Option<Ball> {
        if base.value.norm() <= base.error {
            return (base.value.norm() == 0.0 && exponent.value.re > exponent.error)
                .then_some(Ball { value: 0.0.into(), error: base.error });
        }
        if exponent.value == Complex64::from(0.5) {
            return base.map(Complex64::sqrt);
        }
        let log = base.map(Complex64::ln)?;
        self.mul(&log, exponent)?.map(Complex64::exp)
    }

    fn call(&self, function: Function, arguments: &[Ball]) -> Option<Ball> {
        use Function::*;
        let one = Ball { value: 1.0.into(), error: 0.0 };
        match (function, arguments) {
            (Sin, [a]) => a.map(Complex64::sin),
            (Cos, [a]) => a.map(Complex64::cos),
            (Tan, [a]) => self.div(&a.map(Complex64::sin)?, &a.map(Complex64::cos)?),
            (Cot, [a]) => self.div(&a.map(Complex64::cos)?, &a.map(Complex64::sin)?),
            (Sec, [a]) => self.div(&one, &a.map(Complex64::cos)?),
            (Csc, [a]) => self.div(&one, &a.map(Complex64::sin)?),
            (Arcsin, [a]) => a.map(Complex64::asin),
            (Arccos, [a]) => a.map(Complex64::acos),
            (Arctan, [a]) => a.map(Complex64::atan),
            (Sinh, [a]) => a.map(Complex64::sinh),
            (Cosh, [a]) => a.map(Complex64::cosh),
            (Tanh, [a]) => a.map(Complex64::tanh),
            (Exp, [a]) => a.map(Complex64::exp),
            (Ln, [a]) => nonzero(a)?.map(Complex64::ln),
            (Log, [base, a]) => {
                self.div(&nonzero(a)?.map(Complex64::ln)?, &nonzero(base)?.map(Complex64::ln)?)
            }
            (Root, [degree, a]) => self.root(degree, a),
            (Abs, [a]) => Ball::new(a.value.norm().into(), a.error),
            (Floor, [a]) => step(a, f64::floor),
            (Ceiling, [a]) => step(a, f64::ceil),
            _ => None,
        }
    }

    fn cost(&self, _value: &Ball) -> u64 {
        4
    }
}

impl BallArithmetic {
    /// The real root of a negative number if the degree is odd, else the principal root.
    fn root(&self, degree: &Ball, a: &Ball) -> Option<Ball> {
        let one = Ball { value: 1.0.into(), error: 0.0 };
        if degree.value == Complex64::from(2.0) {
            return a.map(Complex64::sqrt);
        }
        let exponent = self.div(&one, degree)?;
        let is_odd = degree.is_real() && degree.value.re % 2.0 == 1.0;
        if is_odd && a.is_real() && a.value.re < 0.0 {
            let root = self.pow(&Ball { value: -a.value, error: a.error }, &exponent)?;
            return Ball::new(-root.value, root.error);
        }
        self.pow(a, &exponent)
    }
}

fn nonzero(a: &Ball) -> Option<&Ball> {
    (a.value.norm() > a.error).then_some(a)
}

/// A step function of a real number; `None` if a step is within the error.
fn step(a: &Ball, function: fn(f64) -> f64) -> Option<Ball> {
    let (low, high) = (function(a.value.re - a.error), function(a.value.re + a.error));
    (a.is_real() && low == high).then(|| Ball::new(low.into(), 0.0))?
}

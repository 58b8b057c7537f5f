//! Residues of a large prime, in which rational functions and factorials are compared.

use num_bigint::BigInt;
use num_rational::BigRational;
use num_traits::{Signed, ToPrimitive};

use super::evaluate::{Arithmetic, draw};
use super::expr::{Constant, Function};

/// The integers modulo a prime, with a random one for each variable. Two different rational functions agree
/// at such a point with a probability of about their degree in 2^61, unless the prime divides their
/// difference.
pub(super) struct Field {
    /// Seed of the variables.
    pub(super) point: u64,
    /// One of [`PRIMES`].
    pub(super) prime: u64,
    /// True if the variables are small integers, for which factorials and powers have values.
    pub(super) small: bool,
}

/// Limit of a small variable.
const MOST_SMALL: u64 = 120;

/// Limit of a factorial's argument.
const MOST_FACTORS: u64 = 2500;

/// Two primes, since a formula may contain one of them as a number, which is then zero.
pub(super) const PRIMES: [u64; 2] = [(1 << 61) - 1, (1 << 61) - 31];

impl Field {
    fn residue(&self, value: &BigInt) -> u64 {
        let prime = BigInt::from(self.prime);
        let residue = value % &prime;
        let residue = if residue.is_negative() { residue + prime } else { residue };
        residue.to_u64().expect("a residue of a 61-bit prime")
    }

    fn times(&self, a: u64, b: u64) -> u64 {
        (u128::from(a) * u128::from(b) % u128::from(self.prime)) as u64
    }

    fn power(&self, base: u64, mut exponent: u64) -> u64 {
        let (mut result, mut square) = (1, base);
        while exponent > 0 {
            if exponent % 2 == 1 {
                result = self.times(result, square);
            }
            square = self.times(square, square);
            exponent /= 2;
        }
        result
    }

    fn factorial(&self, n: u64) -> Option<u64> {
        (n <= MOST_FACTORS).then(|| (2..=n).fold(1, |product, factor| self.times(product, factor)))
    }

    fn inverse(&self, value: u64) -> Option<u64> {
        // Fermat's little theorem.
        (value != 0).then(|| self.power(value, self.prime - 2))
    }
}

impl Arithmetic for Field {
    type Value = u64;

    fn number(&self, number: &BigRational) -> Option<u64> {
        Some(self.times(self.residue(number.numer()), self.inverse(self.residue(number.denom()))?))
    }

    fn constant(&self, _constant: Constant) -> Option<u64> {
        None
    }

    fn symbol(&self, name: &str) -> Option<u64> {
        let random = draw(self.point, name);
        Some(if self.small { 1 + random % MOST_SMALL } else { random % self.prime })
    }

    fn add(&self, a: &u64, b: &u64) -> Option<u64> {
        Some((a + b) % self.prime)
    }

    fn mul(&self, a: &u64, b: &u64) -> Option<u64> {
        Some(self.times(*a, *b))
    }

    fn div(&self, a: &u64, b: &u64) -> Option<u64> {
        Some(self.times(*a, self.inverse(*b)?))
    }

    fn powi(&self, base: &u64, exponent: i64) -> Option<u64> {
        /// A polynomial of higher degree is zero by chance too often.
        const MOST_DEGREE: u64 = 1 << 20;
        if exponent.unsigned_abs() > MOST_DEGREE || (*base == 0 && exponent <= 0) {
            return None;
        }
        let base = if exponent < 0 { self.inverse(*base)? } else { *base };
        Some(self.power(base, exponent.unsigned_abs()))
    }

    fn pow(&self, base: &u64, exponent: &u64) -> Option<u64> {
        let is_exponent = self.small && (1..=MOST_FACTORS).contains(exponent);
        is_exponent.then(|| self.power(*base, *exponent))
    }

    fn call(&self, function: Function, arguments: &[u64]) -> Option<u64> {
        match (function, arguments) {
            (Function::Factorial, [n]) => self.factorial(*n),
            (Function::Binomial, [n, k]) if k <= n => {
                let below = self.times(self.factorial(*k)?, self.factorial(n - k)?);
                Some(self.times(self.factorial(*n)?, self.inverse(below)?))
            }
            _ => None,
        }
    }

    fn cost(&self, _value: &u64) -> u64 {
        4
    }
}

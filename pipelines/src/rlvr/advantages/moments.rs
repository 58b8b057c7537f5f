//! Moments of values on several ranks, in two passes, since a single pass would lose precision.

use anyroll_algorithm::Moments;

use crate::{
    Result,
    train::{Exchange, reduced},
};

/// Moments and range of some values, over all ranks.
#[derive(Clone, Copy, Debug)]
pub struct Spread {
    /// Count, mean and squares.
    pub moments: Moments,
    /// The smallest value.
    pub least: f64,
    /// The largest value.
    pub most: f64,
}

reduced! {
    /// First pass over some values.
    struct FirstPass {
        /// Number of values.
        sum count: f64,
        /// Sum of the values.
        sum total: f64,
        /// The smallest value.
        min least: f64,
        /// The largest value.
        max most: f64,
    }
}

/// Returns the moments of all ranks' values, from this rank's. Every rank must call this.
pub fn moments(exchange: &Exchange, own: &[f64]) -> Result<Moments> {
    Ok(spreads(exchange, &[own])?[0].moments)
}

/// Returns the spread of several lists of values, from this rank's part of each. Every rank must call this with the
/// same number of lists.
pub fn spreads(exchange: &Exchange, lists: &[&[f64]]) -> Result<Vec<Spread>> {
    let first = |own: &&[f64]| FirstPass {
        count: own.len() as f64,
        total: own.iter().fold(0.0, |sum, value| sum + value),
        least: own.iter().copied().fold(f64::INFINITY, f64::min),
        most: own.iter().copied().fold(f64::NEG_INFINITY, f64::max),
    };
    let first = exchange.reduce(&lists.iter().map(first).collect::<Vec<FirstPass>>())?;
    let means: Vec<f64> = first.iter().map(|pass| pass.total / pass.count.max(1.0)).collect();
    let squares = lists.iter().zip(&means).map(|(own, mean)| {
        own.iter().map(|value| (value - mean).powi(2)).fold(0.0, |sum, square| sum + square)
    });
    let squares = exchange.reduce(&squares.collect::<Vec<f64>>())?;
    let all = first.into_iter().zip(means).zip(squares);
    let spread = |((pass, mean), squares): ((FirstPass, f64), f64)| Spread {
        moments: Moments { count: pass.count, mean, squares },
        least: pass.least,
        most: pass.most,
    };
    Ok(all.map(spread).collect())
}

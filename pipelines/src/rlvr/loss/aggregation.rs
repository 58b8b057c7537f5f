//! Aggregation of tokens' losses: the sum of each times its weight, over a count.
//!
//! A weight depends on a token's own sequence only and the count on the whole mini-batch, so that ranks and
//! micro-batches add up to the same gradient however a mini-batch is split.

use anyroll_config::Aggregation;

/// The weight of each token of sequences of these lengths, one sequence after another.
pub fn token_weights(aggregation: Aggregation, lengths: &[i64]) -> Vec<f32> {
    let weight = |length: i64| match aggregation {
        Aggregation::TokenMean | Aggregation::SeqMeanTokenSum => 1.0,
        Aggregation::SeqMeanTokenMean => 1.0 / length as f64,
        Aggregation::SeqMeanTokenSumNorm(norm) => 1.0 / norm.length as f64,
    };
    let tokens = |&length: &i64| std::iter::repeat_n(weight(length) as f32, length as usize);
    lengths.iter().flat_map(tokens).collect()
}

/// Divisor of the weighted sum: the tokens, or the sequences, of a mini-batch whose sequences over all
/// ranks have these lengths. At least 1, so that a mini-batch of which all is left out has a gradient of 0.
pub fn count(aggregation: Aggregation, lengths: &[f64]) -> f64 {
    let count = match aggregation {
        Aggregation::TokenMean => lengths.iter().sum(),
        Aggregation::SeqMeanTokenMean
        | Aggregation::SeqMeanTokenSum
        | Aggregation::SeqMeanTokenSumNorm(_) => lengths.len() as f64,
    };
    count.max(1.0)
}

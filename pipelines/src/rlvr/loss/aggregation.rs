//! Aggregation of tokens' losses: the weighted sum over tokens, divided by a count.
//!
//! A weight depends only on a token's own sequence, and the count on the whole mini-batch. Any split of a mini-batch
//! into ranks and micro-batches therefore gives the same gradient.

use anyroll_config::Aggregation;

/// Weight of each token of sequences of these lengths, one sequence after another.
pub fn token_weights(aggregation: Aggregation, lengths: &[i64]) -> Vec<f32> {
    let weight = |length: i64| match aggregation {
        Aggregation::TokenMean | Aggregation::SeqMeanTokenSum => 1.0,
        Aggregation::SeqMeanTokenMean => 1.0 / length as f64,
        Aggregation::SeqMeanTokenSumNorm(norm) => 1.0 / norm.length as f64,
    };
    let tokens = |&length: &i64| std::iter::repeat_n(weight(length) as f32, length as usize);
    lengths.iter().flat_map(tokens).collect()
}

/// Divisor of the weighted sum: the number of tokens or sequences in a mini-batch. `lengths` are those of its
/// sequences over all ranks. The divisor is at least 1, so that a mini-batch without trained tokens has a gradient of
/// 0.
pub fn count(aggregation: Aggregation, lengths: &[f64]) -> f64 {
    let count = match aggregation {
        Aggregation::TokenMean => lengths.iter().sum(),
        Aggregation::SeqMeanTokenMean
        | Aggregation::SeqMeanTokenSum
        | Aggregation::SeqMeanTokenSumNorm(_) => lengths.len() as f64,
    };
    count.max(1.0)
}

//! Random streams that depend on a purpose, a seed and a step, and orders from them.

use rand_chacha::ChaCha8Rng;
use rand_chacha::rand_core::{Rng, SeedableRng};

/// The random stream of a (purpose, seed, step).
pub fn stream(purpose: u64, seed: u64, step: u64) -> ChaCha8Rng {
    let mut key = [0; 32];
    for (bytes, value) in key.chunks_exact_mut(8).zip([purpose, seed, step]) {
        bytes.copy_from_slice(&value.to_le_bytes());
    }
    ChaCha8Rng::from_seed(key)
}

/// Shuffles `values` (Fisher and Yates).
pub fn shuffle<T>(values: &mut [T], rng: &mut ChaCha8Rng) {
    for last in (1..values.len()).rev() {
        values.swap(last, below(rng, last as u64 + 1) as usize);
    }
}

/// A uniform number below `limit`, with a bias of at most `limit / 2^64`.
pub(crate) fn below(rng: &mut ChaCha8Rng, limit: u64) -> u64 {
    ((u128::from(rng.next_u64()) * u128::from(limit)) >> 64) as u64
}

/// The numbers below `length` in a random order.
pub fn shuffled(length: usize, rng: &mut ChaCha8Rng) -> Vec<usize> {
    let mut order: Vec<usize> = (0..length).collect();
    shuffle(&mut order, rng);
    order
}

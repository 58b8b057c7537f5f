//! Random numbers as pure functions of a seed and a stream: the same on every platform and in every order.

use rand_chacha::ChaCha8Rng;
use rand_chacha::rand_core::{Rng, SeedableRng};

/// An independent sequence of random numbers for each pair of seed and stream.
pub(crate) struct Stream(ChaCha8Rng);

impl Stream {
    pub fn new(seed: u64, stream: u64) -> Stream {
        let mut random = ChaCha8Rng::seed_from_u64(seed);
        random.set_stream(stream);
        Stream(random)
    }

    /// The next number in [0, 1), of 53 random bits.
    pub fn uniform(&mut self) -> f64 {
        (self.0.next_u64() >> 11) as f64 / (1u64 << 53) as f64
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn numbers_are_spread_evenly_and_streams_differ() {
        let mut stream = Stream::new(7, 0);
        let numbers: Vec<f64> = (0..10_000).map(|_| stream.uniform()).collect();
        let mean = numbers.iter().sum::<f64>() / 10_000.0;
        assert!((mean - 0.5).abs() < 0.01, "{mean}");
        assert!(numbers.iter().all(|number| (0.0..1.0).contains(number)));
        assert_eq!(Stream::new(7, 0).uniform(), numbers[0]);
        assert_ne!(Stream::new(7, 1).uniform(), numbers[0]);
        assert_ne!(Stream::new(8, 0).uniform(), numbers[0]);
    }
}

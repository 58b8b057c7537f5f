//! Random numbers as pure functions of a seed and a stream: the same on every platform and in every order.

use rand_chacha::ChaCha8Rng;
use rand_chacha::rand_core::{Rng, SeedableRng};

/// `count` numbers of the standard normal distribution: a pure function of the seed.
pub fn normals(seed: u64, count: usize) -> Vec<f32> {
    let mut values = Vec::with_capacity(count);
    Stream::new(seed, 0).extend_normal(&mut values, count, 1.0);
    values
}

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

    /// Appends `count` values of N(0, std^2), by Box and Muller's method in pairs.
    pub fn extend_normal(&mut self, values: &mut Vec<f32>, count: usize, std: f64) {
        let end = values.len() + count;
        while values.len() < end {
            let radius = std * (-2.0 * (1.0 - self.uniform()).ln()).sqrt(); // 1 - u is never 0
            let (sin, cos) = (std::f64::consts::TAU * self.uniform()).sin_cos();
            values.push((radius * cos) as f32);
            if values.len() < end {
                values.push((radius * sin) as f32);
            }
        }
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

//! Random numbers as pure functions of a seed and a stream: the same on every platform and in every order.

use rand_chacha::ChaCha8Rng;
use rand_chacha::rand_core::{Rng, SeedableRng};

/// `count` numbers of the standard normal distribution: a pure function of the seed.
pub fn normals(seed: u64, count: usize) -> Vec<f32> {
    let mut values = vec![0.0; count];
    Numbers { seed, stream: 0 }.normals(0, 1.0, &mut values);
    values
}

/// A long sequence of random numbers for each pair of seed and stream, of which any part is made by itself.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Numbers {
    pub seed: u64,
    pub stream: u64,
}

impl Numbers {
    /// Those from number `first` on, uniform in [-bound, bound).
    pub fn uniforms(self, first: usize, bound: f64, values: &mut [f32]) {
        self.in_parts(first, values, |mut stream, is_second, values| {
            if is_second {
                stream.uniform();
            }
            values.fill_with(|| ((2.0 * stream.uniform() - 1.0) * bound) as f32);
        });
    }

    /// Those from number `first` on of N(0, std^2), by Box and Muller's method in pairs.
    pub fn normals(self, first: usize, std: f64, values: &mut [f32]) {
        self.in_parts(first, values, |mut stream, is_second, values| {
            let mut pair = || {
                let radius = std * (-2.0 * (1.0 - stream.uniform()).ln()).sqrt(); // 1 - u is never 0
                let (sin, cos) = (std::f64::consts::TAU * stream.uniform()).sin_cos();
                [(radius * cos) as f32, (radius * sin) as f32]
            };
            let (begun, pairs) = values.split_at_mut(usize::from(is_second));
            begun.iter_mut().for_each(|value| *value = pair()[1]);
            pairs.chunks_mut(2).for_each(|values| values.copy_from_slice(&pair()[..values.len()]));
        });
    }

    /// Cuts `values`, which begin at number `first`, and gives each part the stream from the pair that it begins in, and whether
    /// that is with its second number. Many are made on all cores.
    fn in_parts(self, first: usize, values: &mut [f32], make: impl Fn(Stream, bool, &mut [f32]) + Sync) {
        let threads = std::thread::available_parallelism().map_or(1, usize::from);
        let len = values.len().div_ceil(threads).max(LEAST_OF_A_THREAD);
        let make = &|first, values: &mut [f32]| {
            make(Stream::from_number(self, first / 2 * 2), first % 2 == 1, values)
        };
        if values.len() <= len {
            return make(first, values);
        }
        std::thread::scope(|scope| {
            for (first, values) in (first..).step_by(len).zip(values.chunks_mut(len)) {
                scope.spawn(move || make(first, values));
            }
        });
    }
}

/// Fewer numbers are made sooner than a thread begins.
const LEAST_OF_A_THREAD: usize = 1 << 16;

/// An independent sequence of random numbers for each pair of seed and stream.
pub(crate) struct Stream(ChaCha8Rng);

impl Stream {
    pub fn new(seed: u64, stream: u64) -> Stream {
        let mut random = ChaCha8Rng::seed_from_u64(seed);
        random.set_stream(stream);
        Stream(random)
    }

    /// The sequence from this number on.
    fn from_number(of: Numbers, number: usize) -> Stream {
        let Stream(mut random) = Stream::new(of.seed, of.stream);
        random.set_word_pos(2 * number as u128); // of 32 bits
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

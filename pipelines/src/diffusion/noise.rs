//! Random numbers of image runs: each a function of the seed, its purpose and its index, so that neither
//! ranks nor resumption change any.

use std::thread;

use anyroll_data::stream;
use anyroll_models::normals;
use rand_chacha::rand_core::Rng;
use tch::{Device, Tensor};

use crate::Result;

/// Purpose of random numbers.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Purpose {
    /// Classes and images of the warm-up.
    WarmupImages = 0x7761_726d,
    /// Labels to drop in the warm-up.
    Dropout = 0x6472_6f70,
    /// Noise levels of the warm-up.
    WarmupSigmas = 0x7773_6967,
    /// Noise of the warm-up.
    WarmupNoise = 0x776e_6f69,
    /// Classes to sample images of.
    Prompts = 0x7072_6f6d,
    /// Initial noise of training samples.
    Start = 0x7374_6172,
    /// The noise of stochastic denoising steps.
    Sde = 0x7364_6500,
    /// Denoising steps to train on.
    Timesteps = 0x7469_6d65,
    /// Noise of the forward process.
    Forward = 0x666f_7277,
    /// Permutation of rewards.
    Shuffle = 0x7368_7566,
    /// Initial noise of evaluation samples.
    Evaluation = 0x6576_616c,
}

/// Fewer numbers than this are drawn by a single thread.
const LEAST_SHARED: usize = 1 << 15;

/// Standard normal numbers: fp32 `[numbers, shape..]`, each row a function of its number.
pub fn gaussian(
    purpose: Purpose,
    seed: u64,
    step: u64,
    numbers: impl IntoIterator<Item = usize>,
    shape: &[i64],
    device: Device,
) -> Result<Tensor> {
    let len = shape.iter().product::<i64>() as usize;
    let numbers: Vec<usize> = numbers.into_iter().collect();
    let mut values = vec![0.0; numbers.len() * len];
    let fill = |numbers: &[usize], values: &mut [f32]| {
        for (&number, row) in numbers.iter().zip(values.chunks_exact_mut(len)) {
            row.copy_from_slice(&normals(row_seed(purpose, seed, step, number), len));
        }
    };
    // A device waits for these numbers. At 25 ns each, those of 16 latents of 64 x 64 x 16 take a single thread 26
    // ms.
    let threads = if values.len() < LEAST_SHARED { 1 } else { tch::get_num_threads().max(1) as usize };
    let per_thread = numbers.len().div_ceil(threads).max(1);
    thread::scope(|scope| {
        let mut parts = numbers.chunks(per_thread).zip(values.chunks_mut(per_thread * len));
        let own = parts.next();
        parts.for_each(|(numbers, values)| drop(scope.spawn(move || fill(numbers, values))));
        own.into_iter().for_each(|(numbers, values)| fill(numbers, values));
    });
    let rows = Tensor::f_from_slice(&values)?.f_view([&[-1], shape].concat().as_slice())?;
    Ok(rows.f_to_device(device)?)
}

/// `count` numbers in [0, 1).
pub fn uniforms(purpose: Purpose, seed: u64, step: u64, count: usize) -> Vec<f64> {
    let mut random = stream(purpose as u64, seed, step);
    // 53 random bits are a double in [0, 1).
    (0..count).map(|_| (random.next_u64() >> 11) as f64 / (1u64 << 53) as f64).collect()
}

/// The numbers below `count` in a random order.
pub fn order(purpose: Purpose, seed: u64, step: u64, count: usize) -> Vec<usize> {
    anyroll_data::shuffled(count, &mut stream(purpose as u64, seed, step))
}

/// [`order`] for item `number` of many.
pub fn order_of(purpose: Purpose, seed: u64, step: u64, number: usize, count: usize) -> Vec<usize> {
    order(purpose, row_seed(purpose, seed, step, number), 0, count)
}

fn row_seed(purpose: Purpose, seed: u64, step: u64, number: usize) -> u64 {
    stream(purpose as u64, seed ^ step.rotate_left(32), number as u64).next_u64()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_row_depends_on_its_number_alone() {
        let rows = |numbers: std::ops::Range<usize>| {
            gaussian(Purpose::Start, 3, 5, numbers, &[1, 2, 2], Device::Cpu).unwrap()
        };
        assert_eq!(rows(0..4).narrow(0, 2, 2), rows(2..4));
        let wide = |numbers: std::ops::Range<usize>| {
            gaussian(Purpose::Start, 3, 5, numbers, &[4, 64, 64], Device::Cpu).unwrap()
        };
        assert_eq!(wide(0..5), Tensor::cat(&[wide(0..1), wide(1..4), wide(4..5)], 0), "shared by threads");
        assert_ne!(rows(0..1), rows(1..2));
        let other = gaussian(Purpose::Evaluation, 3, 5, 0..1, &[1, 2, 2], Device::Cpu).unwrap();
        assert_ne!(rows(0..1), other);
    }

    #[test]
    fn an_order_has_every_number_once() {
        let mut order = order_of(Purpose::Timesteps, 0, 1, 2, 10);
        assert_ne!(order, order_of(Purpose::Timesteps, 0, 1, 3, 10));
        order.sort_unstable();
        assert!(order.into_iter().eq(0..10));
    }
}

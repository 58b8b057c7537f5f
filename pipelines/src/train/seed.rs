//! Seeds of single samples.

use anyroll_data::stream;
use rand_chacha::rand_core::Rng;

/// Seed of one sample: a function of the run's seed, the purpose, the step and the sample's number.
pub fn sample_seed(purpose: Purpose, seed: u64, step: u64, number: usize) -> u64 {
    stream(purpose as u64, seed ^ step.rotate_left(32), number as u64).next_u64()
}

/// Seed of a turn, from the seed of its sample, which is also that of the first turn.
pub fn turn_seed(of_sample: u64, turn: usize) -> u64 {
    const PURPOSE: u64 = u64::from_le_bytes(*b"the turn");
    if turn == 0 { of_sample } else { stream(PURPOSE, of_sample, turn as u64).next_u64() }
}

/// Purpose of random numbers; each purpose has its own.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Purpose {
    /// Sampling of completions for training.
    Rollout = 0x726f_6c6c,
    /// Sampling of completions for an evaluation.
    Evaluation = 0x6576_616c,
    /// Dropout of adapters on a completion in training.
    Dropout = 0x6472_6f70,
    /// Dropout of adapters on an answer in the warm-up.
    WarmupDropout = 0x7764_7270,
}

//! Seeds of single samples.

use anyroll_data::stream;
use rand_chacha::rand_core::Rng;

/// The seed of one sample: a function of the run's seed, of what it is sampled for, and of its number there.
pub fn sample_seed(purpose: Purpose, seed: u64, step: u64, number: usize) -> u64 {
    stream(purpose as u64, seed ^ step.rotate_left(32), number as u64).next_u64()
}

/// The seed of a turn of a sample, from the sample's own, which is the first turn's.
pub fn turn_seed(of_sample: u64, turn: usize) -> u64 {
    const PURPOSE: u64 = u64::from_le_bytes(*b"the turn");
    if turn == 0 { of_sample } else { stream(PURPOSE, of_sample, turn as u64).next_u64() }
}

/// What numbers are drawn for: each has random ones of its own.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Purpose {
    /// To train on.
    Rollout = 0x726f_6c6c,
    /// To measure.
    Evaluation = 0x6576_616c,
    /// What adapters drop of a completion that is trained on.
    Dropout = 0x6472_6f70,
    /// The same of an answer in the warm-up.
    WarmupDropout = 0x7764_7270,
}

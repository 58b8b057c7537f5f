//! The answer, to the character; and the control beside it.

use rand_chacha::rand_core::Rng;

use super::{Completion, Error, Reward};
use crate::data::{Record, stream};

/// 1 for a completion that ended and equals the answer, else 0. One that was cut earns nothing even if the
/// answer is all it holds: a policy that never stops has not learnt the task.
#[derive(Clone, Copy, Debug, Default)]
pub struct Exact;

impl Reward for Exact {
    fn name(&self) -> &'static str {
        "exact"
    }

    fn score(&self, record: &Record, completion: &Completion) -> Result<f64, Error> {
        Ok(if completion.finished && completion.text == record.answer { 1.0 } else { 0.0 })
    }
}

/// The control: a coin flip for each sample of a step, 1 with probability `mean`, the mean of the exact
/// rewards of that step over all ranks. It has the same size of advantages and tells nothing, so a policy
/// that rises on it shows an error in the measurement.
///
/// `first_sample` is the number of this rank's first sample within the step: the flips do not depend on
/// how the samples are spread over ranks.
pub fn coin_flips(mean: f64, seed: u64, step: u64, first_sample: usize, count: usize) -> Vec<f64> {
    const PURPOSE: u64 = u64::from_le_bytes(*b"coinflip");
    let mut rng = stream(PURPOSE, seed, step);
    let flips = std::iter::repeat_with(|| {
        // 53 random bits are a double in [0, 1).
        let uniform = (rng.next_u64() >> 11) as f64 / (1u64 << 53) as f64;
        if uniform < mean { 1.0 } else { 0.0 }
    });
    flips.skip(first_sample).take(count).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_the_finished_answer_is_exact() {
        let record = Record { id: "20".to_owned(), prompt: "20>".to_owned(), answer: "02".to_owned() };
        let check = |completion, finished, expected| {
            let completion = Completion { text: completion, tokens: None, finished };
            assert_eq!(Exact.score(&record, &completion).unwrap(), expected, "{completion:?}");
        };
        check("02", true, 1.0);
        check("02", false, 0.0);
        check("2", true, 0.0);
        check("02 ", true, 0.0);
        check("020", true, 0.0);
        check("", true, 0.0);
    }

    #[test]
    fn coin_flips_have_the_mean_and_do_not_depend_on_the_ranks() {
        for mean in [0.0, 0.07, 0.5, 1.0] {
            let all = coin_flips(mean, 3, 11, 0, 10_000);
            let found = all.iter().sum::<f64>() / all.len() as f64;
            // Four standard deviations of the mean of 10000 flips.
            let tolerance = 4.0 * (mean * (1.0 - mean) / 10_000.0).sqrt();
            assert!((found - mean).abs() <= tolerance, "{found} for {mean}");
            assert_eq!(coin_flips(mean, 3, 11, 5_000, 5_000), all[5_000..]);
        }
        assert_ne!(coin_flips(0.5, 3, 11, 0, 64), coin_flips(0.5, 3, 12, 0, 64));
        assert_ne!(coin_flips(0.5, 3, 11, 0, 64), coin_flips(0.5, 4, 11, 0, 64));
    }
}

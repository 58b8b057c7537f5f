//! The `repetition` reward: a penalty for repeated text.

use std::collections::HashSet;

use anyroll_config::RepetitionConfig;
use anyroll_data::Record;

use super::{Completion, Error, Reward};

/// Minus the fraction of word n-grams that occurred earlier in the completion: 0 without repetition, close to
/// -1 for a loop.
#[derive(Clone, Copy, Debug)]
pub struct Repetition {
    config: RepetitionConfig,
}

impl Repetition {
    /// Creates the reward of `config`.
    pub fn new(config: RepetitionConfig) -> Self {
        Self { config }
    }
}

impl Reward for Repetition {
    fn name(&self) -> &'static str {
        "repetition"
    }

    fn score(&self, _record: &Record, completion: &Completion) -> Result<f64, Error> {
        let words: Vec<&str> = completion.text.split_whitespace().collect();
        let grams = words.windows(self.config.ngram_words);
        let count = grams.len();
        if count == 0 {
            return Ok(0.0);
        }
        let distinct = grams.collect::<HashSet<_>>().len();
        Ok((distinct as f64 - count as f64) / count as f64)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn is_the_share_of_repeated_ngrams() {
        let record = Record { id: "1".to_owned(), answer: String::new(), ..Record::default() };
        let check = |ngram_words, text: &str, expected: f64| {
            let repetition = Repetition::new(RepetitionConfig { ngram_words });
            let completion = Completion { text, tokens: None, finished: true };
            assert_eq!(repetition.score(&record, &completion).unwrap(), expected, "{text}");
        };
        check(3, "", 0.0);
        check(3, "a b", 0.0);
        check(3, "a b c d", 0.0);
        // abc, bca, cab, abc: one of four is a repetition.
        check(3, "a b c  a\nb c", -0.25);
        check(1, "a a a a", -0.75);
        check(2, "no no no no no", -0.75);
    }
}

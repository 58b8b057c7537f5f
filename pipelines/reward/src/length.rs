//! The `length` reward: a penalty for long completions.

use anyroll_config::LengthConfig;
use anyroll_data::Record;

use super::{Completion, Error, Reward};

/// DAPO's soft overlong punishment (Yu et al., 2025, equation 13): 0 up to `max_tokens - buffer_tokens`, then
/// linear to -1 at `max_tokens`, and -1 beyond.
#[derive(Clone, Copy, Debug)]
pub struct Length {
    config: LengthConfig,
}

impl Length {
    /// Creates the reward of `config`.
    pub fn new(config: LengthConfig) -> Self {
        Self { config }
    }
}

impl Reward for Length {
    fn name(&self) -> &'static str {
        "length"
    }

    fn score(&self, record: &Record, completion: &Completion) -> Result<f64, Error> {
        let LengthConfig { max_tokens, buffer_tokens } = self.config;
        let tokens = completion
            .tokens
            .ok_or_else(|| Error::new(self.name(), record, "the completion's length in tokens is unknown"))?;
        let beyond = tokens.saturating_sub(max_tokens - buffer_tokens);
        Ok(0.0 - (beyond as f64 / buffer_tokens as f64).min(1.0))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn falls_over_the_buffer() {
        let record = Record { id: "1".to_owned(), answer: String::new(), ..Record::default() };
        let length = Length::new(LengthConfig { max_tokens: 100, buffer_tokens: 20 });
        let score = |tokens| length.score(&record, &Completion { text: "", tokens, finished: true });
        for (tokens, expected) in [(0, 0.0), (80, 0.0), (81, -0.05), (90, -0.5), (100, -1.0), (1000, -1.0)] {
            assert_eq!(score(Some(tokens)).unwrap(), expected, "{tokens}");
        }
        assert!(score(None).is_err());
    }
}

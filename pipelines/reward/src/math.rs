//! The `math` reward: equality of mathematical expressions, by [`anyroll_math`].

use std::borrow::Cow;

use anyroll_config::MathConfig;
use anyroll_data::Record;
use anyroll_math::Options;

use super::{Completion, Error, Reward};

/// 1 if the completion's answer equals the record's mathematically, else 0.
///
/// In a truncated completion only a boxed answer counts, since its last words are arbitrary.
#[derive(Clone, Debug, Default)]
pub struct Math {
    config: MathConfig,
}

impl Math {
    /// Creates the reward of `config`.
    pub fn new(config: MathConfig) -> Self {
        Self { config }
    }

    fn gold<'a>(&self, record: &'a Record) -> Result<Cow<'a, str>, Error> {
        let gold = anyroll_math::gold_answer(&record.answer);
        match gold.is_empty() {
            true => Err(Error::new(self.name(), record, "its answer is empty")),
            false => Ok(gold),
        }
    }

    fn find<'a>(&self, completion: &Completion<'a>) -> Option<Cow<'a, str>> {
        anyroll_math::answer(completion.text, self.config.only_boxed || !completion.finished)
    }
}

impl Reward for Math {
    fn name(&self) -> &'static str {
        "math"
    }

    fn score(&self, record: &Record, completion: &Completion) -> Result<f64, Error> {
        let gold = self.gold(record)?;
        let asks_percent = ["%", "percent"].iter().any(|word| record.prompt.contains(word));
        let MathConfig { tolerance, decimal_comma, .. } = self.config;
        let options = Options { tolerance, asks_percent, decimal_comma };
        let found = self.find(completion);
        let right = found.is_some_and(|predicted| anyroll_math::is_equal(&gold, &predicted, options));
        Ok(f64::from(u8::from(right)))
    }

    fn check(&self, record: &Record) -> Result<(), Error> {
        self.gold(record).map(drop)
    }

    fn extracted(&self, completion: &Completion) -> Option<String> {
        self.find(completion).map(Cow::into_owned)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn record(answer: &str) -> Record {
        Record { id: "1".to_owned(), answer: answer.to_owned(), ..Record::default() }
    }

    fn completion(text: &str, finished: bool) -> Completion<'_> {
        Completion { text, tokens: None, finished }
    }

    /// 5 is not 0.05, unless the question asks for percent.
    #[test]
    fn percent_count_where_they_are_asked_for() {
        let asked = |prompt: &str| {
            let record = Record { prompt: prompt.into(), ..record("5") };
            Math::default().score(&record, &completion(r"\boxed{5\%}", true)).unwrap()
        };
        assert_eq!((asked("What percent of 20 is 1?"), asked("How many are left?")), (1.0, 0.0));
    }

    #[test]
    fn only_a_box_counts_in_what_was_cut_or_if_asked() {
        let score =
            |math: Math, text, finished| math.score(&record("5"), &completion(text, finished)).unwrap();
        assert_eq!(score(Math::default(), "it is 5", true), 1.0);
        assert_eq!(score(Math::default(), "it is 5", false), 0.0);
        assert_eq!(score(Math::default(), r"it is \boxed{5}, since", false), 1.0);
        let boxed = Math::new(MathConfig { only_boxed: true, ..MathConfig::default() });
        assert_eq!(score(boxed, "it is 5", true), 0.0);
    }

    #[test]
    fn an_empty_gold_answer_is_a_failure() {
        let error = Math::default().score(&record(" "), &completion("5", true));
        assert_eq!(error.unwrap_err().record, "1");
        assert!(Math::default().check(&record(" ")).is_err() && Math::default().check(&record("5")).is_ok());
    }
}

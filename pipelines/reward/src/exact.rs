//! The `exact` reward: equality with the gold answer.

use anyroll_data::Record;

use super::{Completion, Error, Reward};

/// 1 for a finished completion that equals the answer, else 0. A truncated completion gets 0 even if it
/// consists of the answer, since a policy that never stops has not learned the task.
#[derive(Clone, Copy, Debug, Default)]
pub struct Exact;

impl Reward for Exact {
    fn name(&self) -> &'static str {
        "exact"
    }

    fn score(&self, record: &Record, completion: &Completion) -> Result<f64, Error> {
        Ok(if completion.finished && completion.text == record.answer { 1.0 } else { 0.0 })
    }

    fn extracted(&self, completion: &Completion) -> Option<String> {
        Some(completion.text.to_owned())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_the_finished_answer_is_exact() {
        let record = Record { prompt: "20>".to_owned(), answer: "02".to_owned(), ..Record::default() };
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
}

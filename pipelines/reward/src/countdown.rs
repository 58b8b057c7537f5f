//! The `countdown` reward: checks the solution of a countdown problem.

use anyroll_data::{Record, countdown};

use super::{Completion, Error, Reward};

/// 1 for a finished completion that is an expression with each digit of the prompt once and the prompt's
/// target as its value, else 0. A problem may have many solutions; the record's answer is one of them.
#[derive(Clone, Copy, Debug, Default)]
pub struct Countdown;

impl Reward for Countdown {
    fn name(&self) -> &'static str {
        "countdown"
    }

    fn score(&self, record: &Record, completion: &Completion) -> Result<f64, Error> {
        let problem = self.problem(record)?;
        let solves = countdown::read(completion.text).is_some_and(|(mut digits, value)| {
            digits.sort_unstable();
            (digits, value) == problem
        });
        Ok(f64::from(u8::from(completion.finished && solves)))
    }

    fn check(&self, record: &Record) -> Result<(), Error> {
        self.problem(record).map(drop)
    }
}

impl Countdown {
    /// The digits, in order, and the target.
    fn problem(&self, record: &Record) -> Result<(Vec<u32>, i64), Error> {
        let why = "its prompt is not a problem such as `2,7,9=23>`";
        countdown::problem(&record.prompt).ok_or_else(|| Error::new(self.name(), record, why))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn any_solution_is_right() {
        let record = Record { prompt: "2,3,4=14>".into(), ..Record::default() };
        let check = |text, finished, expected| {
            let completion = Completion { text, tokens: None, finished };
            assert_eq!(Countdown.score(&record, &completion).unwrap(), expected, "{text}");
        };
        check("2+3*4", true, 1.0);
        check("4*3+2", true, 1.0);
        check("2+3*4", false, 0.0);
        check("2*3+4", true, 0.0);
        check("2+2*6", true, 0.0);
        check("14", true, 0.0);
        check("2+3*4+0", true, 0.0);
        check("", true, 0.0);
        let other = Record { prompt: "27+58=".into(), ..Record::default() };
        let completion = Completion { text: "85", tokens: None, finished: true };
        assert!(Countdown.score(&other, &completion).is_err());
        assert!(Countdown.check(&other).is_err() && Countdown.check(&record).is_ok());
    }
}

//! Synthetic tasks. A prompt is a number below the task's size, so no records are stored.

use std::collections::BTreeSet;

use super::Record;

/// A task and its difficulty.
#[derive(Clone, Copy, Debug)]
pub(super) enum Synthetic {
    /// Sorting digits: the prompt `314159>` has the answer `113459`.
    Sort { digits: u32 },
    /// Addition: the prompt `27+58=` has the answer `85`, reversed `58`.
    Addition { digits: u32, reversed: bool },
}

impl Synthetic {
    /// The number of prompts.
    pub(super) fn size(self) -> u64 {
        match self {
            Self::Sort { digits } => 10u64.pow(digits),
            Self::Addition { digits, .. } => 10u64.pow(2 * digits),
        }
    }

    /// The record of prompt `number`, which is below [`size`](Self::size).
    pub(super) fn record(self, number: u64) -> Record {
        let (prompt, answer) = match self {
            Self::Sort { digits } => {
                let text = format!("{number:0width$}", width = digits as usize);
                let mut sorted: Vec<char> = text.chars().collect();
                sorted.sort_unstable();
                (format!("{text}>"), sorted.into_iter().collect())
            }
            Self::Addition { digits, reversed } => {
                let (width, limit) = (digits as usize, 10u64.pow(digits));
                let (left, right) = (number / limit, number % limit);
                let sum = (left + right).to_string();
                let answer = if reversed { sum.chars().rev().collect() } else { sum };
                (format!("{left:0width$}+{right:0width$}="), answer)
            }
        };
        let rejected = Some(spoilt(&answer, number));
        Record { id: number.to_string(), prompt, answer, rejected, ..Record::default() }
    }

    pub(super) fn characters(self) -> BTreeSet<char> {
        let marks = match self {
            Self::Sort { .. } => ">",
            Self::Addition { .. } => "+=",
        };
        ('0'..='9').chain(marks.chars()).collect()
    }

    /// Number of characters in every prompt.
    pub(super) fn prompt_length(self) -> usize {
        match self {
            Self::Sort { digits } => digits as usize + 1,
            Self::Addition { digits, .. } => 2 * digits as usize + 2,
        }
    }

    pub(super) fn longest_answer(self) -> usize {
        match self {
            Self::Sort { digits } => digits as usize,
            // 99 + 99 = 198
            Self::Addition { digits, .. } => digits as usize + 1,
        }
    }
}

/// A wrong answer close to the right one, determined by the prompt's `number`. Two neighbours that differ are
/// swapped; if all characters are equal, the last one is changed.
fn spoilt(answer: &str, number: u64) -> String {
    let mut characters: Vec<char> = answer.chars().collect();
    let places: Vec<usize> =
        (1..characters.len()).filter(|&at| characters[at - 1] != characters[at]).collect();
    if places.is_empty() {
        let last = characters.last_mut().expect("answers have digits");
        *last = if *last == '0' { '1' } else { '0' };
    } else {
        let at = places[(number % places.len() as u64) as usize];
        characters.swap(at - 1, at);
    }
    characters.into_iter().collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn check(synthetic: Synthetic, number: u64, prompt: &str, answer: &str) {
        let (prompt_text, answer_text) = (prompt.to_owned(), answer.to_owned());
        let record = synthetic.record(number);
        let (id, rejected) = (number.to_string(), record.rejected.clone());
        let wrong = rejected.as_ref().expect("there is a wrong answer");
        assert!(*wrong != answer && wrong.len() == answer.len(), "{wrong}");
        let expected = Record { id, prompt: prompt_text, answer: answer_text, rejected, ..Record::default() };
        assert_eq!(record, expected);
        assert!(prompt.chars().chain(answer.chars()).all(|c| synthetic.characters().contains(&c)));
    }

    #[test]
    fn records_are_made_from_their_number() {
        check(Synthetic::Sort { digits: 6 }, 314_159, "314159>", "113459");
        check(Synthetic::Sort { digits: 6 }, 20, "000020>", "000002");
        check(Synthetic::Addition { digits: 2, reversed: false }, 2758, "27+58=", "85");
        check(Synthetic::Addition { digits: 2, reversed: true }, 2758, "27+58=", "58");
        check(Synthetic::Addition { digits: 2, reversed: true }, 9999, "99+99=", "891");
        check(Synthetic::Addition { digits: 2, reversed: true }, 703, "07+03=", "01");
        check(
            Synthetic::Addition { digits: 9, reversed: false },
            10u64.pow(18) - 1,
            "999999999+999999999=",
            "1999999998",
        );
    }
}

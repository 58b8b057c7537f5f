//! Prompt-lookup speculation: proposes what followed the last tokens of a sequence when they came earlier in it.
//!
//! A step then runs the last token and all proposed ones, and each row chooses the next token with the random number of its
//! place. Chosen tokens count up to the first that is not the proposed one. They are those that steps of one token choose, up to
//! the rounding of products with other numbers of rows, so that the distribution is the model's.

use std::ops::Add;

use serde::{Deserialize, Serialize};

use super::sequence::Sequence;
use crate::{Error, Result};

/// Prompt-lookup speculation (Saxena, 2023), also named n-gram speculation.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Speculation {
    /// Maximum number of tokens proposed for a sequence and step: 1 to [`Speculation::MOST_TOKENS`].
    pub tokens: usize,
    /// Maximum number of last tokens that are looked up; at least `shortest`.
    pub longest: usize,
    /// Minimum number of last tokens that are looked up; at least 1.
    pub shortest: usize,
    /// Maximum number of live sequences with which tokens are proposed; at least 1.
    pub sequences: usize,
}

/// Counts of speculation.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Speculated {
    /// Proposals: of one sequence in one step each.
    pub proposals: u64,
    /// Tokens proposed.
    pub proposed: u64,
    /// Tokens proposed that were chosen. A proposal gives one token more than that.
    pub accepted: u64,
}

/// Maximum number of steps between two checks.
const LONGEST_PAUSE: usize = 64;

/// Pauses of an engine between checks of proposals that do not pay.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Pace {
    pause: usize,
    /// Steps that are left of it.
    left: usize,
}

impl Pace {
    /// Counts a check in which `live` sequences accepted `accepted` tokens. The host waits for each check, so that one takes
    /// up to twice as long as a step, and half a token more of each sequence has to pay for it. Otherwise a pause follows, twice
    /// as long as the one before.
    pub fn count(&mut self, live: usize, accepted: usize) {
        self.pause = if 2 * accepted >= live { 0 } else { (2 * self.pause).clamp(1, LONGEST_PAUSE) };
        self.left = self.pause;
    }

    /// Takes up to `most` steps of the pause; none if there is no pause.
    pub fn take(&mut self, most: usize) -> Option<usize> {
        let steps = self.left.min(most);
        self.left -= steps;
        (steps > 0).then_some(steps)
    }
}

impl Speculation {
    /// Maximum number of proposed tokens: with one more a step of a sequence fills one block of the cache.
    pub const MOST_TOKENS: usize = 15;

    /// Checks the ranges.
    ///
    /// # Errors
    /// [`Error::Input`] with the field and the valid range.
    pub fn validate(self) -> Result<()> {
        let Speculation { tokens, longest, shortest, sequences } = self;
        let check = |holds: bool, what, problem: String| {
            if holds { Ok(()) } else { Err(Error::Input { what, problem }) }
        };
        let range = 1..=Speculation::MOST_TOKENS;
        check(
            range.contains(&tokens),
            "speculation.tokens",
            format!("is {tokens}, must be 1 to {}", range.end()),
        )?;
        check(shortest >= 1, "speculation.shortest", "is 0, must be at least 1".to_owned())?;
        check(
            longest >= shortest,
            "speculation.longest",
            format!("is {longest}, must be at least {shortest}, the shortest"),
        )?;
        check(sequences >= 1, "speculation.sequences", "is 0, must be at least 1".to_owned())
    }

    /// Returns the maximum number of rows of a step with proposals, of up to `sequences` live sequences.
    pub fn rows(self, sequences: usize) -> usize {
        checked_rows(sequences.min(self.sequences) * (1 + self.tokens))
    }

    /// Proposes tokens that may follow a sequence; none if it has a format, which follows tokens one by one.
    pub(super) fn propose(self, sequence: &Sequence) -> Vec<i64> {
        let made = sequence.completion.tokens.len();
        if sequence.format_state.is_some() {
            return Vec::new();
        }
        // A step chooses one token more than it proposes.
        let most = self.tokens.min(sequence.params.max_new_tokens - made - 1);
        continuation(&sequence.tokens().collect::<Vec<i64>>(), (self.shortest, self.longest), most)
    }
}

/// Returns the rows of a recorded check of `rows` rows: few numbers, since those of proposals change from step to step.
pub(super) fn checked_rows(rows: usize) -> usize {
    rows.next_power_of_two().max(8)
}

impl Speculated {
    /// Returns the mean number of tokens that a proposal gave: those accepted and the one behind them. `None` without
    /// proposals.
    pub fn tokens_per_proposal(self) -> Option<f64> {
        (self.proposals > 0).then(|| 1.0 + self.accepted as f64 / self.proposals as f64)
    }

    /// Counts a proposal of `proposed` tokens, of which `accepted` were chosen.
    pub(super) fn count(&mut self, proposed: usize, accepted: usize) {
        self.proposals += 1;
        self.proposed += proposed as u64;
        self.accepted += accepted as u64;
    }
}

impl Add for Speculated {
    type Output = Speculated;

    fn add(self, other: Speculated) -> Speculated {
        Speculated {
            proposals: self.proposals + other.proposals,
            proposed: self.proposed + other.proposed,
            accepted: self.accepted + other.accepted,
        }
    }
}

/// Returns `most` tokens that followed the last tokens of `tokens` earlier, where as many of them as possible came, but `longest`
/// at most, and there the latest time; none if fewer than `shortest` came. A continuation that reaches the end goes on from its start:
/// a text that repeats itself will.
fn continuation(tokens: &[i64], (shortest, longest): (usize, usize), most: usize) -> Vec<i64> {
    let (mut best, mut start) = (shortest - 1, None);
    for end in (shortest..tokens.len()).rev() {
        let pairs = tokens[..end].iter().rev().zip(tokens.iter().rev());
        let same = pairs.take(longest).take_while(|(a, b)| a == b).count();
        if same > best {
            (best, start) = (same, Some(end));
            if same == longest {
                break;
            }
        }
    }
    let Some(start) = start else { return Vec::new() };
    tokens[start..].iter().copied().cycle().take(most).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_latest_of_the_longest_matches_continues() {
        for (tokens, bounds, most, expected) in [
            // Two last tokens match at both places, the later one counts.
            (&[1i64, 2, 3, 1, 2, 4, 1, 2][..], (1, 2), 2, &[4i64, 1][..]),
            // Three match at the first place alone.
            (&[9, 1, 2, 3, 1, 2, 4, 9, 1, 2], (1, 3), 2, &[3, 1]),
            // A match of one, and none that is long enough.
            (&[5, 6, 7, 5], (1, 4), 2, &[6, 7]),
            (&[5, 6, 7, 5], (2, 4), 2, &[]),
            (&[5, 6, 7, 8], (1, 4), 2, &[]),
            // Texts that repeat go on.
            (&[3, 3, 3], (1, 2), 4, &[3, 3, 3, 3]),
            (&[7, 1, 2, 1, 2], (1, 4), 5, &[1, 2, 1, 2, 1]),
            (&[1, 2, 1], (1, 4), 0, &[]),
            (&[1], (1, 4), 3, &[]),
            (&[1], (2, 4), 3, &[]),
        ] {
            assert_eq!(continuation(tokens, bounds, most), expected, "{tokens:?} {bounds:?}");
        }
    }

    #[test]
    fn pauses_grow_with_failures_and_end_with_a_success() {
        let mut pace = Pace::default();
        assert_eq!(pace.take(16), None);
        let mut pauses = Vec::new();
        for accepted in [2, 0, 1, 0, 0, 0, 0, 0, 0, 4, 0] {
            pace.count(4, accepted);
            pauses.push(std::iter::from_fn(|| pace.take(16)).collect::<Vec<_>>());
        }
        let expected: [&[usize]; 11] =
            [&[], &[1], &[2], &[4], &[8], &[16], &[16; 2], &[16; 4], &[16; 4], &[], &[1]];
        assert_eq!(pauses, expected);
    }

    #[test]
    fn values_out_of_range_are_named() {
        let valid = Speculation { tokens: 4, longest: 4, shortest: 2, sequences: 8 };
        valid.validate().unwrap();
        for (field, wrong) in [
            ("speculation.tokens", Speculation { tokens: 0, ..valid }),
            ("speculation.tokens", Speculation { tokens: 16, ..valid }),
            ("speculation.shortest", Speculation { shortest: 0, ..valid }),
            ("speculation.longest", Speculation { longest: 1, ..valid }),
            ("speculation.sequences", Speculation { sequences: 0, ..valid }),
        ] {
            let error = wrong.validate().unwrap_err().to_string();
            assert!(error.contains(field), "{error}");
        }
    }
}

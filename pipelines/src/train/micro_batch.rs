//! Division of a rank's sequences into micro-batches.

use std::ops::Range;

use anyroll_backends::CollectiveGroup;

use super::{Exchange, share::chunks};
use crate::{Result, run::Strategy};

/// Limit of a micro-batch: a rank's forward and backward pass.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct MicroBatch {
    /// Most sequences, or images, unless there is a limit in tokens.
    pub sequences: usize,
    /// Most tokens, without those that a shared prompt saves.
    pub tokens: Option<usize>,
}

impl MicroBatch {
    /// The limit of a role.
    pub fn of(strategy: &Strategy) -> Self {
        Self { sequences: strategy.micro_batch_size, tokens: strategy.micro_batch_tokens }
    }

    /// A limit in sequences alone.
    pub fn of_sequences(sequences: usize) -> Self {
        Self { sequences, tokens: None }
    }

    /// Splits the sequences `part` of a rank, whose lengths in tokens are `lengths`, into micro-batches. Sequences keep
    /// their order.
    ///
    /// With a limit in tokens all ranks of `group` have as many micro-batches as the one that needs the most, since they
    /// reduce gradients together, and each has the smallest largest one. Every rank must then call this, with equally many
    /// sequences.
    pub fn split(
        self,
        lengths: &[usize],
        part: Range<usize>,
        group: &CollectiveGroup,
    ) -> Result<Vec<Range<usize>>> {
        let Some(tokens) = self.tokens else {
            return Ok(chunks(part, self.sequences).collect());
        };
        let lengths = &lengths[part.clone()];
        let needed = with_at_most(tokens, lengths, 0).len();
        let count = Exchange::new(group)?.gather(&needed)?.into_iter().max().unwrap_or(0);
        let moved = |it: Range<usize>| it.start + part.start..it.end + part.start;
        Ok(balanced(lengths, count).into_iter().map(moved).collect())
    }

    /// The limit in units of `sequences` that are never split, at least one.
    pub fn in_units_of(self, sequences: usize) -> Self {
        Self { sequences: (self.sequences / sequences).max(1), ..self }
    }
}

/// Splits `lengths` into at least `count` ranges of a sum up to `most` each, if there are as many lengths. A larger length
/// is alone.
fn with_at_most(most: usize, lengths: &[usize], count: usize) -> Vec<Range<usize>> {
    let (mut ranges, mut start, mut sum) = (Vec::new(), 0, 0);
    for (index, length) in lengths.iter().enumerate() {
        let are_left = lengths.len() - index;
        let are_due = count.saturating_sub(ranges.len() + 1);
        if index > start && (sum + length > most || are_left <= are_due) {
            ranges.push(start..index);
            (start, sum) = (index, 0);
        }
        sum += length;
    }
    if !lengths.is_empty() {
        ranges.push(start..lengths.len());
    }
    ranges
}

/// Splits `lengths` into `count` ranges, at most one for each, whose largest sum is the smallest.
fn balanced(lengths: &[usize], count: usize) -> Vec<Range<usize>> {
    let (mut low, mut high) = (lengths.iter().copied().max().unwrap_or(0), lengths.iter().sum());
    while low < high {
        let middle = low + (high - low) / 2;
        match with_at_most(middle, lengths, 0).len() <= count {
            true => high = middle,
            false => low = middle + 1,
        }
    }
    with_at_most(low, lengths, count)
}

#[cfg(test)]
mod tests {
    use super::super::ranks;
    use super::*;

    fn sums(lengths: &[usize], ranges: &[Range<usize>]) -> Vec<usize> {
        ranges.iter().map(|range| lengths[range.clone()].iter().sum()).collect()
    }

    #[test]
    fn ranges_are_as_few_and_as_even_as_they_can_be() {
        for (lengths, most, expected) in [
            (&[3, 3, 3, 3][..], 6, &[6, 6][..]),
            (&[1, 1, 1, 9, 1, 1], 6, &[3, 9, 2]),
            (&[5, 4, 3, 2, 1], 6, &[5, 4, 6]),
            (&[2, 2, 2, 2, 2], 8, &[6, 4]),
            (&[7], 3, &[7]),
            (&[], 3, &[]),
        ] {
            let needed = with_at_most(most, lengths, 0).len();
            assert_eq!(sums(lengths, &balanced(lengths, needed)), expected, "{lengths:?} within {most}");
        }
    }

    #[test]
    fn ranges_are_as_many_as_asked_for() {
        for lengths in [&[1, 1, 1, 9, 1, 1][..], &[4, 4, 4, 4, 4, 4], &[9, 1, 1, 1, 1, 1]] {
            for count in 1..=6 {
                let ranges = balanced(lengths, count);
                assert_eq!(ranges.len(), count, "{lengths:?}: {ranges:?}");
                assert!(ranges.iter().all(|range| !range.is_empty()));
                assert!(ranges.iter().flat_map(Clone::clone).eq(0..lengths.len()), "{ranges:?}");
            }
        }
    }

    /// A rank of short sequences makes as many micro-batches as one of long ones.
    #[test]
    fn ranks_agree_on_the_number_of_micro_batches() {
        let limit = MicroBatch { sequences: 1, tokens: Some(8) };
        let of_ranks = ranks(2, |place| {
            let lengths = if place.group().rank() == 0 { [9, 1, 2, 1, 1] } else { [9, 8, 8, 8, 1] };
            limit.split(&lengths, 1..5, place.group()).unwrap()
        });
        assert_eq!(of_ranks, [vec![1..2, 2..3, 3..4, 4..5], vec![1..2, 2..3, 3..4, 4..5]]);
        let apart = MicroBatch::of_sequences(3);
        let of_ranks = ranks(1, |place| apart.split(&[1; 8], 1..8, place.group()).unwrap());
        assert_eq!(of_ranks, [vec![1..4, 4..7, 7..8]]);
    }
}

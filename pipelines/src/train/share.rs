//! Division of a step's prompts among ranks.

use std::ops::Range;

/// Division of a step's prompts. A mini-batch is a range of prompts, and each rank has an equal, contiguous part of
/// every mini-batch. A mini-batch therefore has the same samples at every world size.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Share {
    /// Prompts of a step, over all ranks: a multiple of `mini_batches * world_size`.
    pub prompts: usize,
    /// Samples per prompt.
    pub group_size: usize,
    /// Mini-batches of a step, with one optimizer step each per epoch.
    pub mini_batches: usize,
    /// Number of ranks.
    pub world_size: usize,
}

impl Share {
    /// Prompts of `rank`, mini-batch by mini-batch.
    pub fn prompts_of(&self, rank: usize) -> impl Iterator<Item = usize> + use<> {
        let per_batch = self.prompts / self.mini_batches;
        let per_rank = per_batch / self.world_size;
        (0..self.mini_batches).flat_map(move |batch| {
            let start = batch * per_batch + rank * per_rank;
            start..start + per_rank
        })
    }

    /// Samples of `rank` in its own order, group by group, with their numbers in the whole step.
    pub fn samples_of(&self, rank: usize) -> impl Iterator<Item = usize> + use<> {
        let group_size = self.group_size;
        self.prompts_of(rank).flat_map(move |prompt| prompt * group_size..(prompt + 1) * group_size)
    }

    /// Samples of a step, over all ranks.
    pub fn samples(&self) -> usize {
        self.prompts * self.group_size
    }

    /// Range of a mini-batch's samples among a rank's own samples.
    pub fn own_range(&self, mini_batch: usize) -> Range<usize> {
        let len = self.samples() / self.mini_batches / self.world_size;
        mini_batch * len..(mini_batch + 1) * len
    }

    /// Micro-batches of a mini-batch, each of at most `size` samples, as ranges of a rank's own samples.
    pub fn micro_batches(
        &self,
        mini_batch: usize,
        size: usize,
    ) -> impl Iterator<Item = Range<usize>> + use<> {
        chunks(self.own_range(mini_batch), size)
    }

    /// Reorders values from the ranks' own orders to the step's order.
    ///
    /// # Panics
    /// If a rank does not have one value per sample.
    pub fn ordered<T>(&self, of_ranks: Vec<Vec<T>>) -> Vec<T> {
        let mut ordered: Vec<Option<T>> = (0..self.samples()).map(|_| None).collect();
        for (rank, values) in of_ranks.into_iter().enumerate() {
            for (sample, value) in self.samples_of(rank).zip(values) {
                ordered[sample] = Some(value);
            }
        }
        ordered.into_iter().map(|value| value.expect("a value for each sample")).collect()
    }

    /// Range of a mini-batch's samples in the step's order.
    pub fn range(&self, mini_batch: usize) -> Range<usize> {
        let len = self.samples() / self.mini_batches;
        mini_batch * len..(mini_batch + 1) * len
    }
}

/// Splits a range into ranges of `size`, of which the last may be smaller.
pub(crate) fn chunks(range: Range<usize>, size: usize) -> impl Iterator<Item = Range<usize>> + use<> {
    range.clone().step_by(size).map(move |start| start..(start + size).min(range.end))
}

#[cfg(test)]
mod tests {
    use super::Share;

    #[test]
    fn every_sample_is_in_its_mini_batch_at_any_world_size() {
        for (world_size, mini_batches) in [(1, 1), (1, 2), (2, 2), (4, 3), (3, 1)] {
            let share = Share { prompts: 12 * mini_batches, group_size: 4, mini_batches, world_size };
            let mut seen = vec![0; share.samples()];
            for rank in 0..world_size {
                let own: Vec<usize> = share.samples_of(rank).collect();
                for batch in 0..mini_batches {
                    for &sample in &own[share.own_range(batch)] {
                        assert!(share.range(batch).contains(&sample), "{share:?}: {sample} in {batch}");
                        seen[sample] += 1;
                    }
                }
            }
            assert!(seen.iter().all(|&times| times == 1), "{share:?}");
            let held: Vec<Vec<usize>> =
                (0..world_size).map(|rank| share.samples_of(rank).collect()).collect();
            assert!(share.ordered(held).into_iter().eq(0..share.samples()));
        }
    }
}

//! Exchange of host values between ranks: rows of samples, sums of losses.

use std::{any::type_name, collections::HashMap, sync::Mutex};

use anyroll_backends::{CollectiveGroup, Stream};
use serde::{Serialize, de::DeserializeOwned};

use super::Reduce;
use crate::Result;

/// Bytes that the first message of each type has room for.
const FIRST_CAPACITY: usize = 1024;

/// Gathers values of the host over a group.
///
/// Values travel in postcard's binary format, which keeps every bit of a float. A collective needs the same length on
/// every rank. A message therefore has a capacity and begins with its length. If a rank's value is longer, a second
/// message follows, and all ranks raise the capacity of that type alike. From its second value on, a type takes one
/// collective unless it grows.
#[derive(Debug)]
pub struct Exchange {
    group: CollectiveGroup,
    stream: Stream,
    /// Capacities by name of the type; equal on every rank.
    capacities: Mutex<HashMap<&'static str, usize>>,
}

impl Exchange {
    /// Creates the exchange over the ranks of `group`.
    pub fn new(group: &CollectiveGroup) -> Result<Self> {
        let stream = Stream::new(group.stream().device())?;
        Ok(Self { group: group.clone(), stream, capacities: Mutex::default() })
    }

    /// The group of the ranks.
    pub fn group(&self) -> &CollectiveGroup {
        &self.group
    }

    /// This rank's number.
    pub fn rank(&self) -> usize {
        self.group.rank()
    }

    /// The number of ranks.
    pub fn world_size(&self) -> usize {
        self.group.world_size()
    }

    /// Returns every rank's value, in rank order.
    pub fn gather<T: Serialize + DeserializeOwned>(&self, own: &T) -> Result<Vec<T>> {
        self.gather_as(own)
    }

    /// Returns every rank's rows, one list per rank, in rank order; the lists may have different lengths.
    pub fn gather_rows<T: Serialize + DeserializeOwned>(&self, own: &[T]) -> Result<Vec<Vec<T>>> {
        self.gather_as(own)
    }

    /// Returns the reduction of all ranks' values in rank order, bitwise equal on every rank.
    pub fn reduce<T: Reduce>(&self, own: &T) -> Result<T> {
        let mut of_ranks = self.gather(own)?.into_iter();
        let mut all = of_ranks.next().expect("a group has a rank");
        of_ranks.for_each(|next| all.reduce(next));
        Ok(all)
    }

    /// Returns true if `wish` is true on some rank.
    pub fn any(&self, wish: bool) -> Result<bool> {
        Ok(self.gather(&wish)?.contains(&true))
    }

    fn gather_as<S: Serialize + ?Sized, T: DeserializeOwned>(&self, own: &S) -> Result<Vec<T>> {
        let bytes = postcard::to_allocvec(own).expect("plain data");
        let of_ranks = self.gather_bytes(type_name::<T>(), &bytes)?;
        Ok(of_ranks
            .iter()
            .map(|bytes| postcard::from_bytes(bytes).expect("what a rank has written"))
            .collect())
    }

    fn gather_bytes(&self, kind: &'static str, own: &[u8]) -> Result<Vec<Vec<u8>>> {
        const HEADER: usize = size_of::<u64>();
        let mut capacities = self.capacities.lock().expect("no panic while it is held");
        let capacity = capacities.entry(kind).or_insert(FIRST_CAPACITY);
        let (first, rest) = own.split_at(own.len().min(*capacity));
        let message = [&(own.len() as u64).to_le_bytes()[..], first].concat();
        let messages = self.all_gather(message, HEADER + *capacity)?;
        let lengths: Vec<usize> = messages
            .iter()
            .map(|message| u64::from_le_bytes(*message.first_chunk().expect("a header")) as usize)
            .collect();
        let longest = lengths.iter().copied().max().unwrap_or(0);
        let rests = match longest > *capacity {
            true => self.all_gather(rest.to_vec(), longest - *capacity)?,
            false => vec![Vec::new(); messages.len()],
        };
        *capacity = (*capacity).max(longest.next_power_of_two());
        let parts = messages.iter().zip(&rests).zip(lengths);
        Ok(parts.map(|((first, rest), len)| [&first[HEADER..], rest].concat()[..len].to_vec()).collect())
    }

    /// Gathers every rank's bytes, padded with zeros to `len`, which is equal on every rank and above 0.
    fn all_gather(&self, mut own: Vec<u8>, len: usize) -> Result<Vec<Vec<u8>>> {
        own.resize(len, 0);
        let all = self.group.gather_bytes(&own, &self.stream)?;
        Ok(all.chunks_exact(len).map(<[u8]>::to_vec).collect())
    }
}

#[cfg(test)]
mod tests {
    use serde::Deserialize;

    use super::super::{ranks, reduced};
    use super::*;

    #[derive(Clone, Debug, Serialize, Deserialize)]
    struct Row {
        reward: f64,
        finished: bool,
        turns: Vec<f64>,
    }

    fn rows(rank: usize, count: usize) -> Vec<Row> {
        let row = |index: usize| Row {
            reward: f64::from_bits(0x7ff8_0000_0000_0000 | (rank << 20 | index) as u64),
            finished: index.is_multiple_of(2),
            turns: vec![-0.0; index % 3],
        };
        (0..count).map(row).collect()
    }

    /// Rows include a NaN's payload and the sign of 0, and are shorter and longer than the first capacity.
    #[test]
    fn rows_arrive_to_the_bit_however_many_each_rank_has() {
        let counts = [[0, 3, 1], [500, 0, 20], [2, 2, 2], [500, 900, 0]];
        let gathered = ranks(3, |place| {
            let exchange = Exchange::new(place.group()).unwrap();
            counts
                .map(|counts| exchange.gather_rows(&rows(exchange.rank(), counts[exchange.rank()])).unwrap())
        });
        for of_rank in gathered {
            for (counts, found) in counts.iter().zip(of_rank) {
                for (rank, (&count, found)) in counts.iter().zip(&found).enumerate() {
                    assert_eq!(found.len(), count);
                    for (found, sent) in found.iter().zip(rows(rank, count)) {
                        assert_eq!(found.reward.to_bits(), sent.reward.to_bits());
                        assert_eq!(found.finished, sent.finished);
                        let bits = |turns: &[f64]| turns.iter().map(|it| it.to_bits()).collect::<Vec<_>>();
                        assert_eq!(bits(&found.turns), bits(&sent.turns));
                    }
                }
            }
        }
    }

    reduced! {
        /// One field per operation.
        struct Numbers {
            /// Added.
            sum total: f64,
            /// Largest.
            max most: f64,
            /// Smallest.
            min least: f64,
            /// Or.
            any stop: bool,
            /// Reduced row by row.
            nested rows: Vec<Numbers>,
        }
    }

    #[test]
    fn each_field_is_reduced_as_declared_in_rank_order() {
        let number = |rank: usize, rows| {
            let value = [0.1, 0.7, -0.3][rank];
            Numbers { total: value, most: value, least: value, stop: rank == 1, rows }
        };
        let found = ranks(3, |place| {
            let exchange = Exchange::new(place.group()).unwrap();
            let rank = exchange.rank();
            let all = exchange.reduce(&number(rank, vec![number(rank, Vec::new())])).unwrap();
            (all, exchange.any(rank == 2).unwrap(), exchange.any(false).unwrap())
        });
        for (all, some, none) in found {
            for all in [&all, &all.rows[0]] {
                assert_eq!((all.total, all.most, all.least, all.stop), (0.1 + 0.7 - 0.3, 0.7, -0.3, true));
            }
            assert!(some && !none);
        }
    }
}

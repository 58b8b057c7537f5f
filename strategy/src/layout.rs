//! Layout of a unit's parameters in its flat buffer, and the part of the buffer that each rank owns.

use std::ops::Range;

use anyroll_backends::ops::{FOUR_BIT_BLOCK, FOUR_BIT_BLOCK_BYTES};
use anyroll_models::Unit;
use num_integer::Integer;

use crate::ZeroStage;

/// Parameters start at multiples of this, so that matrix products get aligned rows in every element type.
const ALIGN_ELEMENTS: usize = 64;
/// Buffers are padded to a multiple of this and of the world size, so that shards are equal and aligned.
const PAD_ELEMENTS: usize = 128;
/// Shards of a frozen unit are padded to a multiple of this: blocks of values in 4 bits are not divided.
const FROZEN_ELEMENTS: usize = FOUR_BIT_BLOCK as usize;

/// Layout of one unit, in elements. It is the same at every stage.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct Layout {
    /// Range of each parameter.
    pub params: Vec<Range<usize>>,
    /// Length of the whole buffer: a multiple of the world size.
    pub len: usize,
    /// Number of equal shards: the ranks of a shard group, which divide the world size.
    pub shards: usize,
    /// Number of equal slices that are the same however many shards there are.
    slices: usize,
    decay: Vec<bool>,
}

impl Layout {
    /// Lays out `unit` for `world_size` ranks, each of which has a shard of its own.
    pub fn new(unit: &Unit, world_size: usize) -> Self {
        let mut end = 0;
        let mut params = Vec::with_capacity(unit.params.len());
        for param in &unit.params {
            let start = end;
            params.push(start..start + param.elements());
            end = aligned(start + param.elements());
        }
        let shard = if unit.trainable { 1 } else { FROZEN_ELEMENTS };
        let len = end.next_multiple_of((world_size * shard).lcm(&PAD_ELEMENTS));
        let decay = unit.params.iter().map(|param| param.decay).collect();
        Self { params, len, shards: world_size, slices: world_size, decay }
    }

    /// The same layout in `shards` shards, a divisor of the world size.
    pub fn in_shards(self, shards: usize) -> Self {
        Self { shards, ..self }
    }

    /// Returns the length of one shard.
    pub fn shard_len(&self) -> usize {
        self.len / self.shards
    }

    /// Returns the length of one slice, which divides that of a shard.
    pub fn slice_len(&self) -> usize {
        self.len / self.slices
    }

    /// Returns the shard of the rank `rank` of a shard group.
    pub fn shard(&self, rank: usize) -> Range<usize> {
        rank * self.shard_len()..(rank + 1) * self.shard_len()
    }

    /// Returns the part of the weights that `rank` keeps between uses.
    pub fn resident(&self, stage: ZeroStage, rank: usize) -> Range<usize> {
        if stage >= ZeroStage::Zero3 { self.shard(rank) } else { 0..self.len }
    }

    /// Returns the part that `rank` steps, and whose optimizer states and accumulated gradient it holds.
    pub fn stepped(&self, stage: ZeroStage, rank: usize) -> Range<usize> {
        if stage >= ZeroStage::Zero1 { self.shard(rank) } else { 0..self.len }
    }

    /// Returns the number of elements that [`crate::Zero::weights_with_own`] allocates for the unit. If the
    /// unit is resident, only those that `is_own` accepts count.
    pub(crate) fn whole_len(&self, gathers: bool, is_own: impl Fn(usize) -> bool) -> usize {
        if gathers {
            return self.len;
        }
        let own = self.params.iter().enumerate().filter(|(param, _)| is_own(*param));
        own.map(|(_, range)| aligned(range.len())).sum()
    }

    /// Splits `range` into runs with and without weight decay, relative to its start. Together they cover it;
    /// padding may belong to either.
    pub fn decay_runs(&self, range: &Range<usize>) -> Vec<(Range<usize>, bool)> {
        let mut runs: Vec<(Range<usize>, bool)> = Vec::new();
        for (index, &decay) in self.decay.iter().enumerate() {
            // A parameter's run ends at the next parameter, or at the end of the buffer.
            let next = self.params.get(index + 1).map_or(self.len, |next| next.start);
            let start = self.params[index].start.clamp(range.start, range.end);
            let end = next.clamp(range.start, range.end);
            match runs.last_mut() {
                _ if start == end => {}
                Some((run, last)) if *last == decay => run.end = end - range.start,
                _ => runs.push((start - range.start..end - range.start, decay)),
            }
        }
        runs
    }
}

/// Returns the most memory of units that become others one after the other, from the bytes of each and of what it becomes, and
/// true if it is in new memory: all of what they become, and the largest of these units. A unit that stays as it is takes its
/// bytes if it is in new memory.
pub(crate) fn made_bytes(units: impl Iterator<Item = (usize, Option<usize>, bool)>) -> usize {
    let add =
        |(total, largest): (usize, usize), (whole, made, is_new): (usize, Option<usize>, bool)| match made
            .or(is_new.then_some(whole))
        {
            Some(made) => (total + made, largest.max(whole)),
            None => (total, largest),
        };
    let (total, largest) = units.fold((0, 0), add);
    total + largest
}

/// Returns the bytes of this many values in 4 bits, a multiple of a block's.
pub(crate) fn four_bit_bytes(elements: usize) -> usize {
    elements / FROZEN_ELEMENTS * FOUR_BIT_BLOCK_BYTES as usize
}

/// Returns the offset at which the next parameter may start after `elements` elements.
pub(crate) fn aligned(elements: usize) -> usize {
    elements.next_multiple_of(ALIGN_ELEMENTS)
}

#[cfg(test)]
mod tests {
    use anyroll_models::{
        ParamSpec, Unit,
        model::{Init, Part},
    };

    use super::Layout;

    fn unit(shapes: &[(&[i64], bool)]) -> Unit {
        let params = shapes.iter().enumerate().map(|(index, &(shape, decay))| ParamSpec {
            name: format!("p{index}"),
            shape: shape.to_vec(),
            parts: vec![Part { name: format!("p{index}"), rows: shape[0] }],
            init: Init::Zeros,
            decay,
            offset: 0.0,
        });
        Unit { name: "unit".into(), params: params.collect(), trainable: true }
    }

    #[test]
    fn shards_are_equal_and_cover_every_parameter_once() {
        for world_size in 1..=9 {
            let unit = unit(&[(&[5, 7], true), (&[5], false), (&[0], false), (&[64, 3], true)]);
            let layout = Layout::new(&unit, world_size);
            assert_eq!(layout.len % world_size, 0);
            assert_eq!(layout.len % 128, 0);
            assert_eq!(layout.shard(world_size - 1).end, layout.len);
            for (index, range) in layout.params.iter().enumerate() {
                assert_eq!(range.len(), unit.params[index].elements());
                assert!(range.start.is_multiple_of(64) && range.end <= layout.len);
                assert!(index == 0 || layout.params[index - 1].end <= range.start);
            }
        }
    }

    #[test]
    fn decay_runs_cover_any_range_and_merge() {
        let layout = Layout::new(&unit(&[(&[64], true), (&[1], false), (&[2], false), (&[200], true)]), 1);
        assert_eq!(
            layout.decay_runs(&(0..layout.len)),
            [(0..64, true), (64..192, false), (192..layout.len, true)]
        );
        assert_eq!(layout.decay_runs(&(65..100)), [(0..35, false)]);
        assert_eq!(layout.decay_runs(&(60..200)), [(0..4, true), (4..132, false), (132..140, true)]);
        assert_eq!(layout.decay_runs(&(7..7)), []);
    }
}

//! A decoder whose experts are spread over ranks in training: each rank has as many consecutive experts of every layer, and
//! all of the rest (GShard, Lepikhin et al. 2020). Ranks run batches of their own, and rows travel to their experts.
//!
//! The stacked matrices of a layer's experts are then a unit of their own, which the ranks with the same experts shard.

use std::sync::Arc;

use super::layer_block::LayerBlock;
use super::split::part_of_unit;
use super::{Decoder, DecoderConfig};
use crate::error::check_config;
use crate::model::Unit;
use crate::{Cut, Peers, Result};

/// Number of a layer's parameters that hold its experts, the last of its unit: `gate_up` and `down`.
const OF_EXPERTS: usize = 2;

/// The ranks among which a block's experts are spread.
#[derive(Clone, Debug)]
pub(super) struct Spread {
    pub peers: Arc<dyn Peers>,
    /// Position of the experts' unit among the block's units.
    pub unit: usize,
}

/// The units of experts that are spread over ranks, which come after all others.
#[derive(Clone, Debug)]
pub(super) struct SpreadUnits {
    ranks: i64,
    /// Index of the first.
    first: usize,
    /// For each, the unit of its layer in the whole decoder, the index of its first parameter there, and the rows of both.
    of_layers: Vec<(usize, usize, [i64; OF_EXPERTS])>,
}

impl DecoderConfig {
    /// Checks that `ranks` ranks can have equally many of each layer's experts. True of a decoder without experts.
    ///
    /// # Errors
    /// [`Error::Config`](crate::Error::Config) with the field that they cannot share.
    pub fn check_spread(&self, ranks: i64) -> Result<()> {
        check_config(self.expressed.is_none(), "model_type", || {
            "has layers that libtorch differentiates, whose experts are not spread over ranks".to_owned()
        })?;
        let experts = self.experts.as_ref().map_or(ranks, |experts| experts.num_experts);
        check_config(experts % ranks == 0, "num_experts", || {
            format!("is {experts}, which {ranks} ranks cannot share evenly")
        })
    }
}

impl Decoder {
    /// See [`crate::Model::spread_experts`].
    pub(super) fn spread(&self, peers: &Arc<dyn Peers>) -> Result<Option<Decoder>> {
        self.config.check_spread(peers.count() as i64)?;
        if self.config.experts.is_none() {
            return Ok(None);
        }
        let mut own = self.on(self.rope_tables.of(0).device())?;
        let first = own.units.len();
        let mut of_layers = Vec::new();
        for layer in (0..self.config.num_hidden_layers).filter(|&it| self.config.experts_of(it).is_some()) {
            let unit = layer + 1; // after the embedding's
            let param = own.units[unit].params.len() - OF_EXPERTS;
            let whole = own.units[unit].params.split_off(param);
            own.units_of[layer + 1].push(own.units.len());
            let spread = Spread { peers: peers.clone(), unit: own.units_of[layer + 1].len() - 1 };
            for block in [&mut own.plain_blocks[layer], &mut own.inner_blocks[layer]] {
                spread_block(block, param, &spread);
            }
            of_layers.push((unit, param, [whole[0].shape[0], whole[1].shape[0]]));
            let of = &own.units[unit];
            own.units.push(Unit { name: format!("{}.experts", of.name), params: whole, ..of.clone() });
        }
        let spread = SpreadUnits { ranks: peers.count() as i64, first, of_layers };
        for index in first..own.units.len() {
            let cuts: Vec<Cut> =
                (0..OF_EXPERTS).map(|param| spread.cut_on(peers.rank(), index, param)).collect();
            own.units[index] = part_of_unit(&own.units[index], &cuts);
        }
        own.spread = Some(spread);
        Ok(Some(own))
    }
}

/// Makes the block read its experts, which are parameters from `first` on, from a unit of their own.
fn spread_block(block: &mut LayerBlock, first: usize, spread: &Spread) {
    let LayerBlock::Written(block) = block else { unreachable!("expressed layers are refused") };
    assert_eq!([block.gate_up, block.down], [first, first + 1], "experts are a layer's last parameters");
    (block.gate_up, block.down, block.spread) = (0, 1, Some(spread.clone()));
}

impl SpreadUnits {
    /// Number of ranks among which experts are spread.
    pub fn ranks(&self) -> usize {
        self.ranks as usize
    }

    /// See [`crate::Model::cut_on`].
    pub fn cut_on(&self, rank: usize, unit: usize, param: usize) -> Cut {
        let Some((_, _, rows)) = self.of_unit(unit) else { return Cut::Whole };
        let (own, rank) = (rows[param] / self.ranks, rank as i64);
        Cut::Rows(std::iter::once(rank * own..(rank + 1) * own).collect())
    }

    /// See [`crate::Model::whole_place`].
    pub fn whole_place(&self, unit: usize, param: usize) -> (usize, usize) {
        self.of_unit(unit).map_or((unit, param), |&(whole, first, _)| (whole, first + param))
    }

    fn of_unit(&self, unit: usize) -> Option<&(usize, usize, [i64; OF_EXPERTS])> {
        self.of_layers.get(unit.checked_sub(self.first)?)
    }
}

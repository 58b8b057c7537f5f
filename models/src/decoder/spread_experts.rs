//! A decoder whose experts are spread over ranks in training: each rank has as many consecutive experts of every layer, and
//! all of the rest (GShard, Lepikhin et al. 2020). Ranks run batches of their own, and rows travel to their experts.
//!
//! The stacked matrices of a layer's experts are then a unit of their own, which the ranks with the same experts shard. So are
//! the stacked adapters of a layer's experts.

use std::sync::Arc;

use super::layer_block::LayerBlock;
use super::lora::Lora;
use super::split::part_of_unit;
use super::{Decoder, DecoderConfig};
use crate::error::check_config;
use crate::model::Unit;
use crate::{Cut, Peers, Result};

/// The ranks among which a block's experts are spread.
#[derive(Clone, Debug)]
pub(super) struct Spread {
    pub peers: Arc<dyn Peers>,
    /// Position of the experts' unit among the block's units.
    pub unit: usize,
}

/// The units of experts that are spread over ranks.
#[derive(Clone, Debug)]
pub(super) struct SpreadUnits {
    ranks: i64,
    taken: Vec<Taken>,
}

/// Parameters of experts.
#[derive(Clone, Debug)]
struct Taken {
    /// Their unit. It comes after those of the whole decoder, unless the whole one has no others.
    own: usize,
    /// The unit that has them in the whole decoder, and the index of the first one there.
    whole: usize,
    first: usize,
    /// Rows of each in the whole decoder.
    rows: Vec<i64>,
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
        let mut taken = Vec::new();
        for layer in (0..self.config.num_hidden_layers).filter(|&it| self.config.experts_of(it).is_some()) {
            let param = self.inner_blocks[layer].written().gate_up;
            let place = own.take_experts(layer, 0, param, &mut taken);
            let spread = Spread { peers: peers.clone(), unit: place };
            for block in [&mut own.plain_blocks[layer], &mut own.inner_blocks[layer]] {
                spread_block(block, param, &spread);
            }
            if let Some(param) = self.inner_blocks[layer].lora().and_then(Lora::first_of_experts) {
                let place = own.take_experts(layer, ADAPTERS, param, &mut taken);
                own.inner_blocks[layer].move_adapters(param, place);
            }
        }
        let spread = SpreadUnits { ranks: peers.count() as i64, taken };
        for index in spread.taken.iter().map(|taken| taken.own) {
            let params = 0..own.units[index].params.len();
            let cuts: Vec<Cut> = params.map(|param| spread.cut_on(peers.rank(), index, param)).collect();
            own.units[index] = part_of_unit(&own.units[index], &cuts);
        }
        own.spread = Some(spread);
        Ok(Some(own))
    }

    /// Takes the parameters from `first` on out of the layer's unit at `place` among its own, to a new one; all of them stay
    /// where they are. Returns the place of their unit.
    fn take_experts(&mut self, layer: usize, place: usize, first: usize, taken: &mut Vec<Taken>) -> usize {
        let whole = self.units_of[layer + 1][place];
        let rows = self.units[whole].params[first..].iter().map(|spec| spec.shape[0]).collect();
        if first == 0 {
            taken.push(Taken { own: whole, whole, first, rows });
            return place;
        }
        let own = self.units.len();
        let params = self.units[whole].params.split_off(first);
        let of = &self.units[whole];
        self.units.push(Unit { name: format!("{}.experts", of.name), params, ..of.clone() });
        self.units_of[layer + 1].push(own);
        taken.push(Taken { own, whole, first, rows });
        self.units_of[layer + 1].len() - 1
    }
}

/// Place of the adapters' unit among a layer's.
const ADAPTERS: usize = 1;

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
        let Some(taken) = self.of_unit(unit) else { return Cut::Whole };
        let (own, rank) = (taken.rows[param] / self.ranks, rank as i64);
        Cut::Rows(std::iter::once(rank * own..(rank + 1) * own).collect())
    }

    /// See [`crate::Model::whole_place`].
    pub fn whole_place(&self, unit: usize, param: usize) -> (usize, usize) {
        self.of_unit(unit).map_or((unit, param), |taken| (taken.whole, taken.first + param))
    }

    /// See [`crate::Model::is_of_experts`].
    pub fn is_of_experts(&self, unit: usize) -> bool {
        self.of_unit(unit).is_some()
    }

    fn of_unit(&self, unit: usize) -> Option<&Taken> {
        self.taken.iter().find(|taken| taken.own == unit)
    }
}

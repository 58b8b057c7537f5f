//! Frozen units whose matrices are kept in 4 bits: they are widened to the strategy's precision while a block uses them.
//!
//! All elements of the flat unit are in 4 bits, in blocks that no parameter and no shard shares with another. The parameters
//! that are not matrices are kept as they are besides, and copied over what was widened.

use std::ops::Range;

use anyroll_backends::{
    Buffer, DType,
    ops::{self, FOUR_BIT_BLOCK_BYTES},
};
use anyroll_models::Model;
use tch::{Kind, Tensor};

use super::Zero;
use crate::{
    Result,
    memory::{flat, param_views},
    weights::{Arriving, UnitState, WeightsStorage},
};

impl<M: Model> Zero<M> {
    /// Starts to gather a unit in 4 bits. Returns where it will be, and the gather; `None` if all of it is there.
    pub(super) fn gather_packed(&mut self, index: usize) -> Result<(Buffer, Option<Arriving>)> {
        let unit = &self.units[index];
        if !self.config.gathers() {
            let WeightsStorage::Device { resident, .. } = &unit.storage else {
                unreachable!("hosts are gathered from")
            };
            return Ok((resident.clone(), None));
        }
        // With room for one byte an element, like other buffers of this layout.
        let (packed, used) = (self.gathered.take(&unit.layout, DType::U8)?, unit.stored(0..unit.layout.len));
        let arriving = self.gather_into(index, &packed.slice(used))?;
        Ok((packed, Some(arriving)))
    }

    /// Widens a unit that has arrived in 4 bits to its whole buffer.
    pub(super) fn widen_arrived(&mut self, index: usize, packed: Buffer) -> Result<()> {
        let whole = self.units[index].whole.as_ref().expect("it arrived").buffer.clone();
        self.widen(index, packed, &whole)
    }

    /// Gathers a unit and widens it to `whole`.
    pub(super) fn widen_whole(&mut self, index: usize, whole: &Buffer) -> Result<()> {
        if let Some(memory) = self.units[index].storage.arena() {
            memory.ready_to_read(&self.compute)?;
        }
        let (packed, arriving) = self.gather_packed(index)?;
        arriving.map_or(Ok(()), |arriving| arriving.wait(&self.compute))?;
        self.widen(index, packed, whole)
    }

    /// Returns this rank's shard of a unit.
    pub(super) fn widened_shard(&mut self, index: usize) -> Result<Tensor> {
        let (layout, dtype) = (self.units[index].layout.clone(), self.units[index].dtype);
        let whole = Buffer::zeros(&self.compute, layout.len, dtype)?;
        self.widen_whole(index, &whole)?;
        flat(&whole.slice(self.units[index].shard()))
    }

    /// Widens a whole unit in 4 bits to `whole`. Memory into which it was gathered is free then.
    fn widen(&mut self, index: usize, packed: Buffer, whole: &Buffer) -> Result<()> {
        let unit = &self.units[index];
        let used = blocks(&packed.slice(unit.stored(0..unit.layout.len)))?;
        ops::from_four_bits(&used, &mut flat(whole)?)?;
        let views = param_views(&self.own.units()[index], &unit.layout, whole)?;
        for (param, exact) in unit.four_bits.iter().flatten() {
            views[*param].shallow_clone().f_copy_(exact)?;
        }
        if self.config.gathers() {
            self.gathered.put(&unit.layout, packed);
        }
        Ok(())
    }

    /// Sets the part of a unit that this rank keeps to `kept`, once rounded to the precision and then to 4 bits. Every rank
    /// calls.
    pub(super) fn pack(&mut self, index: usize, kept: &Tensor) -> Result<()> {
        let (unit, device) = (&self.units[index], self.torch_device());
        let rounded = kept.f_to_kind(unit.dtype.kind())?.f_to_device(device)?;
        let bytes = unit.stored(0..kept.numel()).len() as i64;
        let mut packed =
            Tensor::f_zeros([bytes / FOUR_BIT_BLOCK_BYTES, FOUR_BIT_BLOCK_BYTES], (Kind::Uint8, device))?;
        ops::in_four_bits(&rounded, &mut packed)?;
        if let Some(memory) = self.units[index].storage.arena() {
            memory.ready_to_write(&self.compute)?;
        }
        self.set_exact(index, &rounded)?;
        match &mut self.units[index].storage {
            WeightsStorage::Device { resident, .. } => drop(blocks(resident)?.f_copy_(&packed)?),
            WeightsStorage::Host(memory) => {
                let host = packed.f_to_device(tch::Device::Cpu)?;
                host.f_copy_data_u8(memory.bytes_mut()?, host.numel())?;
            }
        }
        Ok(())
    }

    /// Sets the parameters that are not in 4 bits from the parts of the unit that ranks keep.
    fn set_exact(&mut self, index: usize, kept: &Tensor) -> Result<()> {
        let UnitState { layout, four_bits, .. } = &self.units[index];
        if four_bits.as_ref().is_none_or(Vec::is_empty) {
            return Ok(());
        }
        let layout = layout.clone();
        let gathered = (kept.numel() < layout.len).then(|| self.gather_shards(index, kept)).transpose()?;
        let whole = match &gathered {
            Some(whole) => flat(whole)?,
            None => kept.shallow_clone(),
        };
        for (param, exact) in self.units[index].four_bits.iter_mut().flatten() {
            let Range { start, end } = layout.params[*param];
            let values = whole.f_narrow(0, start as i64, (end - start) as i64)?;
            exact.f_copy_(&values.f_view_as(&*exact)?)?;
        }
        Ok(())
    }
}

/// Returns a buffer of bytes as rows of blocks.
fn blocks(packed: &Buffer) -> Result<Tensor> {
    Ok(packed.tensor(&[packed.len() as i64 / FOUR_BIT_BLOCK_BYTES, FOUR_BIT_BLOCK_BYTES])?)
}

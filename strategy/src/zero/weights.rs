//! Calls about weights: reading, copying, gathering and freeing whole units.

use std::ops::Range;

use anyroll_backends::{Buffer, DType, TorchDevice, ops};
use anyroll_models::{Model, init::WeightSource};
use tch::{Kind, Tensor};

use super::Zero;
use crate::{
    Result, State, Weights,
    layout::{aligned, made_bytes},
    memory::{flat, param_views},
    optimizer::Part,
    walk::Visit,
    weights::{Arriving, UnitState, WeightsStorage, Whole},
};

impl<M: Model> Zero<M> {
    /// Returns every whole weight in its current state, in the strategy's precision. It serves generation, in
    /// which no rank waits for another. Below stage 3 with weights on the device, these are the resident
    /// weights, so a later step changes them. If they must be gathered, the call waits for states that are
    /// leaving until there is room.
    pub fn weights(&mut self) -> Result<Weights> {
        self.weights_with_own(|_, _| false)
    }

    /// Like [`Self::weights`], but the caller may change the weights that `is_own` accepts by unit and index
    /// in the unit. Resident weights among them are copied.
    pub fn weights_with_own(&mut self, is_own: impl Fn(usize, usize) -> bool) -> Result<Weights> {
        self.needs("weights", &[State::Params])?;
        let (units, element) = (0..self.parts.len(), self.config.precision.dtype().size_bytes());
        let lens = units.clone().map(|index| {
            let is_made = self.makes_whole_unit(index);
            self.whole_layout(index).whole_len(is_made, |param| is_own(index, param)) * element
        });
        let bytes = lens.sum();
        if bytes > 0 {
            self.make_room(bytes)?;
        }
        units.map(|index| self.whole_unit(index, |param| is_own(index, param))).collect()
    }

    /// Returns what `make` makes of each unit's whole weights, in memory of its own: for generation by several ranks
    /// together, or with smaller weights. Gathers one unit at a time, so that no rank holds the whole model. `made` returns
    /// the bytes of what becomes of a unit, from its index, its own bytes and those of an element; `None` if it stays as it
    /// is. Tensors made of any other unit are not views of it. Every rank calls.
    pub fn weights_made(
        &mut self,
        made: impl Fn(usize, usize, usize) -> Option<usize>,
        make: impl Fn(usize, &[Tensor]) -> anyroll_models::Result<Vec<Tensor>>,
    ) -> Result<Weights> {
        self.needs("weights_made", &[State::Params])?;
        let (units, element) = (0..self.parts.len(), self.config.precision.dtype().size_bytes());
        let lens = units.map(|index| {
            let whole = self.whole_layout(index).len * element;
            (whole, made(index, whole, element), self.makes_whole_unit(index))
        });
        let lens: Vec<_> = lens.collect();
        self.make_room(made_bytes(lens.iter().copied()))?;
        let units = lens.into_iter().enumerate().map(|(index, (_, made, _))| match made {
            Some(_) if !self.is_joined(index) => self.make_of_pooled(index, |whole| make(index, whole)),
            _ => Ok(make(index, &self.whole_unit(index, |_| false)?)?),
        });
        units.collect()
    }

    /// Returns what `make` makes of a unit that ranks do not join. The unit is in the memory that blocks use, so that no other
    /// is allocated for each unit.
    fn make_of_pooled(
        &mut self,
        index: usize,
        make: impl Fn(&[Tensor]) -> anyroll_models::Result<Vec<Tensor>>,
    ) -> Result<Vec<Tensor>> {
        let [part] = self.parts[index][..] else { unreachable!("a unit that is not joined has one part") };
        let whole = self.resident_unit(part, |_| false)?;
        let made = make(&whole)?;
        drop(whole);
        self.free_whole(part);
        Ok(made)
    }

    /// Returns the weights of one unit of the whole model, like [`Self::weights`]. Every rank calls.
    pub fn unit_weights(&mut self, index: usize) -> Result<Vec<Tensor>> {
        self.needs("unit_weights", &[State::Params])?;
        self.whole_unit(index, |_| false)
    }

    fn whole_unit(&mut self, index: usize, is_own: impl Fn(usize) -> bool) -> Result<Vec<Tensor>> {
        if !self.makes_whole_unit(index) {
            return self.resident_unit(index, is_own);
        }
        let parts: Result<Vec<_>> =
            self.parts[index].clone().into_iter().map(|part| self.part_of_unit(part)).collect();
        let whole = self.join_parts(index, parts?)?;
        param_views(&self.model.units()[index], &self.whole_layout(index), &whole)
    }

    /// Returns true if a unit of the whole model is in new memory: it is gathered, widened, or joined of parts.
    fn makes_whole_unit(&self, index: usize) -> bool {
        self.is_joined(index) || self.parts[index].iter().any(|&part| self.units[part].is_made(self.config))
    }

    /// Returns the weights of a unit that the shard group has together. If they must be gathered, it is into memory outside
    /// the pool, which lives as long as the caller wants.
    fn part_of_unit(&mut self, index: usize) -> Result<Buffer> {
        let unit = &self.units[index];
        if !unit.is_made(self.config) {
            self.fetch(index)?;
            return Ok(self.units[index].whole.as_ref().expect("fetched").buffer.clone());
        }
        let buffer = Buffer::zeros(&self.compute, unit.layout.len, unit.dtype)?;
        match unit.four_bits {
            Some(_) => self.widen_whole(index, &buffer)?,
            None => self.gather_into(index, &buffer)?.wait(&self.compute)?,
        }
        Ok(buffer)
    }

    /// Returns a unit that is whole on this rank anyway, with copies of the weights that `is_own` accepts.
    fn resident_unit(&mut self, index: usize, is_own: impl Fn(usize) -> bool) -> Result<Vec<Tensor>> {
        self.fetch(index)?;
        let unit = &self.units[index];
        let views = &unit.whole.as_ref().expect("fetched").views;
        let len = unit.layout.whole_len(false, &is_own);
        if len == 0 {
            return Ok(views.iter().map(Tensor::shallow_clone).collect());
        }
        let memory = Buffer::zeros(&self.compute, len, unit.dtype)?;
        let mut start = 0;
        let tensors = views.iter().enumerate().map(|(param, view)| {
            if !is_own(param) {
                return Ok(view.shallow_clone());
            }
            let mut own = memory.slice(start..start + view.numel()).tensor(&view.size())?;
            start += aligned(view.numel());
            own.f_copy_(view)?;
            Ok(own)
        });
        tensors.collect()
    }

    /// Copies the weights of `other`, a strategy of the same model on the same ranks, at any stage, precision
    /// and devices.
    pub fn copy_weights_from(&mut self, other: &mut Self) -> Result<()> {
        self.set_from(other, "copy_weights_from", |_, theirs| Ok(theirs))
    }

    /// Moves every weight by the fraction `share` towards that of `other`. An exponential moving average uses
    /// 1 - decay as `share`; at 1 this is a copy. Otherwise like [`Self::copy_weights_from`]. Small moves
    /// need fp32.
    pub fn move_towards(&mut self, other: &mut Self, share: f64) -> Result<()> {
        self.set_from(other, "move_towards", |own, theirs| {
            Ok(own.f_to_kind(Kind::Float)?.f_lerp(&theirs.f_to_kind(Kind::Float)?, share)?)
        })
    }

    /// Moves the weights of the unit `unit` by the fraction `share` towards those of the unit `source`, which has the
    /// same layout: a target network towards the network that it follows. Small moves need fp32 or an optimizer's
    /// master weights.
    pub fn move_unit_towards(&mut self, unit: usize, source: usize, share: f64) -> Result<()> {
        self.needs("move_unit_towards", &[State::Params, State::Optimizer])?;
        let own = self.own_weights(unit)?.f_to_kind(Kind::Float)?;
        let theirs = self.own_weights(source)?.f_to_kind(Kind::Float)?;
        let whole = self.gather_shards(unit, &own.f_lerp(&theirs, share)?)?;
        self.set_unit(unit, &flat(&whole)?)
    }

    /// Sets the weights to the result of `mix` on this rank's shards of its own and of `other`'s weights.
    fn set_from(
        &mut self,
        other: &mut Self,
        call: &'static str,
        mix: impl Fn(Tensor, Tensor) -> Result<Tensor>,
    ) -> Result<()> {
        let states = [State::Params, State::Optimizer];
        self.needs(call, &states)?;
        other.needs(call, &states)?;
        for index in 0..self.units.len() {
            let own = self.own_weights(index)?;
            let theirs = ops::moved(&other.own_weights(index)?, own.device())?;
            let mixed = mix(own, theirs)?;
            let whole = self.gather_shards(index, &mixed)?;
            self.set_unit(index, &flat(&whole)?)?;
        }
        Ok(())
    }

    /// Copies the weights of `other` that both models have, by name and shape, such as a decoder's blocks
    /// under another head. The models must have the same units.
    pub fn copy_shared_weights_from<N: Model>(&mut self, other: &mut Zero<N>) -> Result<()> {
        let (call, states) = ("copy_shared_weights_from", [State::Params, State::Optimizer]);
        self.needs(call, &states)?;
        other.needs(call, &states)?;
        assert_eq!(self.mesh.expert_ranks(), other.mesh.expert_ranks(), "experts are spread alike");
        let (model, theirs) = (self.own.clone(), other.own.clone());
        // Units of spread experts come behind all others, of which the other model may have more.
        let others = (self.parts.len(), other.parts.len());
        let source = |index: usize| if index < others.0 { index } else { index - others.0 + others.1 };
        for (index, unit) in model.units().iter().enumerate() {
            let source = source(index);
            let Some(from) = theirs.units().get(source) else { continue };
            let (own, given) = (self.own_weights(index)?, other.own_weights(source)?);
            let whole = flat(&self.gather_shards(index, &own)?)?;
            let given = ops::moved(&flat(&other.gather_shards(source, &given)?)?, whole.device())?;
            for (spec, range) in unit.params.iter().zip(&self.units[index].layout.params) {
                let same =
                    from.params.iter().position(|it| (&it.name, &it.shape) == (&spec.name, &spec.shape));
                if let Some(param) = same {
                    let (to, start) =
                        (range.start as i64, other.units[source].layout.params[param].start as i64);
                    let len = range.len() as i64;
                    whole.f_narrow(0, to, len)?.f_copy_(&given.f_narrow(0, start, len)?)?;
                }
            }
            self.set_unit(index, &whole)?;
        }
        Ok(())
    }

    /// Gathers a unit in fp32 from the shards of its group.
    pub(super) fn gather_shards(&self, index: usize, own: &Tensor) -> Result<Buffer> {
        let unit = &self.units[index];
        let whole = Buffer::zeros(&self.compute, unit.layout.len, DType::F32)?;
        let mine = whole.slice(unit.shard());
        flat(&mine)?.f_copy_(own)?;
        unit.group.all_gather(&whole, &mine, &self.compute)?.wait_stream(&self.compute)?;
        Ok(whole)
    }

    /// Fills the weights from `source`; reads only the part that this rank keeps.
    pub(crate) fn init_weights(&mut self, source: &dyn WeightSource) -> Result<()> {
        for index in 0..self.units.len() {
            let (kept, _) = self.resident_ranges(index);
            let mut values = vec![0.0; kept.len()];
            for (param, at) in self.units[index].layout.params.iter().enumerate() {
                let (start, end) = (at.start.max(kept.start), at.end.min(kept.end));
                if start < end {
                    let values = &mut values[start - kept.start..end - kept.start];
                    self.read_part(source, (index, param), start - at.start..end - at.start, values)?;
                }
            }
            self.set_resident(index, &Tensor::f_from_slice(&values)?)?;
        }
        Ok(())
    }
}

/// Reads and writes of checkpoints.
impl<M: Model> Zero<M> {
    /// Returns this rank's saved part of a unit of the whole model, like [`Self::own_weights`], but without a copy if they are
    /// fp32.
    pub(crate) fn saved_weights(&mut self, index: usize) -> Result<Part> {
        let (compute, saved) = (self.compute.clone(), self.saved_range(index));
        if self.is_joined(index) {
            let parts = self.parts[index].clone();
            let own: Result<Vec<_>> = parts.into_iter().map(|part| self.own_weights(part)).collect();
            return self.saved_of_whole(index, &own?);
        }
        if let Some(state) = self.state_mut(index) {
            state.storage.ready(&compute)?;
            if let Some(master) = state.master(&saved)? {
                return Ok(master);
            }
        }
        let weights = self.own_weights(index)?;
        let kept = self.resident_ranges(index).0;
        if let UnitState { dtype: DType::F32, storage: WeightsStorage::Device { resident, .. }, .. } =
            &self.units[index]
        {
            return Ok(Part::Device(resident.slice(saved.start - kept.start..saved.end - kept.start)));
        }
        let start = saved.start - self.units[index].shard().start;
        let wide = Buffer::zeros(&self.compute, saved.len(), DType::F32)?;
        flat(&wide)?.f_copy_(&weights.f_narrow(0, start as i64, saved.len() as i64)?)?;
        Ok(Part::Device(wide))
    }

    /// Returns this rank's shard of a unit's weights, in the highest precision available.
    pub(crate) fn own_weights(&mut self, index: usize) -> Result<Tensor> {
        let shard = self.units[index].shard();
        let compute = self.compute.clone();
        if let Some(state) = self.state_mut(index)
            && let Some(master) = &state.master
        {
            state.storage.ready(&compute)?;
            let start = shard.start - state.range.start;
            return Ok(master.f_narrow(0, start as i64, shard.len() as i64)?);
        }
        let kept = self.resident_ranges(index).0;
        if self.units[index].four_bits.is_some() {
            return self.widened_shard(index);
        }
        let own = shard.start - kept.start..shard.end - kept.start;
        if !self.config.gathers() {
            self.fetch(index)?; // a gather may still fill it
        }
        let unit = &mut self.units[index];
        match &mut unit.storage {
            WeightsStorage::Device { memory, resident } => {
                memory.ready_to_read(&self.compute)?;
                flat(&resident.slice(own))
            }
            WeightsStorage::Host(memory) => {
                let size = unit.dtype.size_bytes();
                let bytes = &memory.bytes()?[own.start * size..own.end * size];
                let host = Tensor::f_from_data_size(bytes, &[own.len() as i64], unit.dtype.kind())?;
                Ok(host.f_to_device(self.torch_device())?)
            }
        }
    }

    /// Returns the libtorch device of this strategy's tensors.
    pub fn torch_device(&self) -> tch::Device {
        let device = self.compute.device().torch_device().map(TorchDevice::tch);
        device.expect("a strategy computes where libtorch does")
    }

    /// Returns the part of a unit that this rank keeps: of its weights and of its moments.
    pub(crate) fn resident_ranges(&self, index: usize) -> (Range<usize>, Option<Range<usize>>) {
        let UnitState { layout, group, .. } = &self.units[index];
        let weights = layout.resident(self.config.stage, group.rank());
        let state = self.training.as_ref().and_then(|training| training.states[index].as_ref());
        (weights, state.map(|state| state.range.clone()))
    }

    /// Sets the part of a unit that this rank keeps, and the master weights, which lie within it.
    pub(crate) fn set_resident(&mut self, index: usize, kept: &Tensor) -> Result<()> {
        let (kept_range, _) = self.resident_ranges(index);
        if self.units[index].four_bits.is_some() {
            return self.pack(index, kept);
        }
        let unit = &mut self.units[index];
        match &mut unit.storage {
            WeightsStorage::Device { memory, resident } => {
                memory.ready_to_write(&self.compute)?;
                flat(resident)?.f_copy_(kept)?;
            }
            WeightsStorage::Host(memory) => {
                let host = kept.f_to_kind(unit.dtype.kind())?.f_to_device(tch::Device::Cpu)?;
                host.f_copy_data_u8(memory.bytes_mut()?, kept_range.len())?;
            }
        }
        let compute = self.compute.clone();
        if let Some(state) = self.state_mut(index)
            && let Some(master) = &mut state.master
        {
            state.storage.ready(&compute)?;
            let start = state.range.start - kept_range.start;
            master.f_copy_(&kept.f_narrow(0, start as i64, state.range.len() as i64)?)?;
        }
        Ok(())
    }

    /// Sets a unit's weights from its whole flat buffer.
    fn set_unit(&mut self, index: usize, whole: &Tensor) -> Result<()> {
        let (kept, _) = self.resident_ranges(index);
        self.set_resident(index, &whole.f_narrow(0, kept.start as i64, kept.len() as i64)?)
    }
}

/// Gathering and freeing of weights.
impl<M: Model> Zero<M> {
    /// Makes a block's weights ready for the compute stream, and starts to gather those of the next one.
    pub(super) fn enter(&mut self, visit: &Visit) -> Result<()> {
        for &unit in visit.units {
            self.fetch(unit)?;
        }
        for &unit in visit.next {
            // Widening alone has nothing to wait for.
            if self.config.gathers() || self.units[unit].four_bits.is_none() {
                self.start_gather(unit)?;
            }
        }
        Ok(())
    }

    /// Frees gathered weights that the pass no longer needs.
    pub(super) fn leave(&mut self, visit: &Visit) {
        visit.done.iter().for_each(|&unit| self.free_whole(unit));
    }

    /// Frees the whole unit, unless it is this rank's own copy.
    fn free_whole(&mut self, index: usize) {
        let unit = &mut self.units[index];
        if unit.is_made(self.config)
            && let Some(whole) = unit.whole.take()
        {
            self.gathered.put(&unit.layout, whole.buffer);
        }
    }

    /// Returns the views of a block's weights; the block was entered.
    pub(crate) fn views(&self, block: usize) -> Vec<&[Tensor]> {
        let whole = |&unit: &usize| &*self.units[unit].whole.as_ref().expect("the block was entered").views;
        self.own.units_of(block).iter().map(whole).collect()
    }

    /// Makes compute wait for gathers in flight, and drops gathered weights.
    pub(crate) fn settle_weights(&mut self) -> Result<()> {
        for index in 0..self.units.len() {
            let whole = self.units[index].whole.as_ref();
            if whole.is_some_and(|whole| whole.arriving.is_some() || whole.packed.is_some()) {
                self.fetch(index)?;
            }
        }
        self.gathered.clear();
        Ok(())
    }

    fn fetch(&mut self, index: usize) -> Result<()> {
        self.start_gather(index)?;
        let whole = self.units[index].whole.as_mut().expect("started");
        whole.arriving.take().map_or(Ok(()), |arriving| arriving.wait(&self.compute))?;
        match whole.packed.take() {
            Some(packed) => self.widen_arrived(index, packed),
            None => Ok(()),
        }
    }

    /// Starts to gather a unit that is not whole on this rank.
    fn start_gather(&mut self, index: usize) -> Result<()> {
        let unit = &mut self.units[index];
        if let Some(memory) = unit.storage.arena() {
            memory.ready_to_read(&self.compute)?;
        }
        if unit.whole.is_none() {
            let buffer = self.gathered.take(&unit.layout, unit.dtype)?;
            let views = param_views(&self.own.units()[index], &unit.layout, &buffer)?;
            let (packed, arriving) = match self.units[index].four_bits {
                Some(_) => self.gather_packed(index).map(|(packed, arriving)| (Some(packed), arriving))?,
                None => (None, Some(self.gather_into(index, &buffer)?)),
            };
            self.units[index].whole = Some(Whole { buffer, views, packed, arriving });
        }
        Ok(())
    }

    /// Starts to fill `whole` with a unit as it is stored, from the host and from the other ranks.
    pub(super) fn gather_into(&mut self, index: usize, whole: &Buffer) -> Result<Arriving> {
        let kept = self.units[index].stored(self.resident_ranges(index).0);
        let UnitState { group, storage, .. } = &mut self.units[index];
        match storage {
            WeightsStorage::Device { memory, resident } => {
                memory.ready_to_read(&self.compute)?;
                Ok(Arriving::Gather(group.all_gather(whole, resident, &self.compute)?))
            }
            WeightsStorage::Host(memory) => {
                let to_device = &self.transfers.to_device;
                to_device.wait_stream(&self.compute)?; // earlier users of this memory
                let mine = whole.slice(kept);
                memory.copy_to(0, &mine, to_device)?;
                if mine.len() == whole.len() {
                    return Ok(Arriving::Copy(to_device.record()?));
                }
                Ok(Arriving::Gather(group.all_gather(whole, &mine, to_device)?))
            }
        }
    }

    /// Copies a unit's new weights to the host, and frees their device memory.
    pub(crate) fn send_weights(&mut self, index: usize, whole: Buffer) -> Result<()> {
        let kept = self.resident_ranges(index).0;
        let unit = &mut self.units[index];
        let WeightsStorage::Host(memory) = &mut unit.storage else {
            unreachable!("the weights are on the host")
        };
        let to_host = &self.transfers.to_host;
        to_host.wait_stream(&self.compute)?;
        memory.copy_from(0, &whole.slice(kept), to_host)?;
        self.compute.wait_stream(to_host)?; // before the next user writes this memory
        self.gathered.put(&unit.layout, whole);
        Ok(())
    }
}

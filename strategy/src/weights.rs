//! A strategy's weights: what of them is resident, and how whole units come and go.

use std::ops::Range;

use anyroll_backends::{Buffer, DType, Stream, Work};
use anyroll_models::{Model, Unit, init::WeightSource};
use tch::{Kind, Tensor};

use crate::{
    Result, State, Zero, ZeroStage,
    config::ZeroConfig,
    layout::Layout,
    memory::{flat, param_views},
    offload::Movable,
    optimizer::MASTER,
};

/// Every weight of a model, whole: one list of tensors a unit.
pub type Weights = Vec<Vec<Tensor>>;

/// A unit's weights.
#[derive(Debug)]
pub(crate) struct UnitState {
    pub(crate) layout: Layout,
    /// Holds `resident`.
    pub(crate) memory: Movable,
    /// The whole unit below stage 3, this rank's shard at stage 3.
    pub(crate) resident: Buffer,
    /// The whole unit, while it is there.
    pub(crate) whole: Option<Whole>,
}

#[derive(Debug)]
pub(crate) struct Whole {
    buffer: Buffer,
    views: Vec<Tensor>,
    /// The gather that fills it, until somebody has waited for it.
    pub(crate) arriving: Option<Work>,
}

impl UnitState {
    /// All zero.
    pub(crate) fn new(unit: &Unit, world_size: usize, config: ZeroConfig, compute: &Stream) -> Result<Self> {
        let layout = Layout::new(unit, world_size);
        let is_whole = config.stage < ZeroStage::Zero3;
        let (len, dtype) = (layout.kept(config.stage, 0).len(), config.precision.dtype());
        let memory = Movable::zeros(format!("weights of {}", unit.name), compute, len * dtype.size_bytes())?;
        let resident = memory.buffer(0..len, dtype);
        let whole = if is_whole {
            let views = param_views(unit, &layout, &resident)?;
            Some(Whole { buffer: resident.clone(), views, arriving: None })
        } else {
            None
        };
        Ok(Self { layout, memory, resident, whole })
    }
}

impl<M: Model> Zero<M> {
    /// Every weight, whole, at this moment, in the strategy's precision: for generation, in which no rank waits
    /// for another. Below stage 3 these are the resident weights themselves, so a later step changes them.
    pub fn weights(&mut self) -> Result<Weights> {
        self.needs("weights", &[State::Params])?;
        let mut weights = Vec::with_capacity(self.units.len());
        for index in 0..self.units.len() {
            if self.config.stage >= ZeroStage::Zero3 {
                // Not from the pool: these tensors live as long as the caller wants.
                let unit = &mut self.units[index];
                unit.memory.ready(&self.compute)?;
                let buffer = Buffer::zeros(&self.compute, unit.layout.len, unit.resident.dtype())?;
                self.group.all_gather(&buffer, &unit.resident, &self.compute)?.wait_stream(&self.compute)?;
                weights.push(param_views(&self.model.units()[index], &unit.layout, &buffer)?);
            } else {
                self.fetch(index)?;
                let whole = self.units[index].whole.as_ref().expect("fetched");
                weights.push(whole.views.iter().map(Tensor::shallow_clone).collect());
            }
        }
        Ok(weights)
    }

    /// Takes over the weights of `other`, a strategy of the same model on the same ranks, whatever its stage and
    /// precision.
    pub fn copy_weights_from(&mut self, other: &mut Self) -> Result<()> {
        self.set_from(other, "copy_weights_from", |_, theirs| Ok(theirs))
    }

    /// Moves every weight `share` of its way to that of `other`: an exponential moving average keeps the rest, and at
    /// 1 it is a copy. As [`Self::copy_weights_from`] otherwise; small moves need fp32.
    pub fn move_towards(&mut self, other: &mut Self, share: f64) -> Result<()> {
        self.set_from(other, "move_towards", |own, theirs| {
            Ok(own.f_to_kind(Kind::Float)?.f_lerp(&theirs.f_to_kind(Kind::Float)?, share)?)
        })
    }

    /// Sets the weights to what `mix` makes of this rank's shards of its own and of `other`'s.
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
            let mixed = mix(self.own_weights(index)?, other.own_weights(index)?)?;
            let unit = &self.units[index];
            let whole = Buffer::zeros(&self.compute, unit.layout.len, DType::F32)?;
            let mine = whole.slice(unit.layout.shard(self.group.rank()));
            flat(&mine)?.f_copy_(&mixed)?;
            self.group.all_gather(&whole, &mine, &self.compute)?.wait_stream(&self.compute)?;
            self.set_unit(index, &flat(&whole)?)?;
        }
        Ok(())
    }

    /// Fills the weights from `source`, of which only what this rank keeps is read.
    pub(crate) fn init_weights(&mut self, source: &dyn WeightSource) -> Result<()> {
        let model = self.model.clone();
        for (index, unit) in model.units().iter().enumerate() {
            let (kept, _) = self.kept_ranges(index);
            let mut values = vec![0.0; kept.len()];
            for (spec, param) in unit.params.iter().zip(&self.units[index].layout.params) {
                let (start, end) = (param.start.max(kept.start), param.end.min(kept.end));
                if start < end {
                    let values = &mut values[start - kept.start..end - kept.start];
                    source.read(spec, start - param.start..end - param.start, values)?;
                }
            }
            self.set_kept(index, &Tensor::f_from_slice(&values)?)?;
        }
        Ok(())
    }
}

/// A part of a unit's states, fp32.
#[derive(Debug)]
pub(crate) enum Part {
    Device(Buffer),
    /// A row on the host.
    Host(Tensor),
}

impl Part {
    /// Its elements.
    pub(crate) fn len(&self) -> usize {
        match self {
            Self::Device(buffer) => buffer.len(),
            Self::Host(tensor) => tensor.numel(),
        }
    }
}

/// What checkpoints read and write.
impl<M: Model> Zero<M> {
    /// As [`Self::own_weights`], where they lie if they are fp32.
    pub(crate) fn saved_weights(&mut self, index: usize) -> Result<Part> {
        let compute = self.compute.clone();
        let shard = self.units[index].layout.shard(self.group.rank());
        if let Some(state) = self.state_mut(index)
            && state.master.is_some()
        {
            state.home.ready(&compute)?;
            return state.part(MASTER, &shard);
        }
        let weights = self.own_weights(index)?;
        let resident = &self.units[index].resident;
        if resident.dtype() == DType::F32 {
            let is_shard = resident.len() == shard.len();
            return Ok(Part::Device(if is_shard { resident.clone() } else { resident.slice(shard) }));
        }
        let wide = Buffer::zeros(&self.compute, shard.len(), DType::F32)?;
        flat(&wide)?.f_copy_(&weights)?;
        Ok(Part::Device(wide))
    }

    /// This rank's shard of a unit's weights, as exact as there are any.
    pub(crate) fn own_weights(&mut self, index: usize) -> Result<Tensor> {
        let shard = self.units[index].layout.shard(self.group.rank());
        let compute = self.compute.clone();
        if let Some(state) = self.state_mut(index)
            && let Some(master) = &state.master
        {
            state.home.ready(&compute)?;
            let start = shard.start - state.range.start;
            return Ok(master.f_narrow(0, start as i64, shard.len() as i64)?);
        }
        if self.config.stage >= ZeroStage::Zero3 {
            self.units[index].memory.ready(&self.compute)?;
            return flat(&self.units[index].resident);
        }
        self.fetch(index)?;
        flat(&self.units[index].resident.slice(shard))
    }

    /// The part of a unit that this rank keeps, of its weights and of its moments.
    pub(crate) fn kept_ranges(&self, index: usize) -> (Range<usize>, Option<Range<usize>>) {
        let layout = &self.units[index].layout;
        let weights = layout.kept(self.config.stage, self.group.rank());
        let state = self.training.as_ref().and_then(|training| training.states[index].as_ref());
        (weights, state.map(|state| state.range.clone()))
    }

    /// Sets the part of a unit that this rank keeps, and the master, which lies in it.
    pub(crate) fn set_kept(&mut self, index: usize, kept: &Tensor) -> Result<()> {
        let (kept_range, _) = self.kept_ranges(index);
        self.units[index].memory.ready(&self.compute)?;
        flat(&self.units[index].resident)?.f_copy_(kept)?;
        let compute = self.compute.clone();
        if let Some(state) = self.state_mut(index)
            && let Some(master) = &mut state.master
        {
            state.home.ready(&compute)?;
            let start = state.range.start - kept_range.start;
            master.f_copy_(&kept.f_narrow(0, start as i64, state.range.len() as i64)?)?;
        }
        Ok(())
    }

    /// Sets a unit's weights from its whole flat buffer.
    fn set_unit(&mut self, index: usize, whole: &Tensor) -> Result<()> {
        let (kept, _) = self.kept_ranges(index);
        self.set_kept(index, &whole.f_narrow(0, kept.start as i64, kept.len() as i64)?)
    }
}

/// Weights that come and go.
impl<M: Model> Zero<M> {
    /// Makes a block's weights ready for the compute stream, and starts on those of `next`.
    pub(crate) fn enter(&mut self, block: usize, next: Option<usize>) -> Result<()> {
        let model = self.model.clone();
        for &unit in model.units_of(block) {
            self.fetch(unit)?;
        }
        for &unit in next.map_or(&[][..], |next| model.units_of(next)) {
            self.start_gather(unit)?;
        }
        Ok(())
    }

    /// Lets a block's weights go (stage 3), except those that one of the blocks `soon` needs, too.
    pub(crate) fn leave(&mut self, block: usize, soon: Range<usize>) -> Result<()> {
        if self.config.stage < ZeroStage::Zero3 {
            return Ok(());
        }
        let model = self.model.clone();
        for &unit in model.units_of(block) {
            let needed = soon.clone().any(|other| model.units_of(other).contains(&unit));
            if !needed && let Some(whole) = self.units[unit].whole.take() {
                self.gathered.put(&self.units[unit].layout, whole.buffer);
            }
        }
        Ok(())
    }

    /// The views of a block's weights; the block was entered.
    pub(crate) fn views(&self, block: usize) -> Vec<&[Tensor]> {
        let whole = |&unit: &usize| &*self.units[unit].whole.as_ref().expect("the block was entered").views;
        self.model.units_of(block).iter().map(whole).collect()
    }

    /// Orders compute after what still fills the weights, and drops gathered ones.
    pub(crate) fn settle_weights(&mut self) -> Result<()> {
        for index in 0..self.units.len() {
            if self.units[index].whole.as_ref().is_some_and(|whole| whole.arriving.is_some()) {
                self.fetch(index)?;
            }
        }
        self.gathered.clear();
        Ok(())
    }

    fn fetch(&mut self, index: usize) -> Result<()> {
        self.start_gather(index)?;
        let whole = self.units[index].whole.as_mut().expect("started");
        if let Some(work) = whole.arriving.take() {
            work.wait_stream(&self.compute)?;
        }
        Ok(())
    }

    /// Starts to gather a unit that is not whole here; below stage 3 every unit is.
    fn start_gather(&mut self, index: usize) -> Result<()> {
        let unit = &mut self.units[index];
        unit.memory.ready(&self.compute)?;
        if unit.whole.is_none() {
            let buffer = self.gathered.take(&unit.layout, unit.resident.dtype())?;
            let views = param_views(&self.model.units()[index], &unit.layout, &buffer)?;
            let arriving = Some(self.group.all_gather(&buffer, &unit.resident, &self.compute)?);
            unit.whole = Some(Whole { buffer, views, arriving });
        }
        Ok(())
    }
}

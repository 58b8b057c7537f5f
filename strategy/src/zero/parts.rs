//! Units that several ranks hold together, each its [`Cut`] of the parameters, and the whole units that
//! callers and checkpoints see. A tensor group holds all units together. With spread experts, a unit of the whole model is one
//! that each rank has without experts, and one of its experts.

use std::ops::Range;

use anyroll_backends::Buffer;
use anyroll_models::{
    Cut, Model, ParamSpec, Run,
    init::{self, WeightSource},
};
use tch::{Device, Kind, Tensor};

use super::Zero;
use crate::{
    Result,
    layout::Layout,
    memory::{flat, param_views},
    optimizer::Part,
};

impl<M: Model> Zero<M> {
    /// Returns true if a unit of the whole model has parts on several ranks.
    pub(crate) fn is_joined(&self, index: usize) -> bool {
        self.parts[index].iter().any(|&part| self.units[part].holders.is_some())
    }

    /// Returns the layout of a unit of the whole model, as checkpoints have it.
    pub(crate) fn whole_layout(&self, index: usize) -> Layout {
        match self.is_joined(index) {
            false => self.units[index].layout.clone(),
            true => Layout::new(&self.model.units()[index], self.mesh.world().world_size()),
        }
    }

    /// Joins what the ranks have of a unit of the whole model. `parts` are this rank's, laid out for itself. Returns the whole
    /// unit, in new memory if [`Self::is_joined`]. Every rank calls.
    pub(crate) fn join_parts(&self, index: usize, mut parts: Vec<Buffer>) -> Result<Buffer> {
        if !self.is_joined(index) {
            return Ok(parts.swap_remove(0));
        }
        let layout = self.whole_layout(index);
        let joined = Buffer::zeros(&self.compute, layout.len, parts[0].dtype())?;
        let whole = param_views(&self.model.units()[index], &layout, &joined)?;
        for (&part, own) in self.parts[index].iter().zip(parts) {
            self.join_part(part, own, &whole)?;
        }
        Ok(joined)
    }

    /// Writes what the ranks have of the parameters of this rank's unit `index`, `own` on this one, to the whole ones.
    fn join_part(&self, index: usize, own: Buffer, whole: &[Tensor]) -> Result<()> {
        let unit = &self.units[index];
        let ranks = unit.holders.as_ref().map_or(1, |holders| holders.world_size());
        let len = own.len();
        let all = match &unit.holders {
            None => own,
            Some(holders) => {
                let all = Buffer::zeros(&self.compute, len * ranks, own.dtype())?;
                holders.all_gather(&all, &own, &self.compute)?.wait_stream(&self.compute)?;
                all
            }
        };
        for rank in 0..ranks {
            let part = all.slice(rank * len..(rank + 1) * len);
            let parts = param_views(&self.own.units()[index], &unit.layout, &part)?;
            for (param, part) in parts.iter().enumerate() {
                let place = self.own.whole_place(index, param).1;
                self.own.cut_on(rank, index, param).put(part, &whole[place])?;
            }
        }
        Ok(())
    }

    /// Returns the part that this rank saves of a whole unit's state, which is `own` in the shards of this rank's parts: on the
    /// host, since the device has no room for another copy of all states. Every rank calls.
    pub(super) fn saved_of_whole(&self, index: usize, own: &[Tensor]) -> Result<Part> {
        let parts = self.parts[index].iter().zip(own).map(|(&part, own)| self.gather_shards(part, own));
        let whole = self.join_parts(index, parts.collect::<Result<_>>()?)?;
        let saved = flat(&whole.slice(self.saved_range(index)))?;
        Ok(Part::Host(saved.f_to_device_(Device::Cpu, Kind::Float, false, true)?))
    }

    /// Returns where the elements of this rank's unit are in the unit of the whole model, in the order of both.
    pub(crate) fn unit_runs(&self, index: usize) -> Vec<Run> {
        let (own, (unit, _)) = (&self.units[index].layout, self.own.whole_place(index, 0));
        if !self.is_joined(unit) {
            return vec![Run { own: 0, whole: 0, len: own.len }];
        }
        let whole = self.whole_layout(unit);
        let of_param = |param: usize| {
            let place = self.own.whole_place(index, param).1;
            let (own, whole) = (own.params[param].start, whole.params[place].start);
            let runs = self.own_cut(index, param).runs(&self.whole_spec(index, param).shape);
            runs.into_iter().map(move |run| Run { own: own + run.own, whole: whole + run.whole, ..run })
        };
        (0..own.params.len()).flat_map(of_param).collect()
    }

    /// Returns the elements of this rank's shard of a unit, counted from its start, that no rank before it in the tensor group
    /// has, too.
    pub(crate) fn first_elements(&self, index: usize) -> Vec<Range<usize>> {
        let layout = &self.units[index].layout;
        let shard = self.units[index].shard();
        let mut found: Vec<Range<usize>> = Vec::new();
        let Some(group) = self.mesh.tensor.as_ref().filter(|group| group.rank() > 0) else {
            found.push(0..shard.len());
            return found;
        };
        for (param, spec) in self.model.units()[index].params.iter().enumerate() {
            let cut = |rank: usize| self.own.cut_on(rank, index, param);
            let first = cut(group.rank()).first_elements(Some(&cut(group.rank() - 1)), &spec.shape);
            let start = layout.params[param].start;
            for range in first {
                let (from, to) = ((start + range.start).max(shard.start), (start + range.end).min(shard.end));
                match found.last_mut() {
                    _ if from >= to => {}
                    Some(last) if last.end + shard.start == from => last.end = to - shard.start,
                    _ => found.push(from - shard.start..to - shard.start),
                }
            }
        }
        found
    }

    /// Reads the values `range` of this rank's part of a parameter.
    pub(super) fn read_part(
        &self,
        source: &dyn WeightSource,
        (index, param): (usize, usize),
        range: Range<usize>,
        values: &mut [f32],
    ) -> Result<()> {
        let spec = self.whole_spec(index, param);
        match &self.units[index].holders {
            None => source.read(spec, range, values)?,
            Some(_) => init::read_part(source, (spec, &self.own_cut(index, param)), range, values)?,
        }
        Ok(())
    }

    /// Returns the whole parameter that this rank has a part of.
    fn whole_spec(&self, index: usize, param: usize) -> &ParamSpec {
        let (unit, place) = self.own.whole_place(index, param);
        &self.model.units()[unit].params[place]
    }

    /// Returns this rank's part of a parameter.
    fn own_cut(&self, index: usize, param: usize) -> Cut {
        let rank = self.units[index].holders.as_ref().map_or(0, |holders| holders.rank());
        self.own.cut_on(rank, index, param)
    }
}

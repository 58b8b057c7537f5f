//! Units that a tensor group holds together: each rank's [`Cut`](anyroll_models::Cut) of every parameter, and the whole units
//! that callers see.

use std::ops::Range;

use anyroll_backends::Buffer;
use anyroll_models::{
    Model, Run,
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
    /// Returns true if ranks hold the model together.
    pub(crate) fn is_split(&self) -> bool {
        self.mesh.tensor.is_some()
    }

    /// Returns the layout of a unit of the whole model, as checkpoints have it.
    pub(crate) fn whole_layout(&self, index: usize) -> Layout {
        match self.is_split() {
            false => self.units[index].layout.clone(),
            true => Layout::new(&self.model.units()[index], self.mesh.world().world_size()),
        }
    }

    /// Joins the parts that the ranks of the tensor group have of a unit. `own` is this rank's, laid out for itself. Returns
    /// the whole unit in new memory. Every rank calls.
    pub(crate) fn join_parts(&self, index: usize, own: &Buffer) -> Result<Buffer> {
        let Some(group) = &self.mesh.tensor else { return Ok(own.clone()) };
        let (unit, layout) = (&self.model.units()[index], self.whole_layout(index));
        let all = Buffer::zeros(&self.compute, own.len() * group.world_size(), own.dtype())?;
        group.all_gather(&all, own, &self.compute)?.wait_stream(&self.compute)?;
        let joined = Buffer::zeros(&self.compute, layout.len, own.dtype())?;
        let whole = param_views(unit, &layout, &joined)?;
        for rank in 0..group.world_size() {
            let part = all.slice(rank * own.len()..(rank + 1) * own.len());
            let parts = param_views(&self.own.units()[index], &self.units[index].layout, &part)?;
            for (param, (part, whole)) in parts.iter().zip(&whole).enumerate() {
                self.own.cut_on(rank, index, param).put(part, whole)?;
            }
        }
        Ok(joined)
    }

    /// Returns the part that this rank saves of a whole unit's state, whose shard on this rank is `own`: on the host, since the
    /// device has no room for another copy of all states. Every rank calls.
    pub(super) fn saved_of_whole(&self, index: usize, own: &Tensor) -> Result<Part> {
        let whole = self.join_parts(index, &self.gather_shards(index, own)?)?;
        let saved = flat(&whole.slice(self.saved_range(index)))?;
        Ok(Part::Host(saved.f_to_device_(Device::Cpu, Kind::Float, false, true)?))
    }

    /// Returns where the elements of this rank's unit are in the whole one, in the order of both.
    pub(crate) fn unit_runs(&self, index: usize) -> Vec<Run> {
        let own = &self.units[index].layout;
        let Some(group) = &self.mesh.tensor else { return vec![Run { own: 0, whole: 0, len: own.len }] };
        let (unit, whole) = (&self.model.units()[index], self.whole_layout(index));
        let of_param = |(param, spec): (usize, &anyroll_models::ParamSpec)| {
            let (own, whole) = (own.params[param].start, whole.params[param].start);
            let runs = self.own.cut_on(group.rank(), index, param).runs(&spec.shape);
            runs.into_iter().map(move |run| Run { own: own + run.own, whole: whole + run.whole, ..run })
        };
        unit.params.iter().enumerate().flat_map(of_param).collect()
    }

    /// Returns the elements of this rank's shard of a unit, counted from its start, that no rank before it in the tensor group
    /// has, too.
    pub(crate) fn first_elements(&self, index: usize) -> Vec<Range<usize>> {
        let layout = &self.units[index].layout;
        let shard = layout.shard(self.group.rank());
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
        let spec = &self.model.units()[index].params[param];
        match &self.mesh.tensor {
            None => source.read(spec, range, values)?,
            Some(group) => {
                let cut = self.own.cut_on(group.rank(), index, param);
                init::read_part(source, (spec, &cut), range, values)?;
            }
        }
        Ok(())
    }
}

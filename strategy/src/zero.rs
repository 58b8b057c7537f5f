//! [`Zero`]: one implementation of the ZeRO stages. A stage is a comparison, in four places: what is allocated,
//! what is gathered before a block, what follows its backward, and what the optimizer steps.
//!
//! A step, in phases:
//! 1. For each micro-batch, forward through the blocks, each block's weights gathered just before it (stage 3)
//!    while the block before it runs.
//! 2. The caller turns the head's log-probs into their gradient.
//! 3. Backward through the blocks. When the last block that reads a unit is through, the unit's gradient is
//!    reduced on the communication stream, while the next block's backward runs: reduce-scatter, summed in rank
//!    order, and at stage 0 an all-gather of the result. The reduced gradient is added to an fp32 accumulator.
//! 4. The global norm, from each rank's own shard in fp64; the clipping factor stays on the device.
//! 5. AdamW on what this rank owns; at stages 1 and 2 the new weights are gathered, waited for at their first use.
//!
//! Shards, the order of summation and the norm are the same at every stage, and so are the results, to the bit.

use std::{collections::VecDeque, ops::Range, sync::Arc};

use anyroll_backends::{Buffer, CollectiveGroup, DType, Device, ReduceOp, Stream, Work, ops};
use anyroll_models::{Grads, Model, Output, OutputGrad, Saved, UnitGrads, init, model::Scores};
use tch::{Kind, Tensor};

use crate::{
    AdamW, Error, Result, StepStats, ZeroStage,
    layout::Layout,
    memory::{Pool, flat, param_views},
    optimizer::OptimizerState,
};

/// A model's weights on this rank, and all that training adds to them.
#[derive(Debug)]
pub struct Zero<M: Model> {
    model: Arc<M>,
    stage: ZeroStage,
    group: CollectiveGroup,
    compute: Stream,
    units: Vec<UnitState>,
    gathered: Pool,
    training: Option<Training>,
}

/// Every weight of a model, whole: one list of tensors a unit.
pub type Weights = Vec<Vec<Tensor>>;

/// A unit's weights.
#[derive(Debug)]
struct UnitState {
    layout: Layout,
    /// The whole unit below stage 3, this rank's shard at stage 3.
    resident: Buffer,
    /// The whole unit, while it is there.
    whole: Option<Whole>,
}

#[derive(Debug)]
struct Whole {
    buffer: Buffer,
    views: Vec<Tensor>,
    /// The gather that fills it, until somebody has waited for it.
    arriving: Option<Work>,
}

#[derive(Debug)]
struct Training {
    adamw: AdamW,
    step: u64,
    states: Vec<OptimizerState>,
    gradients: Pool,
    /// Gradients that blocks write in the current micro-batch.
    writing: Vec<Option<(Buffer, UnitGrads)>>,
    /// Gradients on their way through a reduction, oldest first.
    reducing: VecDeque<(usize, Buffer, Work)>,
    /// Whether the accumulators hold something of the current step.
    accumulated: bool,
}

impl<M: Model> Zero<M> {
    /// Fills the model's weights from `seed` and, with `adamw`, makes it trainable. The ranks of `group` each
    /// hold their part.
    pub fn new(
        model: Arc<M>,
        stage: ZeroStage,
        adamw: Option<AdamW>,
        device: &Arc<dyn Device>,
        group: CollectiveGroup,
        seed: u64,
    ) -> Result<Self> {
        let compute = Stream::torch(device)?;
        let mut units = Vec::with_capacity(model.units().len());
        for unit in model.units() {
            let layout = Layout::new(unit, group.world_size());
            let resident_len = if stage >= ZeroStage::Zero3 { layout.shard_len() } else { layout.len };
            let resident = Buffer::zeros(&compute, resident_len, DType::F32)?;
            let whole = if stage >= ZeroStage::Zero3 {
                None
            } else {
                let views = param_views(unit, &layout, &resident)?;
                Some(Whole { buffer: resident.clone(), views, arriving: None })
            };
            units.push(UnitState { layout, resident, whole });
        }
        let gathered = Pool::new(&compute, DType::F32);
        let mut zero = Self { model, stage, group, compute, units, gathered, training: None };
        for index in 0..zero.units.len() {
            let mut whole = vec![0.0; zero.units[index].layout.len];
            for (spec, range) in zero.model.units()[index].params.iter().zip(&zero.units[index].layout.params)
            {
                whole[range.clone()].copy_from_slice(&init::fill(spec, seed));
            }
            zero.set_unit(index, &Tensor::f_from_slice(&whole)?)?;
        }
        zero.training = adamw.map(|adamw| zero.training_state(adamw)).transpose()?;
        Ok(zero)
    }

    /// The model.
    pub fn model(&self) -> &Arc<M> {
        &self.model
    }

    /// The ranks that share it.
    pub fn group(&self) -> &CollectiveGroup {
        &self.group
    }

    /// Optimizer steps done since the optimizer was made.
    pub fn steps_done(&self) -> u64 {
        self.training.as_ref().map_or(0, |training| training.step)
    }

    /// Forward and backward of one micro-batch; its gradient is added to those of the step. `loss` turns the
    /// head's scores into the gradient of the loss, which the ranks' micro-batches add up to: it has divided by
    /// the global count. Every rank calls this equally often.
    pub fn accumulate(
        &mut self,
        batch: &M::Batch,
        loss: impl FnOnce(&Scores) -> Result<OutputGrad>,
    ) -> Result<()> {
        self.trainable("accumulate")?;
        let (scores, mut saved) = self.forward(batch, true)?;
        let mut grad = loss(&scores)?;
        for block in (0..self.model.blocks()).rev() {
            let kept = saved.pop().expect("forward saved something for every block");
            let Some(below) = self.backward_block(block, batch, kept, grad)? else { break };
            grad = OutputGrad::Hidden(below);
        }
        self.settle(0)?;
        self.training_mut().accumulated = true;
        Ok(())
    }

    /// One optimizer step with the gradients accumulated since the last one.
    ///
    /// # Errors
    /// [`Error::NonFiniteGradient`], with the weights unchanged, comes from [`Self::finish_step`].
    pub fn step(&mut self, learning_rate: f64) -> Result<StepStats> {
        self.trainable("step")?;
        assert!(self.training_mut().accumulated, "a step needs the gradient of at least one micro-batch");
        let grad_norm = self.global_norm()?;
        let max_norm = self.training_mut().adamw.max_grad_norm;
        // As torch.nn.utils.clip_grad_norm_: max_norm / (norm + 1e-6), at most 1. NaN stays NaN: AdamW skips it.
        let room = if max_norm.is_finite() {
            (&grad_norm + 1e-6).f_reciprocal()? * max_norm
        } else {
            &grad_norm * 0.0 + 1.0
        };
        let scale = room.f_clamp_max(1.0)?.f_to_kind(Kind::Float)?;
        for index in 0..self.units.len() {
            self.step_unit(index, &scale, learning_rate)?;
        }
        let training = self.training_mut();
        training.step += 1;
        training.accumulated = false;
        Ok(StepStats { grad_norm })
    }

    /// Waits for a step, and checks it.
    ///
    /// # Errors
    /// The group's failure, or [`Error::NonFiniteGradient`]; the weights are then those before the step.
    pub fn finish_step(&self, stats: &StepStats) -> Result<f64> {
        let grad_norm = stats.grad_norm()?;
        self.group.check()?;
        if !grad_norm.is_finite() {
            return Err(Error::NonFiniteGradient { step: self.steps_done(), grad_norm });
        }
        Ok(grad_norm)
    }

    /// The head's scores of a batch, without a gradient.
    pub fn score(&mut self, batch: &M::Batch) -> Result<Scores> {
        Ok(self.forward(batch, false)?.0)
    }

    /// Every weight, whole, at this moment: for generation, in which no rank waits for another. Below stage 3
    /// these are the resident weights themselves, so a later step changes them.
    pub fn weights(&mut self) -> Result<Weights> {
        let mut weights = Vec::with_capacity(self.units.len());
        for index in 0..self.units.len() {
            if self.stage >= ZeroStage::Zero3 {
                // Not from the pool: these tensors live as long as the caller wants.
                let unit = &self.units[index];
                let buffer = Buffer::zeros(&self.compute, unit.layout.len, DType::F32)?;
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

    /// Takes over the weights of `other`, a strategy of the same model on the same ranks, whatever its stage.
    pub fn copy_weights_from(&mut self, other: &mut Self) -> Result<()> {
        for index in 0..self.units.len() {
            let own = other.own_weights(index)?;
            let unit = &self.units[index];
            let whole = Buffer::zeros(&self.compute, unit.layout.len, DType::F32)?;
            let mine = whole.slice(unit.layout.shard(self.group.rank()));
            flat(&mine)?.f_copy_(&own)?;
            self.group.all_gather(&whole, &mine, &self.compute)?.wait_stream(&self.compute)?;
            self.set_unit(index, &flat(&whole)?)?;
        }
        Ok(())
    }

    /// Starts a new optimizer with fresh states: for the next phase of a run.
    pub fn reset_optimizer(&mut self, adamw: AdamW) -> Result<()> {
        self.training = None; // first, so that old and new states are not held at once
        self.training = Some(self.training_state(adamw)?);
        Ok(())
    }
}

/// What checkpoints read and write.
impl<M: Model> Zero<M> {
    pub(crate) fn layouts(&self) -> impl Iterator<Item = &Layout> {
        self.units.iter().map(|unit| &unit.layout)
    }

    /// This rank's shard of a unit's weights.
    pub(crate) fn own_weights(&mut self, index: usize) -> Result<Tensor> {
        let shard = self.units[index].layout.shard(self.group.rank());
        if self.stage >= ZeroStage::Zero3 {
            return flat(&self.units[index].resident);
        }
        self.fetch(index)?;
        flat(&self.units[index].resident.slice(shard))
    }

    /// This rank's shards of a unit's moments.
    pub(crate) fn own_moments(&self, index: usize) -> Result<Option<[Tensor; 2]>> {
        let Some(training) = &self.training else { return Ok(None) };
        let state = &training.states[index];
        let shard = self.units[index].layout.shard(self.group.rank());
        let part = |tensor: &Tensor| {
            tensor.f_narrow(0, (shard.start - state.range.start) as i64, shard.len() as i64)
        };
        Ok(Some([part(&state.exp_avg)?, part(&state.exp_avg_sq)?]))
    }

    /// The part of a unit that this rank keeps, of its weights and of its moments.
    pub(crate) fn kept_ranges(&self, index: usize) -> (Range<usize>, Option<Range<usize>>) {
        let layout = &self.units[index].layout;
        let weights =
            if self.stage >= ZeroStage::Zero3 { layout.shard(self.group.rank()) } else { 0..layout.len };
        (weights, self.training.as_ref().map(|training| training.states[index].range.clone()))
    }

    pub(crate) fn restore_weights(&mut self, index: usize, values: &[f32]) -> Result<()> {
        flat(&self.units[index].resident)?.f_copy_(&Tensor::f_from_slice(values)?)?;
        Ok(())
    }

    pub(crate) fn restore_moments(
        &mut self,
        index: usize,
        exp_avg: &[f32],
        exp_avg_sq: &[f32],
    ) -> Result<()> {
        let state = &mut self.training_mut().states[index];
        state.exp_avg.f_copy_(&Tensor::f_from_slice(exp_avg)?)?;
        state.exp_avg_sq.f_copy_(&Tensor::f_from_slice(exp_avg_sq)?)?;
        Ok(())
    }

    pub(crate) fn restore_step(&mut self, step: u64) {
        if let Some(training) = &mut self.training {
            training.step = step;
        }
    }
}

/// The phases of a micro-batch.
impl<M: Model> Zero<M> {
    fn forward(&mut self, batch: &M::Batch, save: bool) -> Result<(Scores, Vec<Saved>)> {
        let model = self.model.clone();
        let last = model.blocks() - 1;
        let mut saved = Vec::with_capacity(model.blocks());
        let mut x = None;
        for block in 0..last {
            self.enter(block, (block < last).then_some(block + 1))?;
            let (output, kept) = self.run_forward(block, x.as_ref(), batch, save)?;
            let Output::Hidden(hidden) = output else { unreachable!("only the last block has scores") };
            x = Some(hidden);
            saved.push(kept);
            self.leave(block, block + 1..last + 1)?;
        }
        self.enter(last, None)?;
        let (output, kept) = self.run_forward(last, x.as_ref(), batch, save)?;
        saved.push(kept);
        if !save {
            self.leave(last, 0..0)?;
        }
        let Output::Scores(scores) = output else { unreachable!("the last block has scores") };
        Ok((scores, saved))
    }

    fn run_forward(
        &self,
        block: usize,
        x: Option<&Tensor>,
        batch: &M::Batch,
        save: bool,
    ) -> Result<(Output, Saved)> {
        let views: Vec<&[Tensor]> = self.views(block);
        Ok(self.model.forward(block, &anyroll_models::Weights::new(&views), x, batch, save)?)
    }

    fn backward_block(
        &mut self,
        block: usize,
        batch: &M::Batch,
        saved: Saved,
        grad: OutputGrad,
    ) -> Result<Option<Tensor>> {
        self.enter(block, block.checked_sub(1))?;
        let model = self.model.clone();
        let mut training = self.training.take().expect("checked by `accumulate`");
        for &unit in model.units_of(block) {
            training.open_gradient(unit, &model.units()[unit], &self.units[unit].layout)?;
        }
        let views = self.views(block);
        let mut grads = Grads::new(training.writing_of(model.units_of(block)));
        let below =
            model.backward(block, &anyroll_models::Weights::new(&views), &mut grads, saved, grad, batch);
        self.training = Some(training);
        let below = below?;
        for &unit in model.units_of(block) {
            if first_reader(&*model, unit) == block {
                self.reduce(unit)?;
            }
        }
        self.leave(block, 0..block)?;
        Ok(below)
    }

    /// Sends a unit's gradient on its way, and takes in older ones.
    fn reduce(&mut self, index: usize) -> Result<()> {
        let (buffer, grads) = self.training_mut().writing[index].take().expect("a gradient was opened");
        assert!(grads.all_written(), "a block left a gradient of unit {index} unwritten");
        let shard = buffer.slice(self.units[index].layout.shard(self.group.rank()));
        let work = self.group.reduce_scatter(&shard, &buffer, ReduceOp::Sum, &self.compute)?;
        let work = if self.stage >= ZeroStage::Zero1 {
            work
        } else {
            // On the same stream, so after the reduction, whose Work is not waited for.
            self.group.all_gather(&buffer, &shard, self.group.stream())?
        };
        self.training_mut().reducing.push_back((index, buffer, work));
        // From stage 2 on whole gradients are scarce: one may be in flight while the next is written.
        let in_flight = if self.stage >= ZeroStage::Zero2 { 1 } else { usize::MAX };
        self.settle(in_flight)
    }

    /// Adds reduced gradients to the accumulators, until at most `in_flight` are left.
    fn settle(&mut self, in_flight: usize) -> Result<()> {
        let compute = self.compute.clone();
        let training = self.training.as_mut().expect("public calls check that there is an optimizer");
        while training.reducing.len() > in_flight {
            let (index, buffer, work) = training.reducing.pop_front().expect("not empty");
            work.wait_stream(&compute)?;
            let state = &mut training.states[index];
            let reduced = flat(&buffer.slice(state.range.clone()))?;
            if training.accumulated {
                drop(state.gradient.f_add_(&reduced)?);
            } else {
                state.gradient.f_copy_(&reduced)?;
            }
            training.gradients.put(&self.units[index].layout, buffer);
        }
        Ok(())
    }

    /// The norm of the whole gradient, fp64, one element, on the device. Each rank squares its own shard, at
    /// every stage, and the partial sums are added in rank order.
    fn global_norm(&mut self) -> Result<Tensor> {
        let (rank, world_size) = (self.group.rank(), self.group.world_size());
        let training = self.training.as_ref().expect("checked by `step`");
        let mut partial = Vec::with_capacity(self.units.len());
        for (unit, state) in self.units.iter().zip(&training.states) {
            let shard = unit.layout.shard(rank);
            let start = shard.start - state.range.start;
            partial.push(ops::sum_of_squares(&state.gradient.f_narrow(
                0,
                start as i64,
                shard.len() as i64,
            )?)?);
        }
        let partial = Tensor::f_stack(&partial, 0)?.f_sum(Kind::Double)?;
        // Collectives have no fp64: the sums travel as bytes.
        const BYTES: usize = size_of::<f64>();
        let all = Buffer::zeros(&self.compute, world_size * BYTES, DType::U8)?;
        let mine = all.slice(rank * BYTES..(rank + 1) * BYTES);
        flat(&mine)?.f_view_dtype(Kind::Double)?.f_copy_(&partial)?;
        self.group.all_gather(&all, &mine, &self.compute)?.wait_stream(&self.compute)?;
        let sums = flat(&all)?.f_view_dtype(Kind::Double)?;
        let mut total = sums.f_select(0, 0)?.copy();
        for other in 1..world_size as i64 {
            total = total.f_add(&sums.f_select(0, other)?)?;
        }
        Ok(total.f_sqrt()?)
    }

    fn step_unit(&mut self, index: usize, scale: &Tensor, learning_rate: f64) -> Result<()> {
        let unit = &self.units[index];
        let resident = &unit.resident;
        let training = self.training.as_mut().expect("checked by `step`");
        let state = &mut training.states[index];
        let owned = if resident.len() == state.range.len() {
            resident.clone()
        } else {
            resident.slice(state.range.clone())
        };
        state.step(&flat(&owned)?, scale, &training.adamw, learning_rate, training.step + 1)?;
        if self.stage >= ZeroStage::Zero1 && self.stage < ZeroStage::Zero3 {
            let work = self.group.all_gather(resident, &owned, &self.compute)?;
            self.units[index].whole.as_mut().expect("resident below stage 3").arriving = Some(work);
        }
        Ok(())
    }
}

/// Weights that come and go.
impl<M: Model> Zero<M> {
    /// Makes a block's weights ready for the compute stream, and starts on those of `next`.
    fn enter(&mut self, block: usize, next: Option<usize>) -> Result<()> {
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
    fn leave(&mut self, block: usize, soon: Range<usize>) -> Result<()> {
        if self.stage < ZeroStage::Zero3 {
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
        if unit.whole.is_none() {
            let buffer = self.gathered.take(&unit.layout)?;
            let views = param_views(&self.model.units()[index], &unit.layout, &buffer)?;
            let arriving = Some(self.group.all_gather(&buffer, &unit.resident, &self.compute)?);
            unit.whole = Some(Whole { buffer, views, arriving });
        }
        Ok(())
    }

    fn views(&self, block: usize) -> Vec<&[Tensor]> {
        let whole = |&unit: &usize| &*self.units[unit].whole.as_ref().expect("the block was entered").views;
        self.model.units_of(block).iter().map(whole).collect()
    }

    /// Sets a unit's weights from its whole flat buffer.
    fn set_unit(&mut self, index: usize, whole: &Tensor) -> Result<()> {
        let (kept, _) = self.kept_ranges(index);
        let part = whole.f_narrow(0, kept.start as i64, kept.len() as i64)?;
        flat(&self.units[index].resident)?.f_copy_(&part)?;
        Ok(())
    }

    fn training_state(&self, adamw: AdamW) -> Result<Training> {
        let owned = |layout: &Layout| {
            let all = self.stage < ZeroStage::Zero1;
            if all { 0..layout.len } else { layout.shard(self.group.rank()) }
        };
        let states: Result<Vec<_>> =
            self.layouts().map(|layout| OptimizerState::new(layout, owned(layout), &self.compute)).collect();
        Ok(Training {
            adamw,
            step: 0,
            states: states?,
            gradients: Pool::new(&self.compute, DType::F32),
            writing: self.units.iter().map(|_| None).collect(),
            reducing: VecDeque::new(),
            accumulated: false,
        })
    }

    fn trainable(&self, call: &'static str) -> Result<()> {
        if self.training.is_some() { Ok(()) } else { Err(Error::Frozen { call }) }
    }

    fn training_mut(&mut self) -> &mut Training {
        self.training.as_mut().expect("public calls check that there is an optimizer")
    }
}

impl Training {
    /// Makes room for a unit's gradient of this micro-batch, unless an earlier block of it has.
    fn open_gradient(&mut self, index: usize, unit: &anyroll_models::Unit, layout: &Layout) -> Result<()> {
        if self.writing[index].is_none() {
            let buffer = self.gradients.take(layout)?;
            let views = param_views(unit, layout, &buffer)?;
            self.writing[index] = Some((buffer, UnitGrads::new(views)));
        }
        Ok(())
    }

    /// The open gradients of `units`, in that order.
    fn writing_of(&mut self, units: &[usize]) -> Vec<&mut UnitGrads> {
        let mut found: Vec<(usize, &mut UnitGrads)> = self
            .writing
            .iter_mut()
            .enumerate()
            .filter_map(|(index, open)| {
                let position = units.iter().position(|&unit| unit == index)?;
                Some((position, &mut open.as_mut()?.1))
            })
            .collect();
        found.sort_unstable_by_key(|(position, _)| *position);
        found.into_iter().map(|(_, grads)| grads).collect()
    }
}

/// The first block that reads a unit: the last one to write its gradient.
fn first_reader<M: Model>(model: &M, unit: usize) -> usize {
    (0..model.blocks()).find(|&block| model.units_of(block).contains(&unit)).expect("every unit has a reader")
}

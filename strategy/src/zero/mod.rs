//! [`Zero`]: one implementation of the ZeRO stages. A stage is a comparison, in four places: allocation, the
//! gather before a block, the reduction after its backward, and the optimizer step.
//!
//! The phases of a step:
//! 1. For each micro-batch, forward through the blocks. At stage 3 each block's weights are gathered while
//!    the block before it runs.
//! 2. The caller turns the head's log-probs into their gradient.
//! 3. Backward through the blocks. After the last block that reads a unit, the slices of the unit's gradient
//!    are sent to their owners, in the precision of the blocks. This runs on the communication stream, during
//!    the next block's backward. Each rank sums the slices it receives in fp32, in rank order, into an
//!    accumulator.
//! 4. With several replicas (hybrid sharding), the sum of their accumulators. Then the global norm, from each rank's own shard in fp64. The clipping factor, the fp16 loss scale and the
//!    step count stay on the device.
//! 5. At stage 0 a gather of the accumulated gradients. AdamW steps the part that this rank owns. At stages 1
//!    and 2 the new weights are gathered, and their first use waits for them.
//!
//! Shards, the order of summation and the norm are the same at every stage, so the results are bitwise equal.

mod four_bits;
mod offload;
mod parts;
mod weights;

use std::{collections::VecDeque, ops::Range, sync::Arc};

use anyroll_backends::{
    Buffer, CollectiveGroup, DType, Device, ReduceOp, Stream, Work,
    ops::{self, Store},
    profile::span,
};
use anyroll_models::{
    Grads, Model, Output, OutputGrad, Saved, Sharers, Unit, UnitGrads,
    init::{Seed, WeightSource},
};
use tch::{Kind, Tensor};

use crate::{
    AdamW, Error, Mesh, ParamsOn, Recompute, Result, State, StepStats, Stepped, StepsOn, ZeroConfig,
    ZeroStage,
    layout::Layout,
    loss_scale::{Counters, Scaler},
    memory::{Pool, flat, param_views},
    mesh::{measured_peers, peers},
    moments::{EXP_AVG, EXP_AVG_SQ, StepHyper},
    optimizer::{OptimizerState, Part},
    traffic::{Exchanged, Traffic},
    walk::{self, Visit, first_trained_block},
    weights::{Arriving, UnitState, WeightsStorage},
};
use offload::Transfers;

/// A model's weights on this rank, and the states that training adds.
#[derive(Debug)]
pub struct Zero<M: Model> {
    /// The whole model.
    model: Arc<M>,
    /// The part of it that this rank holds and runs: all of it, unless ranks hold it together.
    pub(crate) own: Arc<M>,
    pub(crate) config: ZeroConfig,
    pub(crate) mesh: Mesh,
    /// The ranks that run batches together with this one, if there are any.
    sharers: Option<Sharers>,
    pub(crate) compute: Stream,
    /// Rows that this rank sends to the experts of others.
    traffic: Arc<Traffic>,
    pub(crate) transfers: Transfers,
    /// Units of this rank's part.
    pub(crate) units: Vec<UnitState>,
    /// For each unit of the whole model, those of this rank's part that have its parameters.
    pub(crate) parts: Vec<Vec<usize>>,
    pub(crate) gathered: Pool,
    /// Elements of this rank's shard of each unit that count in sums over all ranks.
    pub(crate) counted: Vec<Vec<Range<usize>>>,
    pub(crate) training: Option<Training>,
}

/// States that training adds to the weights.
#[derive(Debug)]
pub(crate) struct Training {
    adamw: AdamW,
    /// Number of calls of [`Zero::step`].
    step: u64,
    pub(crate) scaler: Scaler,
    /// One per unit; `None` if the unit is frozen.
    pub(crate) states: Vec<Option<OptimizerState>>,
    /// The first block that reads a trained unit: no block before it needs a gradient.
    first_block: usize,
    /// Whole gradients that blocks write.
    gradients: Pool,
    /// Slices received from other ranks.
    received: Pool,
    /// Gradients that blocks write in the current micro-batch.
    writing: Vec<Option<(Buffer, UnitGrads)>>,
    /// Gradients in flight, oldest first.
    reducing: VecDeque<Reducing>,
    /// Each rank's part of a sum.
    of_ranks: Buffer,
    /// True if the accumulators hold gradients of the current step.
    accumulated: bool,
}

/// A unit's gradient in flight to the owners of its slices.
#[derive(Debug)]
struct Reducing {
    unit: usize,
    whole: Buffer,
    /// This rank's slice of every rank's gradient. `None` if it lies in `whole`: for a single rank, or if the
    /// group sums by itself.
    received: Option<Buffer>,
    /// `None` for a single rank.
    work: Option<Work>,
}

impl<M: Model> Zero<M> {
    /// Fills the model's weights from `seed`. With `adamw`, all units but the frozen ones are trainable. Each
    /// rank of `mesh` holds its part; it may be a [`CollectiveGroup`] alone. `config` may be a [`ZeroStage`] alone.
    ///
    /// # Errors
    /// [`Error::NothingToTrain`] for `adamw` on a model whose units are all frozen, or the device's.
    pub fn new(
        model: Arc<M>,
        config: impl Into<ZeroConfig>,
        adamw: Option<AdamW>,
        device: &Arc<dyn Device>,
        mesh: impl Into<Mesh>,
        seed: u64,
    ) -> Result<Self> {
        Self::from_source(model, config, adamw, device, mesh, &Seed(seed))
    }

    /// Like [`Self::new`], with weights from `source`; a rank reads only the part that it keeps.
    pub fn from_source(
        model: Arc<M>,
        config: impl Into<ZeroConfig>,
        adamw: Option<AdamW>,
        device: &Arc<dyn Device>,
        mesh: impl Into<Mesh>,
        source: &dyn WeightSource,
    ) -> Result<Self> {
        let (config, mesh) = (config.into(), mesh.into());
        let compute = Stream::torch(device)?;
        let sharers = mesh.sharers(&compute);
        let traffic = Arc::default();
        let own = own_part(&model, &mesh, &compute, &traffic)?;
        let new_unit = |(index, unit): (usize, &Unit)| {
            UnitState::new(
                (unit, own.is_of_experts(index)),
                &own.layer_matrices(index),
                &mesh,
                config,
                &compute,
            )
        };
        let units: Result<Vec<_>> = own.units().iter().enumerate().map(new_unit).collect();
        let mut parts = vec![Vec::new(); model.units().len()];
        (0..own.units().len()).for_each(|index| parts[own.whole_place(index, 0).0].push(index));
        let gathered = Pool::new(&compute);
        let transfers = Transfers::new(device)?;
        let mut zero = Self {
            model,
            own,
            config,
            mesh,
            sharers,
            compute,
            traffic,
            transfers,
            units: units?,
            parts,
            gathered,
            counted: Vec::new(),
            training: None,
        };
        zero.counted = (0..zero.units.len()).map(|index| zero.first_elements(index)).collect();
        zero.training = adamw.map(|adamw| zero.training_state(adamw)).transpose()?;
        zero.init_weights(source)?;
        Ok(zero)
    }

    /// Returns the whole model.
    pub fn model(&self) -> &Arc<M> {
        &self.model
    }

    /// Returns all ranks.
    pub fn group(&self) -> &CollectiveGroup {
        self.mesh.world()
    }

    /// Returns the number of optimizer steps since the optimizer was created, including those skipped after
    /// an fp16 overflow.
    pub fn steps_done(&self) -> u64 {
        self.training.as_ref().map_or(0, |training| training.step)
    }

    /// Runs forward and backward of one micro-batch and adds its gradient to the step's. `loss` turns the
    /// head's scores into the gradient of the loss. It divides by the global count, so the ranks'
    /// micro-batches add up to the loss. Every rank calls this equally often.
    ///
    /// Ranks that run batches together run those of all of them, one after the other. Each sees the scores of its
    /// own batch alone. A gradient is then a sum over the rows of one rank, which the reduction adds to the others.
    pub fn accumulate(
        &mut self,
        batch: &M::Batch,
        loss: impl FnOnce(&M::Scores) -> Result<M::ScoresGrad>,
    ) -> Result<()> {
        self.trainable("accumulate")?;
        self.needs("accumulate", &[State::Params, State::Gradients])?;
        let first = self.training_mut().first_block;
        let Some(sharers) = self.sharers.clone() else {
            let (scores, kept) = self.forward(batch, first)?;
            let grad = loss(&scores)?;
            self.backward_to(first, batch, kept, grad)?;
            return Ok(());
        };
        let (model, mut loss) = (self.own.clone(), Some(loss));
        for (owner, part) in model.cut(batch, &sharers)?.iter().enumerate() {
            let (scores, kept) = self.forward(part, first)?;
            let scores = model.join_scores(scores, part)?;
            let loss = loss.take_if(|_| owner == sharers.all.rank());
            let grad = loss.map(|loss| loss(&scores)).transpose()?;
            let grad = model.cut_grad(grad, part)?;
            self.backward_to(first, part, kept, grad)?;
        }
        Ok(())
    }

    /// Runs the first half of [`Self::accumulate`]: returns the scores of a micro-batch, and a tape for its
    /// backward. Several tapes may be open at a time, for passes that feed each other.
    pub fn record(&mut self, batch: &M::Batch) -> Result<(M::Scores, Tape)> {
        self.trainable("record")?;
        self.needs("record", &[State::Params, State::Gradients])?;
        assert!(self.sharers.is_none(), "ranks that run batches together record no tape");
        let (scores, kept) = self.forward(batch, 0)?;
        Ok((scores, Tape(kept)))
    }

    /// Runs the second half: adds the micro-batch's gradient to the step's. Returns the gradient of the first
    /// block's input, if the model has one.
    pub fn backward(
        &mut self,
        batch: &M::Batch,
        Tape(kept): Tape,
        grad: M::ScoresGrad,
    ) -> Result<Option<Tensor>> {
        self.backward_to(0, batch, kept, grad)
    }

    /// Begins to measure the rows that this rank sends to the experts of others.
    pub fn measure_exchanges(&self) {
        self.traffic.start();
    }

    /// Returns the rows that this rank sent since [`Self::measure_exchanges`], and measures no longer; `None` if no experts
    /// are spread. Waits for their last exchange.
    ///
    /// # Errors
    /// The device's.
    pub fn exchanged(&self) -> Result<Option<Exchanged>> {
        let spreads = self.mesh.expert_ranks() > 1;
        spreads.then(|| self.traffic.finish(&self.compute)).transpose()
    }

    /// Runs one optimizer step with the gradients accumulated since the last one.
    ///
    /// # Errors
    /// [`Self::finish_step`] returns [`Error::NonFiniteGradient`], with the weights unchanged.
    pub fn step(&mut self, learning_rate: f64) -> Result<StepStats> {
        self.trainable("step")?;
        self.needs("step", &[State::Params, State::Gradients, State::Optimizer])?;
        assert!(self.training_mut().accumulated, "a step needs the gradient of at least one micro-batch");
        let _named = span(format_args!("optimizer"));
        self.sum_replicas()?;
        let scaled_norm = self.global_norm()?;
        let training = self.training_mut();
        let adamw = training.adamw;
        training.step += 1;
        let (mut factors, stats) = training.scaler.advance(&scaled_norm, &adamw, training.step)?;
        self.gather_gradients()?;
        if self.config.steps_on == StepsOn::Host {
            self.send_gradients()?;
            factors = factors.f_to_device(tch::Device::Cpu)?; // waits for the device
        }
        let hyper = StepHyper { adamw, learning_rate };
        for index in 0..self.units.len() {
            if self.own.units()[index].trainable {
                self.step_unit(index, &factors, &hyper)?;
            }
        }
        self.training_mut().accumulated = false;
        Ok(stats)
    }

    /// Waits for a step and checks it.
    ///
    /// # Errors
    /// The group's failure, or [`Error::NonFiniteGradient`]; the weights are then those before the step.
    pub fn finish_step(&self, stats: &StepStats) -> Result<Stepped> {
        let grad_norm = stats.grad_norm.f_double_value(&[])?;
        let loss_scale = stats.loss_scale.as_ref().map(|scale| scale.f_double_value(&[])).transpose()?;
        self.mesh.check()?;
        // In fp16 a smaller scale may help, if there is one.
        let skipped = !grad_norm.is_finite();
        if skipped && loss_scale.is_none_or(|scale| scale <= 1.0) {
            return Err(Error::NonFiniteGradient { step: stats.step, grad_norm, loss_scale });
        }
        Ok(Stepped { grad_norm: (!skipped).then_some(grad_norm), loss_scale })
    }

    /// Returns the head's scores of a batch, without a gradient.
    pub fn score(&mut self, batch: &M::Batch) -> Result<M::Scores> {
        self.needs("score", &[State::Params])?;
        let (model, blocks) = (self.own.clone(), self.own.blocks());
        let Some(sharers) = self.sharers.clone() else { return Ok(self.forward(batch, blocks)?.0) };
        let mut own = None;
        for (owner, part) in model.cut(batch, &sharers)?.iter().enumerate() {
            let scores = model.join_scores(self.forward(part, blocks)?.0, part)?;
            own = own.or((owner == sharers.all.rank()).then_some(scores));
        }
        Ok(own.expect("each rank has a batch"))
    }

    /// Starts a new optimizer with fresh states, for the next phase of a run.
    pub fn reset_optimizer(&mut self, adamw: AdamW) -> Result<()> {
        self.trainable("reset_optimizer")?;
        self.needs("reset_optimizer", &[State::Optimizer])?;
        let training = self.training.as_mut().expect("just checked");
        for state in training.states.iter_mut().flatten() {
            state.reset(&self.compute)?;
        }
        training.scaler.reset()?;
        (training.adamw, training.step, training.accumulated) = (adamw, 0, false);
        Ok(())
    }
}

/// Reads and writes of checkpoints.
impl<M: Model> Zero<M> {
    pub(crate) fn layouts(&self) -> impl Iterator<Item = &Layout> {
        self.units.iter().map(|unit| &unit.layout)
    }

    /// Returns the part of a unit of the whole model that this rank saves: its shard, or with several replicas a slice of it.
    pub(crate) fn saved_range(&self, index: usize) -> Range<usize> {
        let len = self.whole_layout(index).len / self.mesh.world().world_size();
        let slice = self.mesh.saved_slice();
        slice * len..(slice + 1) * len
    }

    /// Returns this rank's saved part of the moments of a unit of the whole model.
    pub(crate) fn saved_moments(&mut self, index: usize) -> Result<Option<[Part; 2]>> {
        if !self.is_joined(index) {
            let part = self.saved_range(index);
            return self.moments(index, &part);
        }
        let (device, mut of_parts) = (self.torch_device(), [Vec::new(), Vec::new()]);
        for part in self.parts[index].clone() {
            let shard = self.units[part].shard();
            let Some(moments) = self.moments(part, &shard)? else { return Ok(None) };
            for (of_parts, moment) in of_parts.iter_mut().zip(moments) {
                of_parts.push(moment.on(device)?);
            }
        }
        let [exp_avg, exp_avg_sq] = of_parts.map(|of_parts| self.saved_of_whole(index, &of_parts));
        Ok(Some([exp_avg?, exp_avg_sq?]))
    }

    /// Returns the moments of the elements `part` of a unit; `None` if it is frozen.
    fn moments(&mut self, index: usize, part: &Range<usize>) -> Result<Option<[Part; 2]>> {
        let compute = self.compute.clone();
        let Some(state) = self.state_mut(index) else { return Ok(None) };
        state.storage.ready(&compute)?;
        Ok(Some([state.moment(EXP_AVG, part)?, state.moment(EXP_AVG_SQ, part)?]))
    }

    pub(crate) fn restore_moments(
        &mut self,
        index: usize,
        exp_avg: &[f32],
        exp_avg_sq: &[f32],
    ) -> Result<()> {
        let compute = self.compute.clone();
        let state = self.state_mut(index).expect("moments are restored for trained units");
        state.storage.ready(&compute)?;
        state.moments.set(EXP_AVG, exp_avg)?;
        state.moments.set(EXP_AVG_SQ, exp_avg_sq)
    }

    /// Reads the counters that belong to the moments. Waits for the device.
    pub(crate) fn counters(&self) -> Result<Option<Counters>> {
        self.training.as_ref().map(|training| training.scaler.counters(training.step)).transpose()
    }

    pub(crate) fn restore_counters(&mut self, counters: Option<Counters>) -> Result<()> {
        if let (Some(training), Some(counters)) = (&mut self.training, counters) {
            training.step = counters.step;
            training.scaler.restore(counters)?;
        }
        Ok(())
    }
}

/// The phases of a micro-batch.
impl<M: Model> Zero<M> {
    /// Runs all blocks. Keeps the state that backward needs, of each block from `first_kept` on.
    fn forward(&mut self, batch: &M::Batch, first_kept: usize) -> Result<(M::Scores, Vec<BlockTape>)> {
        let model = self.own.clone();
        let (last, stay) = (model.blocks() - 1, self.weights_stay());
        let mut kept = Vec::with_capacity(model.blocks());
        let (mut x, mut scores) = (None, None);
        for visit in walk::forward(&*model, last >= first_kept) {
            let (block, keeps) = (visit.block, visit.block >= first_kept);
            // The backward of the last block comes next.
            let recompute = if block < last { self.config.recompute } else { Recompute::None };
            self.enter(&visit)?;
            let saves = keeps && recompute != Recompute::Full;
            let (output, saved) = self.run_forward(block, x.as_ref(), batch, saves, stay)?;
            let hidden = match output {
                Output::Hidden(hidden) => Some(hidden),
                Output::Scores(of_last) => {
                    scores = Some(of_last);
                    None
                }
            };
            let input = std::mem::replace(&mut x, hidden);
            if keeps {
                kept.push(match recompute {
                    Recompute::None => BlockTape::Saved(saved),
                    Recompute::Selective => BlockTape::Thin(model.thin(block, saved)),
                    Recompute::Full => BlockTape::Input(input),
                });
            }
            self.leave(&visit);
        }
        Ok((scores.expect("the last block has scores"), kept))
    }

    /// Runs backward from the last block to `first`, and returns the gradient of that block's input.
    fn backward_to(
        &mut self,
        first: usize,
        batch: &M::Batch,
        kept: Vec<BlockTape>,
        grad: M::ScoresGrad,
    ) -> Result<Option<Tensor>> {
        let mut grad = Some(OutputGrad::Scores(self.training_mut().scaler.scaled(grad)?));
        let model = self.own.clone();
        for (visit, kept) in walk::backward(&*model, first).zip(kept.into_iter().rev()) {
            let above = grad.expect("an inner block has an input");
            self.enter(&visit)?;
            grad = self.backward_block(&visit, batch, kept, above)?.map(OutputGrad::Hidden);
            for &unit in visit.done.iter().filter(|&&unit| model.units()[unit].trainable) {
                self.reduce(unit)?;
            }
            self.leave(&visit);
        }
        self.settle(0)?;
        self.training_mut().accumulated = true;
        Ok(match grad {
            Some(OutputGrad::Hidden(below)) => Some(below),
            _ => None,
        })
    }

    /// Returns true if weights of all blocks are still in place at their backward.
    fn weights_stay(&self) -> bool {
        !self.units.iter().any(|unit| unit.is_made(self.config))
    }

    fn run_forward(
        &self,
        block: usize,
        x: Option<&Tensor>,
        batch: &M::Batch,
        save: bool,
        lasting: bool,
    ) -> Result<(Output<M::Scores>, Saved)> {
        let _named = span(format_args!("forward {block}"));
        let views: Vec<&[Tensor]> = self.views(block);
        Ok(self.own.forward(block, &weights(&views, lasting), x, batch, save)?)
    }

    fn backward_block(
        &mut self,
        &Visit { block, units, .. }: &Visit,
        batch: &M::Batch,
        kept: BlockTape,
        grad: OutputGrad<M::ScoresGrad>,
    ) -> Result<Option<Tensor>> {
        let lasting = self.weights_stay() || matches!(kept, BlockTape::Input(_));
        let saved = match kept {
            BlockTape::Saved(saved) => saved,
            BlockTape::Thin(saved) => {
                let views = self.views(block);
                self.own.refill(block, &weights(&views, lasting), saved, batch)?
            }
            BlockTape::Input(x) => self.run_forward(block, x.as_ref(), batch, true, lasting)?.1,
        };
        let model = self.own.clone();
        let mut training = self.training.take().expect("checked by `accumulate`");
        for &unit in units.iter().filter(|&&unit| model.units()[unit].trainable) {
            let layout = &self.units[unit].layout;
            training.open_gradient(unit, &model.units()[unit], layout, self.config.precision.dtype())?;
        }
        let views = self.views(block);
        let mut grads = Grads::new(training.writing_of(units));
        let named = span(format_args!("backward {block}"));
        let below = model.backward(block, &weights(&views, lasting), &mut grads, saved, grad, batch);
        drop(named);
        self.training = Some(training);
        Ok(below?)
    }

    /// Starts to send a unit's gradient to its owners, and accumulates older ones.
    fn reduce(&mut self, unit: usize) -> Result<()> {
        let UnitState { group, layout, .. } = &self.units[unit];
        let training = self.training.as_mut().expect("checked by `accumulate`");
        let (whole, grads) = training.writing[unit].take().expect("a gradient was opened");
        assert!(grads.all_written(), "a block left a gradient of unit {unit} unwritten");
        let (received, work) = if group.world_size() == 1 {
            (None, None)
        } else if group.sums_in_rank_order() {
            let received = training.received.take(layout, whole.dtype())?;
            let work = group.all_to_all(&received, &whole, &self.compute)?;
            (Some(received), Some(work))
        } else {
            let sum = whole.slice(layout.shard(group.rank()));
            (None, Some(group.reduce_scatter(&sum, &whole, ReduceOp::Sum, &self.compute)?))
        };
        training.reducing.push_back(Reducing { unit, whole, received, work });
        // Whole gradients are large: one is in flight while the next is written.
        self.settle(1)
    }

    /// Accumulates gradients that have arrived, until at most `in_flight` are left.
    fn settle(&mut self, in_flight: usize) -> Result<()> {
        let training = self.training.as_mut().expect("public calls check that there is an optimizer");
        let how = if training.accumulated { Store::Add } else { Store::Write };
        while training.reducing.len() > in_flight {
            let Reducing { unit, whole, received, work } = training.reducing.pop_front().expect("not empty");
            let (layout, shard) = (&self.units[unit].layout, self.units[unit].shard());
            work.iter().try_for_each(|work| work.wait_stream(&self.compute))?;
            let state = training.states[unit].as_mut().expect("only trained units are reduced");
            state.gradient_memory.ready_to_write(&self.compute)?;
            let arrived = received.clone().unwrap_or_else(|| whole.slice(shard.clone()));
            let slices = arrived.len() / layout.shard_len();
            let by_rank = arrived.tensor(&[slices as i64, layout.shard_len() as i64])?;
            ops::sum_ranks(&by_rank, &mut state.own_gradient(shard)?, how)?;
            training.gradients.put(layout, whole);
            if let Some(received) = received {
                training.received.put(layout, received);
            }
        }
        Ok(())
    }

    /// Adds the gradients of all replicas, in rank order: each rank's accumulated shard becomes the sum of those of the ranks
    /// that have the same one.
    fn sum_replicas(&mut self) -> Result<()> {
        let Some(replicas) = &self.mesh.replicas else { return Ok(()) };
        let training = self.training.as_mut().expect("checked by `step`");
        let mut sums = Vec::with_capacity(self.units.len());
        for (unit, state) in self.units.iter().zip(&mut training.states) {
            let Some(state) = state else { continue };
            state.gradient_memory.ready_to_write(&self.compute)?;
            let own = state.own_gradient_buffer(unit.shard());
            sums.push(replicas.all_reduce(&own, ReduceOp::Sum, &self.compute)?);
        }
        sums.iter().try_for_each(|sum| Ok(sum.wait_stream(&self.compute)?))
    }

    /// Returns the norm of the whole gradient on the device: fp64, one element. At every stage each rank
    /// squares its own shard, and the partial sums are added in rank order.
    fn global_norm(&mut self) -> Result<Tensor> {
        let training = self.training.as_mut().expect("checked by `step`");
        let mut partial = Vec::with_capacity(self.units.len());
        for ((unit, state), counted) in self.units.iter().zip(&mut training.states).zip(&self.counted) {
            let Some(state) = state else { continue };
            state.gradient_memory.ready_to_read(&self.compute)?;
            let gradient = state.own_gradient(unit.shard())?;
            for range in counted {
                let part = gradient.f_narrow(0, range.start as i64, range.len() as i64)?;
                partial.push(ops::sum_of_squares(&part)?);
            }
        }
        Ok(self.sum_of_ranks(&Tensor::f_stack(&partial, 0)?.f_sum(Kind::Double)?)?.f_sqrt()?)
    }

    /// Sums one fp64 element over the shard group, in rank order, and then over the tensor group.
    pub(crate) fn sum_of_ranks(&self, own: &Tensor) -> Result<Tensor> {
        let total = self.sum_over(&self.mesh.shards, own)?;
        self.mesh.tensor.as_ref().map_or(Ok(total.shallow_clone()), |tensor| self.sum_over(tensor, &total))
    }

    fn sum_over(&self, group: &CollectiveGroup, own: &Tensor) -> Result<Tensor> {
        let (rank, world_size) = (group.rank(), group.world_size());
        let training = self.training.as_ref().expect("public calls check that there is an optimizer");
        // Collectives have no fp64, so the sums are sent as bytes.
        const BYTES: usize = size_of::<f64>();
        let all = training.of_ranks.slice(0..world_size * BYTES);
        let mine = all.slice(rank * BYTES..(rank + 1) * BYTES);
        flat(&mine)?.f_view_dtype(Kind::Double)?.f_copy_(own)?;
        group.all_gather(&all, &mine, &self.compute)?.wait_stream(&self.compute)?;
        let sums = flat(&all)?.f_view_dtype(Kind::Double)?;
        let mut total = sums.f_select(0, 0)?.copy();
        for other in 1..world_size as i64 {
            total = total.f_add(&sums.f_select(0, other)?)?;
        }
        Ok(total)
    }

    /// Gathers the accumulated gradients if this rank steps more than its shard.
    fn gather_gradients(&mut self) -> Result<()> {
        let training = self.training.as_ref().expect("checked by `step`");
        for (unit, state) in self.units.iter().zip(&training.states) {
            let Some(state) = state else { continue };
            if state.range.len() > unit.layout.shard_len() {
                let whole = state.gradient_memory.buffer(0..unit.layout.len, DType::F32);
                let mine = whole.slice(unit.shard());
                unit.group.all_gather(&whole, &mine, &self.compute)?.wait_stream(&self.compute)?;
            }
        }
        Ok(())
    }

    /// Starts all copies of gradients to the host at once, so that one is copied while another is stepped.
    fn send_gradients(&mut self) -> Result<()> {
        let Transfers { to_host, to_device, .. } = &self.transfers;
        for stream in [to_host, to_device] {
            stream.wait_stream(&self.compute)?;
        }
        let training = self.training.as_mut().expect("checked by `step`");
        training.states.iter_mut().flatten().try_for_each(|state| state.send_gradient(to_host))
    }

    fn step_unit(&mut self, index: usize, factors: &Tensor, hyper: &StepHyper) -> Result<()> {
        let unit = &mut self.units[index];
        if let Some(memory) = unit.storage.arena() {
            memory.ready_to_write(&self.compute)?;
        }
        let target = match &unit.storage {
            WeightsStorage::Device { resident, .. } => resident.clone(),
            WeightsStorage::Host(_) => self.gathered.take(&unit.layout, unit.dtype)?,
        };
        let training = self.training.as_mut().expect("checked by `step`");
        let state = training.states[index].as_mut().expect("only trained units are stepped");
        let owned = if target.len() == state.range.len() {
            target.clone()
        } else {
            target.slice(state.range.clone())
        };
        state.step(&owned, factors, hyper, (&self.compute, &self.transfers.to_device))?;
        let mut arriving = None;
        if self.config.stage >= ZeroStage::Zero1 && self.config.stage < ZeroStage::Zero3 {
            arriving = Some(unit.group.all_gather(&target, &owned, &self.compute)?);
        }
        if self.config.params_on == ParamsOn::Host {
            if let Some(work) = arriving {
                work.wait_stream(&self.compute)?;
            }
            return self.send_weights(index, target);
        }
        if let Some(work) = arriving {
            let whole = self.units[index].whole.as_mut().expect("resident below stage 3");
            whole.arriving = Some(Arriving::Gather(work));
        }
        Ok(())
    }
}

/// Helpers of the calls above.
impl<M: Model> Zero<M> {
    /// Returns true if the accumulated gradients are needed.
    pub(crate) fn has_accumulated(&self) -> bool {
        self.training.as_ref().is_some_and(|training| training.accumulated)
    }

    /// Drops whole gradient buffers that are not in use.
    pub(crate) fn drop_gradient_buffers(&mut self) {
        if let Some(training) = &mut self.training {
            training.gradients.clear();
            training.received.clear();
        }
    }

    fn training_state(&self, adamw: AdamW) -> Result<Training> {
        let mut states = Vec::with_capacity(self.units.len());
        for (state, unit) in self.units.iter().zip(self.own.units()) {
            let UnitState { layout, group, .. } = state;
            let range = layout.stepped(self.config.stage, group.rank());
            states.push(match unit.trainable {
                true => Some(OptimizerState::new(&unit.name, layout, range, self.config, &self.compute)?),
                false => None,
            });
        }
        let device = states.iter().flatten().next().ok_or(Error::NothingToTrain)?.gradient.device();
        let first_block = first_trained_block(&*self.own);
        let ranks = self.mesh.shards.world_size().max(self.mesh.tensor_ranks());
        Ok(Training {
            adamw,
            step: 0,
            scaler: Scaler::new(self.config.precision, device)?,
            states,
            first_block,
            gradients: Pool::new(&self.compute),
            received: Pool::new(&self.compute),
            of_ranks: Buffer::zeros(&self.compute, ranks * size_of::<f64>(), DType::U8)?,
            writing: self.units.iter().map(|_| None).collect(),
            reducing: VecDeque::new(),
            accumulated: false,
        })
    }

    fn trainable(&self, call: &'static str) -> Result<()> {
        if self.training.is_some() { Ok(()) } else { Err(Error::Frozen { call }) }
    }

    /// Returns the optimizer's state of a unit: `None` if it is frozen.
    pub(crate) fn state_mut(&mut self, index: usize) -> Option<&mut OptimizerState> {
        self.training.as_mut()?.states[index].as_mut()
    }

    fn training_mut(&mut self) -> &mut Training {
        self.training.as_mut().expect("public calls check that there is an optimizer")
    }
}

/// Returns the part of the model that this rank of `mesh` holds and runs.
fn own_part<M: Model>(
    model: &Arc<M>,
    mesh: &Mesh,
    compute: &Stream,
    traffic: &Arc<Traffic>,
) -> Result<Arc<M>> {
    if let Some(group) = &mesh.tensor {
        return Ok(Arc::new(model.split_over(&peers(group, compute))?));
    }
    let Some(experts) = &mesh.experts else { return Ok(model.clone()) };
    let part = model.spread_experts(&measured_peers(&experts.holders, compute, traffic))?;
    Ok(part.map_or_else(|| model.clone(), Arc::new))
}

/// State that a forward pass keeps for its backward. It holds device memory until then.
#[derive(Debug)]
pub struct Tape(Vec<BlockTape>);

/// Passes a block's weights to its model; `lasting` if they stay in place from forward to backward.
fn weights<'a>(views: &'a [&'a [Tensor]], lasting: bool) -> anyroll_models::Weights<'a> {
    let weights = anyroll_models::Weights::new(views);
    if lasting { weights.lasting() } else { weights }
}

/// State of a block's forward that its backward needs.
#[derive(Debug)]
enum BlockTape {
    Saved(Saved),
    /// Without the parts that the model recomputes.
    Thin(Saved),
    /// The block's input, to recompute the block.
    Input(Option<Tensor>),
}

impl Training {
    /// Allocates a unit's gradient of this micro-batch, unless another block has done so in this backward
    /// pass.
    fn open_gradient(&mut self, index: usize, unit: &Unit, layout: &Layout, dtype: DType) -> Result<()> {
        if self.writing[index].is_none() {
            let buffer = self.gradients.take(layout, dtype)?;
            let views = param_views(unit, layout, &buffer)?;
            self.writing[index] = Some((buffer, UnitGrads::new(views)));
        }
        Ok(())
    }

    /// Returns the open gradients of `units`, in that order; frozen units have none.
    fn writing_of(&mut self, units: &[usize]) -> Vec<Option<&mut UnitGrads>> {
        let mut found: Vec<Option<&mut UnitGrads>> = units.iter().map(|_| None).collect();
        for (index, open) in self.writing.iter_mut().enumerate() {
            if let Some(position) = units.iter().position(|&unit| unit == index) {
                found[position] = open.as_mut().map(|(_, grads)| grads);
            }
        }
        found
    }
}

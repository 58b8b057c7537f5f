//! Memory needs of a strategy, computed without a device. Sizes come from [`crate::layout`], which also sizes
//! the allocations. For temporary buffers, the plan walks a model's blocks like [`crate::Zero`].

use std::collections::{HashMap, VecDeque};

use anyroll_backends::DType;
use anyroll_models::{BlockBytes, Footprint, Model, Runs, Unit};

use crate::{
    ParamsOn, Recompute, StepsOn, ZeroConfig,
    layout::{Layout, four_bit_bytes, made_bytes},
    optimizer,
    walk::{self, Visit, first_trained_block},
    weights::{ExactParams, is_in_four_bits},
};

/// The properties of a group of ranks that memory depends on.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Ranks {
    /// Number of ranks.
    pub world_size: usize,
    /// Number of ranks that share a replica of the model: a divisor of all.
    pub shards: usize,
    /// Number of ranks that hold every layer together: a divisor of both. A model is then a rank's part.
    pub tensor: usize,
    /// Number of ranks among which experts are spread: a divisor of `shards`. A model is then a rank's part.
    pub experts: usize,
    /// Arenas are rounded up to a multiple of this ([`anyroll_backends::Device::arena_granularity_bytes`]).
    pub granularity_bytes: usize,
    /// Copy of [`anyroll_backends::CollectiveGroup::sums_in_rank_order`].
    pub sums_in_rank_order: bool,
}

impl Ranks {
    /// Returns the number of ranks that together have one unit of a rank's part, of spread experts or not.
    fn holders(self, is_of_experts: bool) -> usize {
        if is_of_experts { self.experts } else { self.tensor }
    }

    /// Returns the layout of a unit of a rank's part, that `holders` ranks have together.
    fn layout(self, unit: &Unit, holders: usize) -> Layout {
        Layout::new(unit, self.world_size / holders).in_shards(self.shards / holders)
    }

    /// Returns true if a unit of the whole model is in new memory: it is gathered, widened, or joined of parts.
    fn make_whole_unit<M: Model>(self, model: &M, unit: usize, config: ZeroConfig) -> bool {
        is_made(model, unit, config) || self.tensor > 1 || self.experts > 1 && model.has_experts(unit)
    }

    /// Returns the layout of a unit of the whole model, once its parts are joined.
    fn whole_layout(self, unit: &Unit) -> Layout {
        Layout::new(unit, self.world_size)
    }
}

/// Memory of each rank's device while a model trains or scores, in bytes, without activations. It is the same
/// on all ranks, since shards are equal.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Held {
    /// Bytes of [`crate::State::Params`].
    pub weights: usize,
    /// Bytes of [`crate::State::Gradients`], accumulated in fp32.
    pub gradients: usize,
    /// Bytes of [`crate::State::Optimizer`].
    pub optimizer: usize,
    /// Whole weights of a few blocks at a time, at stage 3 or with weights on the host.
    pub gathered: usize,
    /// Whole gradients of a few blocks at a time, and their slices received from other ranks.
    pub reducing: usize,
    /// Received slices of the sum over replicas, which the communication library keeps.
    pub replicas: usize,
    /// Host memory of weights held there, and of an optimizer that steps there.
    pub host: usize,
    /// Pinned memory for background checkpoints, allocated at the first one.
    pub saved: usize,
}

impl Held {
    /// Returns the bytes on the device.
    pub fn device(&self) -> usize {
        self.weights + self.gradients + self.optimizer + self.gathered + self.reducing + self.replicas
    }
}

/// Computes the memory of `model`. An untrained model has no optimizer.
pub fn held<M: Model>(model: &M, config: ZeroConfig, trained: bool, ranks: Ranks) -> Held {
    let holders = |unit: usize| ranks.holders(model.is_of_experts(unit));
    let layouts: Vec<Layout> =
        model.units().iter().enumerate().map(|(index, unit)| ranks.layout(unit, holders(index))).collect();
    let arena = |bytes: usize| bytes.max(1).next_multiple_of(ranks.granularity_bytes);
    let (weight, float) = (config.precision.dtype().size_bytes(), DType::F32.size_bytes());
    let mut held = Held::default();
    for (index, (unit, layout)) in model.units().iter().zip(&layouts).enumerate() {
        let kept = layout.resident(config.stage, 0).len();
        let (kept, exact) = match is_packed(model, index, config) {
            true => (four_bit_bytes(kept), ExactParams::new(unit, &model.layer_matrices(index)).len * weight),
            false => (kept * weight, 0),
        };
        match config.params_on {
            ParamsOn::Device => held.weights += arena(kept + exact),
            ParamsOn::Host => {
                held.host += kept;
                held.weights += exact;
            }
        }
        if trained && unit.trainable {
            let len = layout.stepped(config.stage, 0).len();
            let (stepped, states) = (len * float, optimizer::bytes(config, layout, len));
            held.gradients += arena(stepped);
            if ranks.sums_in_rank_order && ranks.shards < ranks.world_size {
                held.replicas = held.replicas.max(layout.shard_len() * float);
            }
            let alike = ranks.world_size / holders(index);
            held.saved += 3 * layout.len / alike * float; // the weight and two moments
            match config.steps_on {
                StepsOn::Device => held.optimizer += arena(states),
                // Plus a staging buffer for the gradient, and then for the new weights.
                StepsOn::Host => held.host += states + stepped,
            }
        }
    }
    let mut buffers = Buffers::new(model, &layouts, config, ranks);
    buffers.forward(trained);
    if trained {
        buffers.backward();
        held.reducing = (ranks.shards / ranks.tensor).max(ranks.tensor) * size_of::<f64>(); // the ranks' parts of the norm
    }
    held.gathered = buffers.gathered.bytes(weight) + buffers.packed.bytes(DType::U8.size_bytes());
    held.reducing += buffers.gradients.bytes(weight) + buffers.received.bytes(weight);
    held
}

/// Returns true if the unit of this index is kept in 4 bits.
fn is_packed<M: Model>(model: &M, index: usize, config: ZeroConfig) -> bool {
    is_in_four_bits(&model.units()[index], config, &model.layer_matrices(index))
}

/// Returns true if the whole unit of this index is made before use and freed after it.
fn is_made<M: Model>(model: &M, index: usize, config: ZeroConfig) -> bool {
    config.gathers() || is_packed(model, index, config)
}

/// Estimates further memory of a device other than the host: the driver's context, the communication
/// library's buffers, and fragmentation of libtorch's cache. No interface reports these sizes. The values are
/// the remainders of the measurements in docs/results/memory.md: 1.6 to 2.2 GiB on one GPU, 3.3 to 3.8 GiB on
/// each of four.
pub fn driver_bytes(world_size: usize) -> usize {
    const MIB: usize = 1 << 20;
    if world_size == 1 { 1900 * MIB } else { 3700 * MIB }
}

/// Returns the bytes that [`crate::Zero::weights_with_own`] allocates for the whole `model`: all units if they must be
/// gathered or joined, otherwise the parameters that `is_own` accepts.
pub fn whole_weights<M: Model>(
    model: &M,
    config: ZeroConfig,
    ranks: Ranks,
    is_own: impl Fn(usize, usize) -> bool,
) -> usize {
    let lens = model.units().iter().enumerate().map(|(index, unit)| {
        let is_made = ranks.make_whole_unit(model, index, config);
        ranks.whole_layout(unit).whole_len(is_made, |param| is_own(index, param))
    });
    lens.sum::<usize>() * config.precision.dtype().size_bytes()
}

/// Returns the bytes that [`crate::Zero::weights_made`] allocates at its peak.
pub fn weights_made<M: Model>(
    model: &M,
    config: ZeroConfig,
    ranks: Ranks,
    made: impl Fn(usize, usize, usize) -> Option<usize>,
) -> usize {
    let element = config.precision.dtype().size_bytes();
    let units = model.units().iter().enumerate().map(|(index, unit)| {
        let whole = ranks.whole_layout(unit).len * element;
        (whole, made(index, whole, element), ranks.make_whole_unit(model, index, config))
    });
    made_bytes(units)
}

/// Returns the peak of activations in forward and backward of one micro-batch, in bytes.
pub fn training_activations<M: Footprint>(
    model: &M,
    size: &M::Size,
    config: ZeroConfig,
    runs: Runs,
) -> usize {
    let Passes { forward, backward, .. } = passes(model, size, config, runs, first_trained_block(model));
    forward.max(backward)
}

/// Returns the activations of a pass whose backward runs later, like [`crate::Zero::record`] and
/// [`crate::Zero::backward`].
pub fn recorded_activations<M: Footprint>(
    model: &M,
    size: &M::Size,
    config: ZeroConfig,
    runs: Runs,
) -> Passes {
    passes(model, size, config, runs, 0)
}

/// Activations of a micro-batch's forward and backward, in bytes.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Passes {
    /// Peak in forward.
    pub forward: usize,
    /// Bytes kept from forward to backward.
    pub kept: usize,
    /// Peak in backward, including the bytes kept.
    pub backward: usize,
}

/// Returns the activations over all blocks, where blocks from `first` on have a backward.
fn passes<M: Footprint>(model: &M, size: &M::Size, config: ZeroConfig, runs: Runs, first: usize) -> Passes {
    let last = model.blocks() - 1;
    let is_run_again = |block: usize| config.recompute == Recompute::Full && block < last;
    // A recomputed block runs backward at once, before its weights are freed.
    let stay = !(0..model.units().len()).any(|index| is_made(model, index, config));
    let lasts = |block: usize| stay || is_run_again(block);
    let of: Vec<BlockBytes> =
        (0..=last).map(|block| model.block_bytes(block, size, runs, lasts(block))).collect();
    let keeps = |block: usize| match config.recompute {
        _ if block < first => 0,
        Recompute::Selective if block < last => of[block].thinned,
        Recompute::Full if block < last => of[block].input,
        _ => of[block].saved,
    };
    let (mut forward, mut kept) = (0, 0);
    for (block, bytes) in of.iter().enumerate() {
        let saves = block >= first && !is_run_again(block);
        forward = forward.max(kept + bytes.input + if saves { bytes.forward } else { bytes.scoring });
        kept += keeps(block);
    }
    let (all, mut backward) = (kept, kept);
    for (block, bytes) in of.iter().enumerate().skip(first).rev() {
        kept -= keeps(block);
        if is_run_again(block) {
            backward = backward.max(kept + bytes.input + bytes.output_grad + bytes.forward);
        }
        backward = backward.max(kept + bytes.saved + bytes.output_grad + bytes.backward);
    }
    Passes { forward, kept: all, backward }
}

/// Returns the peak of activations in a forward pass that saves nothing, in bytes.
pub fn scoring_activations<M: Footprint>(model: &M, size: &M::Size, runs: Runs) -> usize {
    let of = (0..model.blocks()).map(|block| model.block_bytes(block, size, runs, true));
    of.map(|bytes| bytes.input + bytes.scoring).max().unwrap_or(0)
}

/// The whole-unit buffers that a pass takes and returns, without memory.
struct Buffers<'a, M: Model> {
    model: &'a M,
    layouts: &'a [Layout],
    config: ZeroConfig,
    /// True if ranks sum the slices of gradients that they send each other themselves.
    sums_in_rank_order: bool,
    whole: Vec<bool>,
    gathered: PoolSize,
    /// Gathered units in 4 bits, until they are widened.
    packed: PoolSize,
    arriving_packed: Vec<bool>,
    writing: Vec<bool>,
    reducing: VecDeque<usize>,
    gradients: PoolSize,
    received: PoolSize,
}

impl<'a, M: Model> Buffers<'a, M> {
    fn new(model: &'a M, layouts: &'a [Layout], config: ZeroConfig, ranks: Ranks) -> Self {
        Self {
            model,
            layouts,
            config,
            sums_in_rank_order: ranks.sums_in_rank_order,
            whole: vec![false; layouts.len()],
            gathered: PoolSize::default(),
            packed: PoolSize::default(),
            arriving_packed: vec![false; layouts.len()],
            writing: vec![false; layouts.len()],
            reducing: VecDeque::new(),
            gradients: PoolSize::default(),
            received: PoolSize::default(),
        }
    }

    fn forward(&mut self, trains: bool) {
        for visit in walk::forward(self.model, trains) {
            self.enter(&visit);
            self.leave(&visit);
        }
    }

    fn backward(&mut self) {
        for visit in walk::backward(self.model, first_trained_block(self.model)) {
            self.enter(&visit);
            self.write_gradients(&visit);
            self.leave(&visit);
        }
        self.settle(0);
    }

    fn enter(&mut self, visit: &Visit) {
        for &unit in visit.units {
            self.start_gather(unit);
            if std::mem::take(&mut self.arriving_packed[unit]) {
                self.packed.put(&self.layouts[unit]);
            }
        }
        if self.config.gathers() {
            visit.next.iter().for_each(|&unit| self.start_gather(unit));
        }
    }

    fn start_gather(&mut self, unit: usize) {
        let (model, config) = (self.model, self.config);
        if self.whole[unit] || !is_made(model, unit, config) {
            return;
        }
        self.whole[unit] = true;
        self.gathered.take(&self.layouts[unit]);
        if config.gathers() && is_packed(model, unit, config) {
            self.packed.take(&self.layouts[unit]);
            self.arriving_packed[unit] = true;
        }
    }

    fn leave(&mut self, visit: &Visit) {
        for &unit in &visit.done {
            if std::mem::take(&mut self.whole[unit]) {
                self.gathered.put(&self.layouts[unit]);
            }
        }
    }

    fn write_gradients(&mut self, visit: &Visit) {
        let model = self.model;
        let is_trained = |unit: &&usize| model.units()[**unit].trainable;
        for &unit in visit.units.iter().filter(is_trained) {
            if !std::mem::replace(&mut self.writing[unit], true) {
                self.gradients.take(&self.layouts[unit]);
            }
        }
        for &unit in visit.done.iter().filter(is_trained) {
            self.writing[unit] = false;
            if self.receives(unit) {
                self.received.take(&self.layouts[unit]);
            }
            self.reducing.push_back(unit);
            self.settle(1);
        }
    }

    /// Returns true if ranks send gradients of a unit to each other and sum the received slices themselves.
    fn receives(&self, unit: usize) -> bool {
        self.sums_in_rank_order && self.layouts[unit].shards > 1
    }

    fn settle(&mut self, in_flight: usize) {
        while self.reducing.len() > in_flight {
            let unit = self.reducing.pop_front().expect("not empty");
            self.gradients.put(&self.layouts[unit]);
            if self.receives(unit) {
                self.received.put(&self.layouts[unit]);
            }
        }
    }
}

/// Buffers that a [`crate::memory::Pool`] has allocated, by layout, and how many of them are free.
#[derive(Default)]
struct PoolSize {
    made_and_free: HashMap<Layout, (usize, usize)>,
}

impl PoolSize {
    fn take(&mut self, layout: &Layout) {
        let (made, free) = self.made_and_free.entry(layout.clone()).or_default();
        match free.checked_sub(1) {
            Some(rest) => *free = rest,
            None => *made += 1,
        }
    }

    fn put(&mut self, layout: &Layout) {
        self.made_and_free.get_mut(layout).expect("the buffer was taken").1 += 1;
    }

    fn bytes(&self, element_bytes: usize) -> usize {
        let of = |(layout, (made, _)): (&Layout, &(usize, usize))| made * layout.len * element_bytes;
        self.made_and_free.iter().map(of).sum()
    }
}

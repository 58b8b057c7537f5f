//! A step's time on paper: the queues of compute, collectives and copies, walked like [`crate::Zero`] without a device.
//!
//! Compute is one queue. Gathers and reductions are another, in the order in which `Zero` submits them, and each waits
//! for the compute before it. Copies between host and device have one queue in each direction. So the walk finds the
//! waits that a step really has: the first gather, the last reduction, and all that compute is too short to hide.

use std::{collections::VecDeque, ops::Range};

use anyroll_models::Model;

use crate::{
    ParamsOn, Recompute, ZeroConfig, ZeroStage,
    layout::Layout,
    optimizer,
    walk::{self, Visit, first_trained_block},
};

/// Durations of a step's operations on one rank, in seconds.
pub trait Durations {
    /// Forward of a block.
    fn forward(&self, block: usize) -> f64;
    /// Backward of a block, without what it recomputes.
    fn backward(&self, block: usize) -> f64;
    /// The operations that backward repeats: those that thinning drops.
    fn again(&self, block: usize) -> f64;
    /// Gather of a buffer of so many bytes from the ranks that share it.
    fn gather(&self, bytes: usize) -> f64;
    /// Reduction of a gradient of so many bytes to the owners of its slices.
    fn reduce(&self, bytes: usize) -> f64;
    /// Sum over the replicas of a shard of so many bytes; 0 if all ranks share one set of shards.
    fn replicate(&self, bytes: usize) -> f64;
    /// Reads and writes of so many bytes of device memory.
    fn memory(&self, bytes: usize) -> f64;
    /// Copy of so many bytes to the host, or from it.
    fn copy(&self, bytes: usize) -> f64;
    /// Fraction of its speed that compute loses while a collective runs.
    fn slowdown(&self) -> f64;
}

/// Time of a phase, in seconds.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Elapsed {
    /// All of it.
    pub total: f64,
    /// Part in which compute waited for a collective or a copy.
    pub waited: f64,
}

/// The queues of one rank.
pub struct Timeline<'a, M, D> {
    model: &'a M,
    config: ZeroConfig,
    layouts: Vec<Layout>,
    durations: &'a D,
    /// Time at which compute is done with all that was submitted.
    now: f64,
    waited: f64,
    /// The same of collectives, and of copies to the device.
    collectives: f64,
    copies: f64,
    /// Intervals in which collectives run, that may still be ahead of compute.
    busy: Vec<Range<f64>>,
    /// Units whose weights are whole on the rank, with the time of their arrival.
    whole: Vec<Option<f64>>,
    /// Reductions in flight: unit, and end.
    reducing: VecDeque<(usize, f64)>,
    first: usize,
    accumulated: bool,
}

impl<'a, M: Model, D: Durations> Timeline<'a, M, D> {
    /// Creates empty queues of a rank that shares shards with `sharers` ranks, itself included.
    pub fn new(model: &'a M, config: ZeroConfig, sharers: usize, durations: &'a D) -> Self {
        let layouts: Vec<Layout> = model.units().iter().map(|unit| Layout::new(unit, sharers)).collect();
        let whole = layouts.iter().map(|_| (!config.gathers()).then_some(0.0)).collect();
        Self {
            model,
            config,
            layouts,
            durations,
            now: 0.0,
            waited: 0.0,
            collectives: 0.0,
            copies: 0.0,
            busy: Vec::new(),
            whole,
            reducing: VecDeque::new(),
            first: first_trained_block(model),
            accumulated: false,
        }
    }

    /// Takes these durations from now on: those of a micro-batch of another size.
    pub fn set_durations(&mut self, durations: &'a D) {
        self.durations = durations;
    }

    /// Runs `phase`, and returns its time.
    pub fn time(&mut self, phase: impl FnOnce(&mut Self)) -> Elapsed {
        let (start, waited) = (self.now, self.waited);
        phase(self);
        Elapsed { total: self.now - start, waited: self.waited - waited }
    }

    /// Walks forward. The last block's weights stay if its backward follows.
    pub fn forward(&mut self, trains: bool) {
        for visit in walk::forward(self.model, trains) {
            self.enter(&visit);
            self.run(self.durations.forward(visit.block));
            self.leave(&visit);
        }
    }

    /// Walks backward.
    pub fn backward(&mut self) {
        let model = self.model;
        for visit in walk::backward(model, self.first) {
            let block = visit.block;
            self.enter(&visit);
            if self.config.recompute == Recompute::Full && block + 1 < model.blocks() {
                self.run(self.durations.forward(block));
            }
            self.run(self.durations.again(block));
            self.run(self.durations.backward(block));
            for &unit in visit.done.iter().filter(|&&unit| model.units()[unit].trainable) {
                self.reduce(unit);
            }
            self.leave(&visit);
        }
        self.settle(0);
        self.accumulated = true;
    }

    /// Walks the optimizer's step, which begins with the sum over replicas. Its states are on the device from `states_at` on.
    pub fn step(&mut self, states_at: f64) {
        const F32: usize = 4;
        let trained: Vec<usize> =
            (0..self.layouts.len()).filter(|&unit| self.model.units()[unit].trainable).collect();
        let shards = trained.iter().map(|&unit| self.layouts[unit].shard_len() * F32);
        let sums: f64 = shards.map(|bytes| self.durations.replicate(bytes)).sum();
        if sums > 0.0 {
            let end = self.collective(sums);
            self.wait(end);
        }
        for &unit in &trained {
            self.run(self.durations.memory(self.layouts[unit].shard_len() * F32));
        }
        let norm = self.collective(self.durations.gather(size_of::<f64>() * self.layouts[0].shards));
        self.wait(norm);
        if self.config.stage == ZeroStage::Zero0 {
            for &unit in &trained {
                let end = self.collective(self.durations.gather(self.layouts[unit].len * F32));
                self.wait(end);
            }
        }
        self.wait(states_at);
        let weight = self.config.precision.dtype().size_bytes();
        for &unit in &trained {
            let stepped = self.layouts[unit].stepped(self.config.stage, 0).len();
            // The gradient, the optimizer's states read and written, and the new weight.
            let states = 2 * optimizer::bytes(self.config, &self.layouts[unit], stepped);
            self.run(self.durations.memory(stepped * (F32 + weight) + states));
            let gathers = self.config.stage >= ZeroStage::Zero1 && self.config.stage < ZeroStage::Zero3;
            if gathers {
                let end = self.collective(self.durations.gather(self.layouts[unit].len * weight));
                if self.config.params_on == ParamsOn::Device {
                    self.whole[unit] = Some(end);
                } else {
                    self.wait(end);
                }
            }
            if self.config.params_on == ParamsOn::Host {
                let end = self.now + self.durations.copy(self.kept(unit) * weight);
                self.wait(end); // before the next user of this memory
            }
        }
        self.accumulated = false;
    }

    /// Waits for everything in flight.
    pub fn finish(&mut self) {
        self.wait(self.collectives.max(self.copies));
    }

    /// Gathers all weights for sampling, unit by unit, if they are not whole on each rank anyway.
    pub fn gather_all(&mut self, fresh: impl Fn(usize) -> f64) {
        for unit in 0..self.layouts.len() {
            if self.config.gathers() {
                let bytes = self.layouts[unit].len * self.config.precision.dtype().size_bytes();
                self.run(fresh(bytes));
                let end = self.arrival(unit);
                self.wait(end);
            } else {
                self.wait(self.whole[unit].expect("resident"));
            }
        }
    }

    /// Returns the time since the queues were created.
    pub fn now(&self) -> f64 {
        self.now
    }

    fn kept(&self, unit: usize) -> usize {
        self.layouts[unit].resident(self.config.stage, 0).len()
    }

    fn enter(&mut self, visit: &Visit) {
        for &unit in visit.units {
            self.start_gather(unit);
            self.wait(self.whole[unit].expect("started"));
        }
        visit.next.iter().for_each(|&unit| self.start_gather(unit));
    }

    fn leave(&mut self, visit: &Visit) {
        if self.config.gathers() {
            visit.done.iter().for_each(|&unit| self.whole[unit] = None);
        }
    }

    fn start_gather(&mut self, unit: usize) {
        if self.whole[unit].is_none() {
            self.whole[unit] = Some(self.arrival(unit));
        }
    }

    /// Submits the copy and the gather of a unit, and returns their end.
    fn arrival(&mut self, unit: usize) -> f64 {
        let weight = self.config.precision.dtype().size_bytes();
        let (kept, len) = (self.kept(unit), self.layouts[unit].len);
        if self.config.params_on == ParamsOn::Host {
            self.copies = self.copies.max(self.now) + self.durations.copy(kept * weight);
            if kept == len {
                return self.copies;
            }
            self.collectives = self.collectives.max(self.copies);
        }
        self.collective(self.durations.gather(len * weight))
    }

    /// Submits a collective, which starts after the compute and the collectives before it. Returns its end.
    fn collective(&mut self, duration: f64) -> f64 {
        let start = self.collectives.max(self.now);
        self.collectives = start + duration;
        if duration > 0.0 {
            self.busy.push(start..self.collectives);
        }
        self.collectives
    }

    fn reduce(&mut self, unit: usize) {
        let weight = self.config.precision.dtype().size_bytes();
        let duration = self.durations.reduce(self.layouts[unit].len * weight);
        let end = self.collective(duration);
        self.reducing.push_back((unit, end));
        self.settle(1);
    }

    /// Accumulates slices that have arrived, until at most `in_flight` are left.
    fn settle(&mut self, in_flight: usize) {
        const F32: usize = 4;
        let weight = self.config.precision.dtype().size_bytes();
        while self.reducing.len() > in_flight {
            let (unit, end) = self.reducing.pop_front().expect("not empty");
            self.wait(end);
            let (len, shard) = (self.layouts[unit].len, self.layouts[unit].shard_len());
            let added = if self.accumulated { 2 } else { 1 };
            self.run(self.durations.memory(len * weight + added * shard * F32));
        }
    }

    fn wait(&mut self, until: f64) {
        if until > self.now {
            self.waited += until - self.now;
            self.now = until;
        }
    }

    /// Runs compute, slower while a collective runs.
    fn run(&mut self, seconds: f64) {
        let (now, slow) = (self.now, 1.0 - self.durations.slowdown());
        self.busy.retain(|it| it.end > now);
        let mut left = seconds;
        while left > 0.0 {
            let is_slow = self.busy.iter().any(|it| it.contains(&self.now));
            let speed = if is_slow { slow } else { 1.0 };
            let edges = self.busy.iter().flat_map(|it| [it.start, it.end]).filter(|&edge| edge > self.now);
            let next = edges.fold(f64::INFINITY, f64::min);
            if self.now + left / speed <= next {
                self.now += left / speed;
                return;
            }
            left -= (next - self.now) * speed;
            self.now = next;
        }
    }
}

#[cfg(test)]
mod tests {
    use anyroll_models::{Decoder, DecoderConfig, Model};

    use super::{Durations, Elapsed, Timeline};
    use crate::{ParamsOn, Precision, Recompute, ZeroConfig, ZeroStage};

    /// Each operation of a kind takes as long as any other.
    #[derive(Clone, Copy, Default)]
    struct Fixed {
        forward: f64,
        backward: f64,
        gather: f64,
        reduce: f64,
        replicate: f64,
        copy: f64,
        slowdown: f64,
    }

    impl Durations for Fixed {
        fn forward(&self, _: usize) -> f64 {
            self.forward
        }
        fn backward(&self, _: usize) -> f64 {
            self.backward
        }
        fn again(&self, _: usize) -> f64 {
            0.0
        }
        fn gather(&self, _: usize) -> f64 {
            self.gather
        }
        fn reduce(&self, _: usize) -> f64 {
            self.reduce
        }
        fn replicate(&self, _: usize) -> f64 {
            self.replicate
        }
        fn memory(&self, _: usize) -> f64 {
            0.0
        }
        fn copy(&self, _: usize) -> f64 {
            self.copy
        }
        fn slowdown(&self) -> f64 {
            self.slowdown
        }
    }

    /// Embedding, four layers and a head, each with a unit of its own.
    fn decoder() -> Decoder {
        let shape = DecoderConfig { tie_word_embeddings: false, ..DecoderConfig::plain(4, 16, 4) };
        Decoder::new(shape, tch::Device::Cpu).unwrap()
    }

    fn at(stage: ZeroStage) -> ZeroConfig {
        ZeroConfig { precision: Precision::Bf16, ..stage.into() }
    }

    fn micro_batch(config: ZeroConfig, durations: Fixed) -> [Elapsed; 3] {
        let model = decoder();
        assert_eq!((model.blocks(), model.units().len()), (6, 6));
        let mut line = Timeline::new(&model, config, 2, &durations);
        [line.time(|it| it.forward(true)), line.time(|it| it.backward()), line.time(|it| it.step(0.0))]
    }

    fn close(found: Elapsed, total: f64, waited: f64) {
        let is = (found.total - total).abs() < 1e-9 && (found.waited - waited).abs() < 1e-9;
        assert!(is, "{found:?}, not {total} and {waited}");
    }

    #[test]
    fn collectives_hide_behind_compute_but_for_the_first_and_the_last() {
        let short = Fixed { forward: 2.0, backward: 4.0, gather: 1.0, reduce: 1.0, ..Fixed::default() };
        let [forward, backward, step] = micro_batch(at(ZeroStage::Zero3), short);
        close(forward, 1.0 + 6.0 * 2.0, 1.0);
        close(backward, 6.0 * 4.0 + 1.0, 1.0);
        close(step, 1.0, 1.0); // the norm
        // Weights that are whole need no gather, and those that are stepped are gathered.
        let [forward, _, step] = micro_batch(at(ZeroStage::Zero2), short);
        close(forward, 12.0, 0.0);
        close(step, 1.0, 1.0);
        // Gradients in fp32, one after the other.
        let [.., step] = micro_batch(at(ZeroStage::Zero0), short);
        close(step, 1.0 + 6.0, 7.0);
    }

    #[test]
    fn long_collectives_are_the_step() {
        let long = Fixed { forward: 1.0, backward: 1.0, gather: 5.0, ..Fixed::default() };
        let [forward, backward, _] = micro_batch(at(ZeroStage::Zero3), long);
        // Six gathers, and the last block.
        close(forward, 6.0 * 5.0 + 1.0, 30.0 - 5.0);
        // The head is whole; the gather of each other block starts as the one above is entered.
        close(backward, 5.0 * 5.0 + 1.0, 25.0 - 5.0);
        let full = ZeroConfig { recompute: Recompute::Full, ..at(ZeroStage::Zero3) };
        let [_, backward, _] = micro_batch(full, Fixed { gather: 0.0, ..long });
        close(backward, 6.0 + 5.0, 0.0);
    }

    #[test]
    fn compute_beside_a_collective_is_slower() {
        let durations = Fixed { forward: 2.0, gather: 1.0, slowdown: 0.5, ..Fixed::default() };
        let [forward, ..] = micro_batch(at(ZeroStage::Zero3), durations);
        // Five blocks run beside the gather of the next one: a second at half of the speed, and 1.5 more.
        close(forward, 1.0 + 5.0 * 2.5 + 2.0, 1.0);
    }

    #[test]
    fn streamed_weights_wait_for_the_link_to_the_host() {
        let durations = Fixed { forward: 1.0, copy: 3.0, ..Fixed::default() };
        let streamed = ZeroConfig { params_on: ParamsOn::Host, ..at(ZeroStage::Zero0) };
        let [forward, _, step] = micro_batch(streamed, durations);
        close(forward, 6.0 * 3.0 + 1.0, 18.0 - 5.0);
        close(step, 6.0 * 3.0, 18.0);
    }

    #[test]
    fn replicas_sum_their_shards_once_before_the_step() {
        let model = decoder();
        let durations = Fixed { backward: 2.0, replicate: 1.0, ..Fixed::default() };
        let mut line = Timeline::new(&model, at(ZeroStage::Zero3), 2, &durations);
        line.forward(true);
        close(line.time(|it| it.backward()), 12.0, 0.0);
        line.forward(true);
        close(line.time(|it| it.backward()), 12.0, 0.0);
        close(line.time(|it| it.step(0.0)), 6.0, 6.0); // as `Zero` sums all units after backward
    }

    /// States on their way from the host hold up the optimizer, not the passes before it.
    #[test]
    fn the_optimizer_waits_for_its_states() {
        let model = decoder();
        let durations = Fixed { forward: 1.0, ..Fixed::default() };
        let mut line = Timeline::new(&model, at(ZeroStage::Zero1), 2, &durations);
        line.forward(true);
        close(line.time(|it| it.step(10.0)), 4.0, 4.0);
        assert_eq!(line.now(), 10.0);
    }
}

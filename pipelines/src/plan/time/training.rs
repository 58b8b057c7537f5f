//! The times of a model's passes and steps, from its shapes, a device's rates and a network.

use std::cell::Cell;

use anyroll_models::{BlockWork, Decoder, Model, PackedSize, Runs, ValueModel};
use anyroll_strategy::{
    Recompute, ZeroConfig,
    timeline::{Durations, Elapsed, Timeline},
};

use super::{
    demand::Demand,
    network::{Cost, Group, Network},
    rates::Rates,
};

/// Memory for gathered weights of sampling is made, cleared and read again: 15.2 GB took 0.095 s and 3.1 GB 0.024 s
/// (docs/results/decoding.md and rl_step.md), of which links explain a fourth.
const FRESH_BYTES_PER_S: f64 = 190e9;

/// A model whose work is counted.
pub(super) trait Worked: Model {
    /// Work of a block; `None` for one that libtorch differentiates.
    fn work(&self, block: usize, size: &PackedSize, runs: Runs, thins: bool) -> Option<BlockWork>;
}

impl Worked for Decoder {
    fn work(&self, block: usize, size: &PackedSize, runs: Runs, thins: bool) -> Option<BlockWork> {
        self.work(block, size, runs, thins)
    }
}

impl Worked for ValueModel {
    /// The head is a matrix of a row or two.
    fn work(&self, block: usize, size: &PackedSize, runs: Runs, thins: bool) -> Option<BlockWork> {
        let work = self.decoder().work(block, size, runs, thins)?;
        Some(if block + 1 == self.blocks() { BlockWork::default() } else { work })
    }
}

/// Ranks of a model, and their network.
#[derive(Clone, Copy)]
pub(super) struct Place {
    pub network: Network,
    /// Ranks that share one set of shards.
    pub shards: Group,
    /// True if gradients are summed in rank order, by their receivers.
    pub ordered: bool,
}

/// Durations of a micro-batch of one size. They add up what they are asked for.
pub(super) struct Passes {
    blocks: Vec<BlockWork>,
    place: Place,
    rates: Rates,
    /// Ranks that run the micro-batch together.
    together: usize,
    demand: Cell<Demand>,
}

impl Passes {
    /// Durations of `model` over a micro-batch, one of whose `size.ranks` parts a rank has. `None` for a model with
    /// blocks whose work is not counted.
    pub fn new(
        model: &impl Worked,
        size: &PackedSize,
        config: ZeroConfig,
        (place, rates): (Place, Rates),
    ) -> Option<Self> {
        let runs = Runs { dtype: config.precision.dtype(), on_host: false };
        let thins = config.recompute == Recompute::Selective;
        let blocks: Option<Vec<_>> =
            (0..model.blocks()).map(|block| model.work(block, size, runs, thins)).collect();
        Some(Self { blocks: blocks?, place, rates, together: size.ranks, demand: Cell::default() })
    }

    /// Operations of a forward and a backward without repetitions.
    pub fn model_flops(&self) -> f64 {
        let of = |it: &BlockWork| it.products + it.products_backward + it.attention + it.attention_backward;
        self.blocks.iter().map(of).sum()
    }

    /// Returns the demand since the last call.
    pub fn take_demand(&self) -> Demand {
        self.demand.take()
    }

    fn asks(&self, demand: Demand) -> f64 {
        self.demand.set(self.demand.get() + demand);
        demand.compute_s + demand.memory_s
    }

    fn costs(&self, cost: Cost) -> f64 {
        self.demand.set(self.demand.get() + Demand::of(cost));
        cost.seconds()
    }

    /// Collectives of rows, for which compute waits: all-to-alls of a rank's, and a gather of all ranks'.
    fn exchange(&self, exchanged: f64, gathered: f64) -> f64 {
        let Place { network, .. } = self.place;
        let group = network.neighbours(self.together).expect("checked by the caller");
        let costs = |bytes: f64, cost: Cost| if bytes > 0.0 { self.costs(cost) } else { 0.0 };
        costs(exchanged, network.exchange(group, exchanged))
            + costs(gathered, network.gather(group, gathered))
    }
}

impl Durations for Passes {
    fn forward(&self, block: usize) -> f64 {
        let it = &self.blocks[block];
        let attention = it.attention / self.rates.attention;
        let compute_s = it.products / self.rates.products + attention;
        let memory_s = it.traffic / self.rates.traffic;
        let demand = Demand { compute_s, memory_s, ..Demand::default() };
        self.asks(demand) + self.exchange(it.exchanged, it.gathered)
    }

    fn backward(&self, block: usize) -> f64 {
        let it = &self.blocks[block];
        let attention = it.attention_backward / self.rates.attention_backward;
        let compute_s = it.products_backward / self.rates.products + attention;
        let memory_s = it.traffic_backward / self.rates.traffic;
        let demand = Demand { compute_s, memory_s, ..Demand::default() };
        self.asks(demand) + self.exchange(it.exchanged_backward, it.gathered)
    }

    fn again(&self, block: usize) -> f64 {
        let compute_s = self.blocks[block].products_again / self.rates.products;
        self.asks(Demand { compute_s, ..Demand::default() })
    }

    fn gather(&self, bytes: usize) -> f64 {
        self.costs(self.place.network.gather(self.place.shards, bytes as f64))
    }

    fn reduce(&self, bytes: usize) -> f64 {
        let Place { network, shards, ordered } = self.place;
        let bytes = bytes as f64;
        self.costs(if ordered {
            network.exchange(shards, bytes)
        } else {
            network.reduce_scatter(shards, bytes)
        })
    }

    fn replicate(&self, bytes: usize) -> f64 {
        let Place { network, shards, ordered } = self.place;
        let replicas = network.replicas(shards);
        if replicas.ranks == 1 {
            return 0.0;
        }
        let bytes = bytes as f64;
        let reduce =
            if ordered { network.exchange(replicas, bytes) } else { network.reduce_scatter(replicas, bytes) };
        self.costs(reduce) + self.costs(network.gather(replicas, bytes))
    }

    fn memory(&self, bytes: usize) -> f64 {
        self.asks(Demand { memory_s: bytes as f64 / self.rates.memory, ..Demand::default() })
    }

    fn copy(&self, bytes: usize) -> f64 {
        let host_link_s = bytes as f64 / self.rates.host_link;
        self.demand.set(self.demand.get() + Demand { host_link_s, ..Demand::default() });
        host_link_s
    }

    fn slowdown(&self) -> f64 {
        self.rates.slowdown
    }
}

/// The micro-batches of a rank between two updates.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Update {
    /// Micro-batches of the same size, and its size.
    pub count: usize,
    pub size: PackedSize,
    /// A smaller one at the end.
    pub rest: Option<PackedSize>,
}

/// Times of a step's parts and their demands.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Trained {
    pub forward: (Elapsed, Demand),
    pub backward: (Elapsed, Demand),
    pub optimizer: (Elapsed, Demand),
    /// Whole weights for sampling after the step.
    pub gathered: (Elapsed, Demand),
    pub model_flops: f64,
}

impl Trained {
    /// Seconds of forward, backward and the optimizer.
    pub fn seconds(&self) -> f64 {
        self.forward.0.total + self.backward.0.total + self.optimizer.0.total
    }
}

/// Optimizer states that are on the host when a step begins.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Away {
    /// Bytes to load.
    pub bytes: usize,
}

/// Times of `updates` updates of `model`, and of gathering its weights afterwards. With `again` the step before it counts
/// too, whose gathers are in flight.
pub(super) fn trained(
    model: &impl Worked,
    config: ZeroConfig,
    (update, updates): (Update, usize),
    away: Away,
    at: (Place, Rates),
) -> Option<Trained> {
    let full = Passes::new(model, &update.size, config, at)?;
    let rest = update.rest.and_then(|size| Passes::new(model, &size, config, at));
    let sizes: Vec<&Passes> = std::iter::repeat_n(&full, update.count).chain(&rest).collect();
    let mut line = Timeline::new(model, config, at.0.shards.ranks, &full);
    let mut trained = Trained::default();
    let states_at = away.bytes as f64 / at.1.host_link;
    let add = |sum: &mut (Elapsed, Demand), elapsed: Elapsed, passes: &Passes| {
        sum.0.total += elapsed.total;
        sum.0.waited += elapsed.waited;
        sum.1 = sum.1 + passes.take_demand();
    };
    for _ in 0..updates {
        for &passes in &sizes {
            line.set_durations(passes);
            for _ in 0..full.together {
                let forward = line.time(|line| line.forward(true));
                add(&mut trained.forward, forward, passes);
                let backward = line.time(|line| line.backward());
                add(&mut trained.backward, backward, passes);
                trained.model_flops += passes.model_flops();
            }
        }
        line.set_durations(&full);
        // The part of the copies that the passes did not hide.
        let late = (states_at - line.now()).max(0.0);
        trained.optimizer.1 = trained.optimizer.1 + Demand { host_link_s: late, ..Demand::default() };
        let step = line.time(|line| line.step(states_at));
        add(&mut trained.optimizer, step, &full);
    }
    let gathered = line.time(|line| line.gather_all(|bytes| bytes as f64 / FRESH_BYTES_PER_S));
    add(&mut trained.gathered, gathered, &full);
    Some(trained)
}

/// Time of scoring micro-batches without a gradient.
pub(super) fn scored(
    model: &impl Worked,
    config: ZeroConfig,
    update: Update,
    at: (Place, Rates),
) -> Option<(Elapsed, Demand)> {
    let full = Passes::new(model, &update.size, config, at)?;
    let rest = update.rest.and_then(|size| Passes::new(model, &size, config, at));
    let mut line = Timeline::new(model, config, at.0.shards.ranks, &full);
    let mut demand = Demand::default();
    let elapsed = line.time(|line| {
        for passes in std::iter::repeat_n(&full, update.count).chain(&rest) {
            line.set_durations(passes);
            (0..passes.together).for_each(|_| line.forward(false));
            demand = demand + passes.take_demand();
        }
    });
    Some((elapsed, demand))
}

#[cfg(test)]
mod tests {
    use anyroll_models::{Decoder, DecoderConfig, PackedSize};
    use anyroll_strategy::{Precision, ZeroConfig, ZeroStage};

    use super::{Away, Place, Trained, Update, trained};
    use crate::plan::time::{
        network::Network,
        rates::{Rates, Sheet},
    };

    const SHEET: Sheet = Sheet { flops: 1e9, memory: 1e9, in_host: 1e6, host_link: 1e6 };

    /// Two micro-batches of a decoder on two hosts of two devices, whose shards are those of `sharers` ranks.
    fn at(stage: ZeroStage, sharers: usize, links: (bool, f64)) -> Trained {
        of(DecoderConfig::plain(2, 16, 4), PackedSize::uniform(2, 4, 5), (stage, sharers), links)
    }

    fn of(
        shape: DecoderConfig,
        size: PackedSize,
        (stage, sharers): (ZeroStage, usize),
        (ordered, between): (bool, f64),
    ) -> Trained {
        let shape = DecoderConfig { tie_word_embeddings: false, ..shape };
        let model = Decoder::new(shape, tch::Device::Cpu).unwrap();
        let rates = Rates::new(SHEET, 2, true);
        let network = Network { hosts: 2, devices_per_host: 2, in_host: 1e6, between };
        let place = Place { network, shards: network.neighbours(sharers).unwrap(), ordered };
        let config = ZeroConfig { precision: Precision::Bf16, ..stage.into() };
        let update = Update { count: 2, size, rest: None };
        trained(&model, config, (update, 1), Away::default(), (place, rates)).unwrap()
    }

    /// Bytes of the flat buffers in bf16: embedding, two layers and head, each parameter padded to 64 elements.
    const EMBEDDING: f64 = 2.0 * 256.0;
    const LAYER: f64 = 2.0 * (64.0 + 768.0 + 256.0 + 64.0 + 2048.0 + 1024.0);
    const HEAD: f64 = 2.0 * (64.0 + 192.0);

    fn close(found: f64, expected: f64) {
        assert!((found / expected - 1.0).abs() < 1e-9, "{found}, not {expected}");
    }

    #[test]
    fn a_step_sends_the_bytes_of_its_stage() {
        let all = EMBEDDING + 2.0 * LAYER + HEAD;
        let whole = at(ZeroStage::Zero3, 4, (false, 1e5));
        // Three of four parts of each unit, twice for two micro-batches. The head stays for its backward.
        close(whole.forward.1.between_hosts_s, 2.0 * 0.75 * all / 1e5);
        close(whole.backward.1.between_hosts_s, 2.0 * 0.75 * (all - HEAD + all) / 1e5);
        // The ranks' parts of the norm, eight bytes each.
        close(whole.optimizer.1.between_hosts_s, 0.75 * 32.0 / 1e5);
        // Slices for two ranks of the other host, of two ranks, in place of three parts of a ring.
        let ordered = at(ZeroStage::Zero3, 4, (true, 1e5));
        close(ordered.backward.1.between_hosts_s, 2.0 * (0.75 * (all - HEAD) + 2.0 * 0.5 * all) / 1e5);
        // Below stage 3 weights are gathered once, after the step.
        let one = at(ZeroStage::Zero1, 4, (false, 1e5));
        assert_eq!(one.forward.1.between_hosts_s, 0.0);
        close(one.optimizer.1.between_hosts_s, 0.75 * (32.0 + all) / 1e5);
    }

    #[test]
    fn rows_cross_hosts_by_heads_or_as_keys() {
        // Eight rows, of which each of four ranks has two; each runs two micro-batches of all of them, of two layers.
        let size = PackedSize::uniform(1, 4, 5).over(4);
        let passes = f64::from(4 * 2 * 2);
        let sent = |heads: i64| {
            let shape = DecoderConfig::plain(2, 4 * heads, heads);
            of(shape, size, (ZeroStage::Zero1, 4), (true, 1e5)).forward.1.between_hosts_s
        };
        // Three heads of four elements: keys and values of all rows, of which a ring passes three of four parts.
        close(sent(3), passes * 0.75 * f64::from(8 * 2 * 12 * 2) / 1e5);
        // Four heads: each of two ranks sends its rows' queries, keys, values and output, half of them to the other host.
        close(sent(4), passes * f64::from(2 * 2 * 4 * 16 * 2 / 2) / 1e5);
    }

    #[test]
    fn hybrid_shards_cross_hosts_once_per_step() {
        let all = EMBEDDING + 2.0 * LAYER + HEAD;
        let hybrid = at(ZeroStage::Zero3, 2, (false, 1e5));
        assert_eq!(hybrid.forward.1.between_hosts_s, 0.0);
        close(hybrid.forward.1.in_host_s, 2.0 * 0.5 * all / 1e6);
        // A shard in fp32 is as large as half of the weights twice; two groups of replicas reduce and gather half of it.
        assert_eq!(hybrid.backward.1.between_hosts_s, 0.0);
        close(hybrid.optimizer.1.between_hosts_s, 2.0 * 2.0 * 0.5 * all / 1e5);
        close(hybrid.forward.1.compute_s, at(ZeroStage::Zero3, 4, (false, 1e5)).forward.1.compute_s);
    }

    #[test]
    fn slower_links_are_never_faster() {
        for (stage, sharers) in [(ZeroStage::Zero0, 4), (ZeroStage::Zero2, 4), (ZeroStage::Zero3, 2)] {
            let seconds = [1e9, 1e7, 1e5, 1e3].map(|link| at(stage, sharers, (true, link)).seconds());
            assert!(seconds.is_sorted() && seconds[3] > 2.0 * seconds[0], "{stage:?}: {seconds:?}");
        }
    }
}

//! One rank of a benchmark of training and scoring: a decoder with random weights in the shape of a published
//! model.
//!
//! Usage: `train BACKEND RANK WORLD_SIZE PORT [key=value ...]`, one process per device, all with the same
//! port. Rank 0 prints one JSON object. `bench/train/run.py` starts the ranks and contains the commands. Keys
//! and their defaults:
//!
//! - `mode=train`: `train`, `score`, `generate`, or `ops`, which times each operation of a step separately;
//! - `model=0.5b`: see [`shapes`]; `seq=4096`, `micro_batch=4`: tokens per sequence and sequences per rank;
//! - `precision=bf16` (or `fp16`), `stage=1`, `recompute=none`, `deterministic=true`, `keep_logits=false`, `params=device` (or `host`),
//!   `moments=fp32` (or `8bit`);
//! - `sequence=1`: ranks that run their micro-batches together, each a slice of the rows; `kv_heads`: key heads, if not the
//!   model's own, such as a number that the ranks cannot share;
//! - `tensor=1`: ranks that hold every layer together, each some heads and columns;
//! - `experts=1`: ranks over which a mixture's experts are spread;
//! - `shards=WORLD_SIZE`: ranks over which states are sharded, with a replica in each such group;
//! - for `generate`: `together=1`, ranks that sample together; `batch=64` sequences of each such group, `prompt=256`,
//!   `tokens=256`;
//! - `steps=8`: timed steps, after two warm-up steps;
//! - `digest=true`: print a digest of all weights' bits; `offload=true`: time offloading and loading the
//!   optimizer's states.

#![forbid(unsafe_code)]

mod generate;
mod offload;
mod ops;
mod shapes;

use std::{collections::HashMap, ops::Range, sync::Arc, time::Duration};

use anyroll_backends::{
    CollectiveGroup, Device, DeviceId, Event, Rendezvous, Stream, TorchDevice, connect, open,
};
use anyroll_models::{
    Decoder, DecoderConfig, Model, PackedBatch, PackedSize, ParamSpec, Runs, Sequence, absent,
    init::WeightSource,
    model::{Scores, ScoresGrad},
};
use anyroll_strategy::{
    AdamW, Decays, Fp16Config, FrozenWeights, Mesh, Moments, ParamsOn, Precision, Recompute, State,
    StepStats, StepsOn, Zero, ZeroConfig, ZeroStage,
    plan::{self, Ranks},
};
use serde_json::{Value, json};
use tch::{Kind, Tensor};

const TIMEOUT: Duration = Duration::from_secs(120);
const ADAMW: AdamW =
    AdamW { betas: (0.9, 0.95), eps: 1e-8, weight_decay: 0.1, decays: Decays::Matrices, max_grad_norm: 1.0 };
const WARM_UP: usize = 2;

/// Command-line options.
struct Options(HashMap<String, String>);

impl Options {
    fn text<'a>(&'a self, key: &str, otherwise: &'a str) -> &'a str {
        self.0.get(key).map_or(otherwise, String::as_str)
    }

    fn number(&self, key: &str, otherwise: usize) -> usize {
        self.0.get(key).map_or(otherwise, |text| text.parse().expect("a number"))
    }

    fn switch(&self, key: &str, otherwise: bool) -> bool {
        self.0.get(key).map_or(otherwise, |text| text.parse().expect("true or false"))
    }
}

fn main() {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    let [backend, rank, world_size, port, options @ ..] = &*arguments else {
        panic!("usage: train BACKEND RANK WORLD_SIZE PORT [key=value ...]");
    };
    let pair = |option: &String| option.split_once('=').map(|(key, value)| (key.into(), value.into()));
    let options =
        Options(options.iter().map(|option| pair(option).expect("options are key=value")).collect());
    let number = |text: &String| text.parse::<usize>().expect("a number");
    let (rank, world_size) = (number(rank), number(world_size));
    let device = open(DeviceId { backend: backend.parse().expect("a backend"), ordinal: rank }).unwrap();
    let rendezvous = Rendezvous::on_this_host(rank, world_size, port.parse().expect("a port"), TIMEOUT);
    let comm = connect(&*device, &rendezvous).unwrap();
    let group = CollectiveGroup::new("world", comm, &device, TIMEOUT).unwrap();
    let result = match options.text("mode", "train") {
        "train" => train(&device, group, &options),
        "generate" => generate::times(&device, group, &options),
        "score" => score(&device, group, &options),
        "ops" => ops::times(&device, &options),
        other => panic!("no mode {other:?}"),
    };
    if rank == 0 {
        println!("{result}");
    }
}

/// Returns the planner's estimate of the run's memory in GiB.
fn planned_gib(
    zero: &Zero<Decoder>,
    batch: &PackedBatch,
    device: &Arc<dyn Device>,
    options: &Options,
) -> f64 {
    let (config, group) = (strategy(options), zero.group());
    let [tensor, experts] = ["tensor", "experts"].map(|name| options.number(name, 1));
    let part = match (tensor, experts) {
        (1, 1) => None,
        (1, _) => zero.model().spread_experts(&absent(experts)).unwrap(),
        _ => Some(zero.model().split_over(&absent(tensor)).unwrap()),
    };
    let model = part.as_ref().unwrap_or(zero.model());
    let ranks = Ranks {
        tensor,
        experts,
        world_size: group.world_size(),
        shards: options.number("shards", group.world_size()),
        granularity_bytes: device.arena_granularity_bytes(),
        sums_in_rank_order: group.sums_in_rank_order(),
    };
    let longest = options.number("seq", 4096);
    let tokens = batch.tokens() as usize;
    let size = PackedSize::uniform(tokens / longest, 1, longest).over(options.number("sequence", 1));
    let runs = Runs { dtype: config.precision.dtype(), on_host: device.id().backend.is_host() };
    let held = plan::held(model, config, true, ranks).device();
    let activations = plan::training_activations(model, &size, config, runs);
    let driver = if runs.on_host { 0 } else { plan::driver_bytes(ranks.world_size) };
    (held + activations + driver) as f64 / f64::from(1 << 30)
}

/// Runs steps of next-token prediction, each on the same tokens.
fn train(device: &Arc<dyn Device>, group: CollectiveGroup, options: &Options) -> Value {
    let rank = group.rank();
    let world_size = group.world_size();
    let (mut zero, batch) = prepare(device, group, options, Some(ADAMW));
    let measures_offload = options.switch("offload", false);
    if measures_offload {
        zero.prepare_offload(&[State::Optimizer]);
    }
    let compute = Stream::torch(device).unwrap();
    let gradient = -1.0 / (batch.targets() * world_size as i64) as f64;
    let timed = options.number("steps", 8);
    let mut steps: Vec<Step> =
        (0..WARM_UP + timed).map(|_| step(&mut zero, &batch, gradient, &compute)).collect();
    let end = compute.record_timed().unwrap();
    compute.synchronize().unwrap();
    let used = used_gib(device);
    let norms: Vec<Option<f64>> =
        steps.iter().map(|step| zero.finish_step(&step.stats).unwrap().grad_norm).collect();
    let losses: Vec<f64> = steps.iter().map(|step| step.loss.double_value(&[])).collect();
    let mut ends: Vec<Event> = steps.iter().skip(1).map(|step| step.start.clone()).collect();
    ends.push(end);
    let phases: Vec<[f64; 4]> = steps
        .drain(..)
        .zip(&ends)
        .skip(WARM_UP)
        .map(|(step, end)| {
            let marks = [&step.start, &step.backward, &step.reduced, end];
            let between = |a: usize, b: usize| marks[a].elapsed(marks[b]).unwrap().as_secs_f64() * 1e3;
            [between(0, 1), between(1, 2), between(2, 3), between(0, 3)]
        })
        .collect();
    let [forward, backward, optimizer, whole] =
        [0, 1, 2, 3].map(|phase| median(phases.iter().map(|phases| phases[phase]).collect()));
    let digest = options.switch("digest", false);
    let offload = measures_offload.then(|| offload::times(&mut zero, &compute));
    json!({
        "model": options.text("model", "0.5b"), "stage": options.number("stage", 1), "world_size": world_size,
        "recompute": options.text("recompute", "none"), "deterministic": options.text("deterministic", "true"),
        "keep_logits": options.text("keep_logits", "false"),
        "tokens": batch.tokens(), "tokens_per_s_per_device": batch.tokens() as f64 / whole * 1e3,
        "step_ms": whole, "forward_ms": forward, "backward_ms": backward, "optimizer_ms": optimizer,
        "params": options.text("params", "device"), "used_gib": used,
        "planned_gib": planned_gib(&zero, &batch, device, options), "losses": losses, "norms": norms, "rank": rank,
        "weights": digest.then(|| weights_digest(&mut zero)), "offload": offload,
    })
}

/// Events and values of a step, read after the last one.
struct Step {
    start: Event,
    backward: Event,
    reduced: Event,
    stats: StepStats,
    loss: Tensor,
}

fn step(zero: &mut Zero<Decoder>, batch: &PackedBatch, gradient: f64, compute: &Stream) -> Step {
    let start = compute.record_timed().unwrap();
    let mut middle = None;
    let loss = |scores: &Scores| {
        middle = Some((compute.record_timed().unwrap(), scores.logprobs.mean(Kind::Double)));
        Ok(ScoresGrad { logprobs: scores.logprobs.full_like(gradient), entropy: None, divergence: None })
    };
    zero.accumulate(batch, loss).unwrap();
    let reduced = compute.record_timed().unwrap();
    let stats = zero.step(1e-5).unwrap();
    let (backward, loss) = middle.expect("the loss closure ran");
    Step { start, backward, reduced, stats, loss: -loss }
}

/// Computes the log-probabilities of every token, without a gradient.
fn score(device: &Arc<dyn Device>, group: CollectiveGroup, options: &Options) -> Value {
    let (mut zero, batch) = prepare(device, group, options, None);
    let compute = Stream::torch(device).unwrap();
    let mut marks = vec![];
    for _ in 0..WARM_UP + options.number("steps", 8) {
        marks.push(compute.record_timed().unwrap());
        drop(zero.score(&batch).unwrap());
    }
    marks.push(compute.record_timed().unwrap());
    compute.synchronize().unwrap();
    let times =
        marks[WARM_UP..].windows(2).map(|pair| pair[0].elapsed(&pair[1]).unwrap().as_secs_f64() * 1e3);
    let whole = median(times.collect());
    json!({
        "model": options.text("model", "0.5b"), "mode": "score", "tokens": batch.tokens(), "score_ms": whole,
        "tokens_per_s_per_device": batch.tokens() as f64 / whole * 1e3, "used_gib": used_gib(device),
    })
}

fn prepare(
    device: &Arc<dyn Device>,
    group: CollectiveGroup,
    options: &Options,
    adamw: Option<AdamW>,
) -> (Zero<Decoder>, PackedBatch) {
    let at = device.torch_device().map(TorchDevice::tch).expect("libtorch computes on it");
    let (seq, micro_batch) = (options.number("seq", 4096), options.number("micro_batch", 4));
    let shape = shapes::decoder(options.text("model", "0.5b"), seq as i64);
    let kv_heads = options.number("kv_heads", shape.num_key_value_heads as usize);
    let shape = DecoderConfig { num_key_value_heads: kv_heads as i64, ..shape };
    let vocab = shape.vocab_size;
    let model = Decoder::new(shape, at)
        .unwrap()
        .deterministic(options.switch("deterministic", true))
        .keeping_logits(options.switch("keep_logits", false));
    let rank = group.rank() as u64;
    let tokens: Vec<i64> = (0..(micro_batch * (seq + 1)) as u64)
        .map(|index| (mix(index + (rank << 32)) % vocab as u64) as i64)
        .collect();
    let sequences: Vec<Sequence> =
        tokens.chunks(seq + 1).map(|tokens| Sequence { tokens, prompt_len: 1 }).collect();
    let batch = PackedBatch::new(&sequences, 1.0, at).unwrap();
    let shards = options.number("shards", group.world_size());
    let mesh = Mesh::from(group)
        .in_tensor_groups(options.number("tensor", 1))
        .unwrap()
        .in_sequence_groups(options.number("sequence", 1))
        .unwrap()
        .in_shard_groups(shards)
        .unwrap()
        .in_expert_groups(options.number("experts", 1))
        .unwrap();
    let zero = Zero::from_source(Arc::new(model), strategy(options), adamw, device, mesh, &Noise).unwrap();
    (zero, batch)
}

fn strategy(options: &Options) -> ZeroConfig {
    ZeroConfig {
        stage: ZeroStage::try_from(options.number("stage", 1) as u64).expect("a stage"),
        precision: match options.text("precision", "bf16") {
            "bf16" => Precision::Bf16,
            "fp16" => Precision::Fp16(Fp16Config::default()),
            other => panic!("no precision {other:?}"),
        },
        recompute: match options.text("recompute", "none") {
            "none" => Recompute::None,
            "selective" => Recompute::Selective,
            "full" => Recompute::Full,
            other => panic!("no recompute {other:?}"),
        },
        frozen: FrozenWeights::Precision,
        moments: match options.text("moments", "fp32") {
            "fp32" => Moments::Fp32,
            "8bit" => Moments::EightBit,
            other => panic!("no moments {other:?}"),
        },
        steps_on: StepsOn::Device,
        params_on: match options.text("params", "device") {
            "device" => ParamsOn::Device,
            "host" => ParamsOn::Host,
            other => panic!("no params {other:?}"),
        },
    }
}

/// Weights of a size that a model can train with, generated faster than a device reads them. For gigabytes of
/// weights, the library's own generator would take most of the time.
struct Noise;

impl WeightSource for Noise {
    fn read(&self, spec: &ParamSpec, range: Range<usize>, values: &mut [f32]) -> anyroll_models::Result<()> {
        let is_matrix = spec.shape.len() == 2;
        let salt = spec.name.bytes().fold(0, |hash, byte| mix(hash ^ u64::from(byte)));
        let threads = std::thread::available_parallelism().map_or(1, usize::from);
        let chunk = values.len().div_ceil(threads).max(1);
        std::thread::scope(|scope| {
            for (index, part) in values.chunks_mut(chunk).enumerate() {
                let first = (range.start + index * chunk) as u64;
                scope.spawn(move || {
                    for (value, place) in part.iter_mut().zip(first..) {
                        let uniform = (mix(place ^ salt) >> 40) as f32 / (1 << 24) as f32 - 0.5;
                        *value = if is_matrix { uniform * 0.07 } else { 1.0 };
                    }
                });
            }
        });
        Ok(())
    }
}

/// Finalizer of MurmurHash3 (Appleby).
fn mix(mut x: u64) -> u64 {
    x = (x ^ (x >> 33)).wrapping_mul(0xff51_afd7_ed55_8ccd);
    x = (x ^ (x >> 33)).wrapping_mul(0xc4ce_b9fe_1a85_ec53);
    x ^ (x >> 33)
}

/// Returns the memory in use as the driver reports it, including libtorch's reserve and the context.
fn used_gib(device: &Arc<dyn Device>) -> f64 {
    let memory = device.memory_info().unwrap();
    (memory.total_bytes - memory.free_bytes) as f64 / f64::from(1 << 30)
}

/// Returns a number that changes if any bit of a weight does: the sum of the bits, each times a factor of its
/// position.
fn weights_digest(zero: &mut Zero<Decoder>) -> i64 {
    const CHUNK: i64 = 1 << 26;
    let weights = zero.weights().unwrap();
    weights.iter().flatten().fold(0, |digest: i64, tensor| {
        let bits = tensor.view(-1).view_dtype(Kind::Int16);
        (0..bits.numel() as i64).step_by(CHUNK as usize).fold(digest, |digest, start| {
            let part = bits.narrow(0, start, CHUNK.min(bits.numel() as i64 - start)).to_kind(Kind::Int64);
            let factors = part.ones_like().cumsum(0, Kind::Int64).remainder(8191);
            digest.wrapping_mul(31).wrapping_add((part * factors).sum(Kind::Int64).int64_value(&[]))
        })
    })
}

fn median(mut values: Vec<f64>) -> f64 {
    values.sort_by(f64::total_cmp);
    values[values.len() / 2]
}

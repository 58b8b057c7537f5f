//! A small decoder, its training, and ranks that are threads.

use std::{
    ops::{Range, RangeInclusive},
    sync::Arc,
    time::Duration,
};

use anyroll_backends::{BackendKind, CollectiveGroup, Device, DeviceId, faults, on_threads, open};
use anyroll_models::{
    Decoder, DecoderConfig, ExpertsConfig, NormPlaces, PackedBatch, QkNorm, ScoresGrad, Sequence,
    SlidingWindow,
};
use anyroll_strategy::{AdamW, Decays, State, Zero, ZeroConfig, ZeroStage};
use tch::{Kind, Tensor};

pub const STAGES: [ZeroStage; 4] = [ZeroStage::Zero0, ZeroStage::Zero1, ZeroStage::Zero2, ZeroStage::Zero3];
pub const ADAMW: AdamW =
    AdamW { betas: (0.9, 0.98), eps: 1e-8, weight_decay: 0.1, decays: Decays::Matrices, max_grad_norm: 0.05 };
/// Divisible by every world size used here, so that ranks have equally many micro-batches.
const SEQUENCES: usize = 12;

/// Returns a decoder with a tied head, or one with its own head and with experts around a dense layer.
pub fn decoder(tied: bool) -> Arc<Decoder> {
    let experts = ExpertsConfig::plain(vec![true, false, true], 4, 2, 10);
    new(DecoderConfig { experts: (!tied).then_some(experts), ..shape(tied) })
}

/// Returns the same decoder without experts. Rounding may make a router choose other experts, so precisions
/// would not agree with them.
pub fn dense(tied: bool) -> Arc<Decoder> {
    new(shape(tied))
}

fn new(config: DecoderConfig) -> Arc<Decoder> {
    Arc::new(Decoder::new(config, tch::Device::Cpu).unwrap())
}

fn shape(tied: bool) -> DecoderConfig {
    DecoderConfig {
        vocab_size: 11,
        num_key_value_heads: 1,
        intermediate_size: 20,
        max_position_embeddings: 16,
        qkv_bias: true,
        initializer_range: 0.3,
        qk_norm: Some(QkNorm::PerHead),
        tie_word_embeddings: tied,
        ..DecoderConfig::plain(3, 12, 2)
    }
}

/// Shapes with four heads of queries: a plain one; like Qwen 2.5, with two key heads; like Qwen 3, with experts; and like Gemma 3.
pub fn four_heads() -> [DecoderConfig; 4] {
    let plain = DecoderConfig {
        vocab_size: 13,
        intermediate_size: 20,
        initializer_range: 0.3,
        ..DecoderConfig::plain(2, 16, 4)
    };
    let experts = ExpertsConfig::plain(vec![true, false], 4, 2, 12);
    let window = SlidingWindow { tokens: 4, layers: vec![true, false] };
    let qwen2 =
        DecoderConfig { num_key_value_heads: 2, qkv_bias: true, tie_word_embeddings: true, ..plain.clone() };
    let qwen3 = DecoderConfig { qk_norm: Some(QkNorm::PerHead), experts: Some(experts), ..plain.clone() };
    let gemma3 = DecoderConfig {
        num_key_value_heads: 1,
        head_dim: 6,
        qk_norm: Some(QkNorm::PerHead),
        norms: NormPlaces::Both,
        sliding_window: Some(window),
        ..plain.clone()
    };
    [plain, qwen2, qwen3, gemma3]
}

/// Returns a strategy with the same weights and optimizer states at every configuration.
pub fn zero(
    config: impl Into<ZeroConfig>,
    tied: bool,
    device: &Arc<dyn Device>,
    group: CollectiveGroup,
) -> Zero<Decoder> {
    Zero::new(decoder(tied), config, Some(ADAMW), device, group, 7).unwrap()
}

/// Runs `rank` on `world_size` threads, each with its own group, and returns their results. With `harsh`,
/// streams are late at random, and freed memory holds NaN when it is reused.
pub fn ranks<R: Send>(
    world_size: usize,
    harsh: bool,
    rank: impl Fn(&Arc<dyn Device>, CollectiveGroup) -> R + Sync,
) -> Vec<R> {
    let open = |ordinal: usize| {
        let device = open(DeviceId { backend: BackendKind::CPU, ordinal }).unwrap();
        match harsh {
            false => device,
            true => {
                let device = faults::Poisoned::wrap(device);
                faults::Delayed::wrap(device, ordinal as u64, Duration::from_micros(500))
            }
        }
    };
    on_threads(world_size, open, rank)
}

/// Runs steps on the mean negative log-likelihood. Returns the gradient norms, infinite for a skipped step.
pub fn train(zero: &mut Zero<Decoder>, steps: Range<u64>, micro_batches: usize) -> Vec<f64> {
    train_with(zero, steps, micro_batches, |_| {})
}

/// Like [`train`]; calls `between` after every micro-batch and every step.
pub fn train_with(
    zero: &mut Zero<Decoder>,
    steps: Range<u64>,
    micro_batches: usize,
    mut between: impl FnMut(&mut Zero<Decoder>),
) -> Vec<f64> {
    let (rank, world_size) = (zero.group().rank(), zero.group().world_size());
    let mine = SEQUENCES / world_size;
    let micro = SEQUENCES / micro_batches;
    let mut norms = Vec::new();
    for step in steps {
        let sequences: Vec<Vec<i64>> = (0..SEQUENCES as u64).map(|index| sequence(step, index)).collect();
        let targets: usize = sequences.iter().map(|sequence| sequence.len() - 2).sum();
        for part in sequences[rank * mine..(rank + 1) * mine].chunks(micro.min(mine)) {
            accumulate(zero, part, -1.0 / targets as f64);
            between(zero);
        }
        let stats = zero.step(1e-2).unwrap();
        between(zero);
        norms.push(zero.finish_step(&stats).unwrap().grad_norm.unwrap_or(f64::INFINITY));
    }
    norms
}

/// Accumulates one micro-batch in which every target's log-prob has this gradient.
pub fn accumulate(zero: &mut Zero<Decoder>, sequences: &[Vec<i64>], gradient: f64) {
    zero.accumulate(&batch(sequences), |scores| {
        let logprobs = Tensor::full_like(&scores.logprobs, gradient);
        Ok(ScoresGrad { logprobs, entropy: None, divergence: None })
    })
    .unwrap();
}

pub fn batch(sequences: &[Vec<i64>]) -> PackedBatch {
    let sequences: Vec<Sequence> =
        sequences.iter().map(|tokens| Sequence { tokens, prompt_len: 2 }).collect();
    PackedBatch::new(&sequences, 1.0, tch::Device::Cpu).unwrap()
}

/// Returns tokens that depend only on the step and the sequence; lengths differ.
pub fn sequence(step: u64, index: u64) -> Vec<i64> {
    (0..4 + index % 7).map(|t| ((step * 7 + index * 5 + t * t * 3 + t) % 11) as i64).collect()
}

/// Returns all weights in a row.
pub fn floats(zero: &mut Zero<Decoder>) -> Vec<f32> {
    let weights = zero.weights().unwrap();
    let flat = |tensor: &Tensor| Vec::<f32>::try_from(tensor.to_kind(Kind::Float).reshape([-1])).unwrap();
    weights.iter().flatten().flat_map(flat).collect()
}

/// Returns the bits of all weights: equal only if nothing differs, including NaN.
pub fn values(zero: &mut Zero<Decoder>) -> Vec<u32> {
    floats(zero).iter().map(|value| value.to_bits()).collect()
}

/// Returns the norms and weights of four steps, which are the same on all ranks.
pub fn trained(
    config: impl Into<ZeroConfig>,
    world_size: usize,
    tied: bool,
    harsh: bool,
    micro_batches: usize,
) -> (Vec<f64>, Vec<u32>) {
    let config = config.into();
    let mut results = ranks(world_size, harsh, |device, group| {
        let mut zero = zero(config, tied, device, group);
        let norms = train(&mut zero, 0..4, micro_batches);
        (norms, values(&mut zero))
    });
    let first = results.swap_remove(0);
    assert!(results.iter().all(|other| *other == first), "ranks differ at {config:?}");
    first
}

/// Panics unless the planned bytes are within 5% of the measured ones.
#[track_caller]
pub fn assert_planned(planned: usize, measured: usize, what: &str) {
    assert_planned_within(0.95..=1.05, planned, measured, what);
}

/// Panics unless the ratio of planned to measured bytes is in `range`.
#[track_caller]
pub fn assert_planned_within(range: RangeInclusive<f64>, planned: usize, measured: usize, what: &str) {
    let ratio = planned as f64 / measured as f64;
    assert!(range.contains(&ratio), "{what}: {planned} planned, {measured} measured");
}

/// Returns the norms and weights of three steps of `new` on a fault-injecting device, with all states offloaded in between.
/// They are the same on every rank.
pub fn trained_and_offloaded(
    world_size: usize,
    what: &str,
    new: impl Fn(&Arc<dyn Device>, CollectiveGroup) -> Zero<Decoder> + Sync,
) -> (Vec<f64>, Vec<u32>) {
    let mut results = ranks(world_size, true, |device, group| {
        let mut zero = new(device, group);
        let all = [State::Optimizer, State::Gradients, State::Params];
        let norms = train_with(&mut zero, 0..3, 12, |zero| {
            zero.offload_states(&all).unwrap();
            zero.load_states(&all).unwrap();
        });
        (norms, values(&mut zero))
    });
    let first = results.swap_remove(0);
    assert!(results.iter().all(|other| *other == first), "ranks differ at {what}");
    first
}

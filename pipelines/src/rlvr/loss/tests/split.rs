//! Every split of a mini-batch into micro-batches and ranks has the same gradient.

use std::sync::Arc;

use anyroll_backends::CollectiveGroup;
use anyroll_models::{Decoder, DecoderConfig, Model, PackedBatch, Sequence, ValueModel};
use anyroll_strategy::{AdamW, Decays, Zero, ZeroStage};

use super::*;
use crate::train::{Place, ranks};

const SEQUENCES: usize = 12;
const PROMPT_LEN: usize = 2;

/// AdamW with steps nearly proportional to the gradient, so that different gradients give different weights.
pub(super) const NEARLY_SGD: AdamW = AdamW {
    betas: (0.0, 0.0),
    eps: 1.0,
    weight_decay: 0.0,
    decays: Decays::Matrices,
    max_grad_norm: f64::INFINITY,
};

#[test]
fn any_split_gives_the_same_gradient() {
    let whole = updates(1, SEQUENCES);
    for (world_size, micro_batch_size) in [(1, 1), (1, 5), (2, 6), (2, 4), (4, 3), (4, 1)] {
        let split = updates(world_size, micro_batch_size);
        for (index, (split, whole)) in split.iter().zip(&whole).enumerate() {
            let what = format!("{world_size} ranks, micro-batches of {micro_batch_size}, case {index}");
            assert_near(&what, split, whole);
        }
    }
}

/// The critic's loss, with a bound that applies to some tokens.
#[test]
fn any_split_gives_the_critic_the_same_gradient() {
    for aggregation in AGGREGATIONS {
        let update = |world_size, micro_batch_size| {
            let mut of_ranks = ranks(world_size, |place| value_update(aggregation, place, micro_batch_size));
            of_ranks.swap_remove(0)
        };
        let whole = update(1, SEQUENCES);
        for (world_size, micro_batch_size) in [(1, 5), (2, 4), (4, 1), (4, 3)] {
            let what = format!("{world_size} ranks, micro-batches of {micro_batch_size}, {aggregation:?}");
            assert_near(&what, &update(world_size, micro_batch_size), &whole);
        }
    }
}

/// Compares the weights and the gradient's norm, which must not be 0.
pub(super) fn assert_near(what: &str, split: &(f64, Vec<f32>), whole: &(f64, Vec<f32>)) {
    assert!(whole.0 > 1e-3, "{what}: no gradient");
    assert!((split.0 - whole.0).abs() < 1e-5 * whole.0, "{what}: norm {} is not {}", split.0, whole.0);
    for (split, whole) in split.1.iter().zip(&whole.1) {
        assert!((split - whole).abs() < 1e-6, "{what}: {split} is not {whole}");
    }
}

fn value_update(
    aggregation: Aggregation,
    Place { device, mesh }: Place,
    micro_batch_size: usize,
) -> (f64, Vec<f32>) {
    let (sequences, lengths) = sequences();
    let tokens: i64 = lengths.iter().sum();
    let old_values = wave(tokens, 1.9, 0.6, 0.1);
    let targets = ValueTargets {
        returns: wave(tokens, 0.9, 0.7, 0.4),
        old_values,
        token_weights: Tensor::from_slice(&token_weights(aggregation, &lengths)),
        lengths,
    };
    let all: Vec<f64> = targets.lengths.iter().map(|&length| length as f64).collect();
    let count = count(aggregation, &all);
    let model = Arc::new(ValueModel::new(decoder().config().clone(), tch::Device::Cpu).unwrap());
    let own = own(mesh.world());
    let mut zero = Zero::new(model, ZeroStage::Zero1, Some(NEARLY_SGD), &device, mesh, 0).unwrap();
    let mut clipped = 0.0;
    // The second update changes the blocks, since the head starts at 0.
    let mut norm = 0.0;
    for _ in 0..2 {
        let mut stats = ValueStats::default();
        for part in parts(own.clone(), micro_batch_size) {
            let targets = targets.part(part.clone()).unwrap();
            zero.accumulate(&pack(&sequences[part]), |values| {
                Ok(value_loss(Some(0.2), values, &targets, count, &mut stats).unwrap())
            })
            .unwrap();
        }
        let step = zero.step(1.0).unwrap();
        norm = zero.finish_step(&step).unwrap().grad_norm.unwrap();
        clipped += stats.read().unwrap().clipped;
    }
    assert!(clipped > 0.0 && clipped < 2.0 * tokens as f64, "{clipped} tokens are clipped");
    (norm, flat(&mut zero))
}

/// The gradient's norm and the weights after an update, for each loss and aggregation.
fn updates(world_size: usize, micro_batch_size: usize) -> Vec<(f64, Vec<f32>)> {
    let mut of_ranks = ranks(world_size, |place| {
        let mut found = Vec::new();
        for loss in losses() {
            for aggregation in AGGREGATIONS {
                let algorithm =
                    AlgorithmConfig { loss, aggregation, kl_coef: 0.1, ..AlgorithmConfig::default() };
                found.push(update(&algorithm, place.clone(), micro_batch_size));
            }
        }
        found
    });
    of_ranks.swap_remove(0)
}

fn update(
    algorithm: &AlgorithmConfig,
    Place { device, mesh }: Place,
    micro_batch_size: usize,
) -> (f64, Vec<f32>) {
    let own = own(mesh.world());
    let mut zero = Zero::new(decoder(), ZeroStage::Zero0, Some(NEARLY_SGD), &device, mesh, 0).unwrap();
    let (sequences, lengths) = sequences();
    let all: Vec<f64> = lengths.iter().map(|&length| length as f64).collect();
    let count = count(algorithm.aggregation, &all);
    let targets = targets(algorithm.aggregation, lengths);
    for part in parts(own, micro_batch_size) {
        let batch = pack(&sequences[part.clone()]);
        let targets = targets.part(part).unwrap();
        let mut stats = LossStats::default();
        zero.accumulate(&batch, |scores| {
            Ok(policy_loss(algorithm, scores, &targets, count, &mut stats).unwrap())
        })
        .unwrap();
    }
    let stats = zero.step(1.0).unwrap();
    let norm = zero.finish_step(&stats).unwrap().grad_norm.unwrap();
    (norm, flat(&mut zero))
}

/// The sequences of a rank.
pub(super) fn own(group: &CollectiveGroup) -> Range<usize> {
    let own = SEQUENCES / group.world_size();
    group.rank() * own..(group.rank() + 1) * own
}

pub(super) fn parts(own: Range<usize>, size: usize) -> impl Iterator<Item = Range<usize>> {
    own.clone().step_by(size).map(move |start| start..(start + size).min(own.end))
}

fn pack(sequences: &[Vec<i64>]) -> PackedBatch {
    let packed: Vec<Sequence> =
        sequences.iter().map(|tokens| Sequence { tokens, prompt_len: PROMPT_LEN }).collect();
    PackedBatch::new(&packed, 1.0, tch::Device::Cpu).unwrap()
}

/// All weights, concatenated.
pub(super) fn flat<M: Model>(zero: &mut Zero<M>) -> Vec<f32> {
    let weights = zero.weights().unwrap();
    let flat: Vec<Tensor> = weights.iter().flatten().map(|weight| weight.flatten(0, -1)).collect();
    Tensor::cat(&flat, 0).try_into().unwrap()
}

pub(super) fn decoder() -> Arc<Decoder> {
    let config = DecoderConfig {
        vocab_size: 11,
        intermediate_size: 20,
        max_position_embeddings: 16,
        initializer_range: 0.3,
        ..DecoderConfig::plain(1, 12, 2)
    };
    Arc::new(Decoder::new(config, tch::Device::Cpu).unwrap())
}

/// All sequences, and the lengths of their completions.
fn sequences() -> (Vec<Vec<i64>>, Vec<i64>) {
    let sequences: Vec<Vec<i64>> = (0..SEQUENCES).map(sequence).collect();
    let lengths = sequences.iter().map(|sequence| (sequence.len() - PROMPT_LEN) as i64).collect();
    (sequences, lengths)
}

pub(super) fn wave(tokens: i64, speed: f64, size: f64, middle: f64) -> Tensor {
    (Tensor::arange(tokens, (tch::Kind::Float, tch::Device::Cpu)) * speed).sin() * size + middle
}

/// Sequences of different lengths.
fn sequence(index: usize) -> Vec<i64> {
    let length = PROMPT_LEN + 1 + index * 5 % 7;
    (0..length).map(|place| ((index * 7 + place * 3 + place * place) % 11) as i64).collect()
}

/// Different advantages and log-probs for each sequence, with some ratios beyond every bound.
fn targets(aggregation: Aggregation, lengths: Vec<i64>) -> Targets {
    let tokens: i64 = lengths.iter().sum();
    let wave = |speed, size, middle| wave(tokens, speed, size, middle);
    let of_sequences: Vec<f32> = lengths
        .iter()
        .enumerate()
        .flat_map(|(index, &length)| std::iter::repeat_n((index as f32 * 2.3).cos(), length as usize))
        .collect();
    Targets {
        rollout_logprobs: wave(1.1, 0.8, -2.3),
        old_logprobs: wave(1.3, 0.8, -2.4),
        advantages: Tensor::from_slice(&of_sequences),
        ref_logprobs: Some(wave(0.7, 0.5, -2.4)),
        policy_weights: Some(wave(1.7, 0.3, 1.0)),
        token_weights: Tensor::from_slice(&token_weights(aggregation, &lengths)),
        lengths,
    }
}

//! Ranks that sample together, each with a part of every matrix, compared with a rank that has all of them.

use std::{ops::Range, sync::Arc};

use anyroll_backends::{DType, Stream};
use anyroll_models::{
    Completion, Decoder, DecoderConfig, Engine, ExpertParts, KvCache, LoraConfig, LoraTarget, Multipliers,
    ParamSpec, QkNorm, Request, Sample, SamplingParams,
    generation::{Limits, Speculation},
    init::WeightSource,
};
use anyroll_strategy::{Weights, Zero, ZeroStage, neighbours, peers};
use tch::Tensor;

use crate::harness::{STAGES, four_heads, ranks};

const SPECULATION: Speculation = Speculation { tokens: 3, longest: 3, shortest: 1, sequences: 5 };

/// Weights that differ from element to element, also where adapters begin with zeros.
#[derive(Debug)]
struct Noise;

impl WeightSource for Noise {
    fn read(&self, spec: &ParamSpec, range: Range<usize>, values: &mut [f32]) -> anyroll_models::Result<()> {
        let salt = spec.name.bytes().fold(7, |sum: usize, byte| sum * 31 % 1009 + usize::from(byte));
        let center = if spec.shape.len() == 1 && spec.name.contains("norm") { 1.0 } else { 0.0 };
        for (value, at) in values.iter_mut().zip(range) {
            *value = center + 0.6 * ((at * 37 + salt) as f32 * 0.7).sin();
        }
        Ok(())
    }
}

/// Decoders like Qwen 2.5, with two key heads; like Qwen 3, with experts, without and with adapters of every matrix; like Gemma 3;
/// and like Granite, with biases and adapters.
fn models() -> [(&'static str, Arc<Decoder>); 5] {
    let [plain, qwen2, qwen3, gemma3] = four_heads();
    let multipliers =
        Multipliers { residual: 0.5, embedding: 2.0, logits_scaling: 1.5, ..Multipliers::default() };
    let granite = DecoderConfig { qkv_bias: true, o_bias: true, mlp_bias: true, multipliers, ..plain };
    let lora = LoraConfig::new(3, 4.0, LoraTarget::ALL.to_vec());
    let device = tch::Device::Cpu;
    let whole = |config: DecoderConfig| Arc::new(Decoder::new(config, device).unwrap());
    [
        ("Qwen 2.5", whole(qwen2)),
        ("Qwen 3", whole(qwen3.clone())),
        ("Qwen 3 with adapters", Arc::new(Decoder::with_lora(qwen3, &lora, device).unwrap())),
        ("Gemma 3", whole(gemma3)),
        ("Granite with adapters", Arc::new(Decoder::with_lora(granite, &lora, device).unwrap())),
    ]
}

/// Greedy and drawn completions of short prompts, and of one that is longer than a pass.
fn completions(
    decoder: &Arc<Decoder>,
    weights: Weights,
    compute: &Stream,
    speculation: Option<Speculation>,
) -> Vec<Completion> {
    let cache = KvCache::new(decoder.config(), 30, DType::F32, compute).unwrap();
    let limits = Limits { prefill_tokens: 16, speculation, ..Limits::new(5) };
    let mut engine = Engine::new(decoder.clone(), weights, 0, cache, limits).unwrap();
    for (prompt, temperature) in
        [(vec![1, 2, 3], 1.0), (vec![12; 4], 0.0), ((0..37).map(|at| at % 13).collect(), 0.7)]
    {
        let params = SamplingParams { temperature, max_new_tokens: 8, ..SamplingParams::default() };
        let samples = (0..3).map(|seed| Sample { seed, ..Sample::default() }).collect();
        engine
            .submit(Request { prompt, params: Arc::new(params), stop: None, format: None, samples })
            .unwrap();
    }
    let mut all = Vec::new();
    engine.run(|id, completion| all.push((id, completion))).unwrap();
    all.sort_by_key(|(id, _)| *id);
    all.into_iter().map(|(_, completion)| completion).collect()
}

/// The completions of `together` of `world_size` ranks, of each rank, for each model: as they are, and with merged
/// adapters and speculation.
fn split(
    world_size: usize,
    together: usize,
    stage: ZeroStage,
    experts: ExpertParts,
) -> Vec<Vec<[Vec<Completion>; 2]>> {
    ranks(world_size, stage == ZeroStage::Zero2, |device, group| {
        let compute = Stream::torch(device).unwrap();
        let group_of = neighbours(&group, "rollout", together).unwrap();
        let of_model = |(_, model): (_, Arc<Decoder>)| {
            let split = Arc::new(model.split(peers(&group_of, &compute), experts).unwrap());
            let mut zero = Zero::from_source(model, stage, None, device, group.clone(), &Noise).unwrap();
            let mut parts = || {
                let part = |unit: usize, whole: &[Tensor]| split.own_part(unit, whole);
                zero.weights_made(|_, whole, _| Some(whole / together), part).unwrap()
            };
            let merged = Arc::new(split.merged());
            [
                completions(&split, parts(), &compute, None),
                completions(&merged, split.merge(parts()).unwrap(), &compute, Some(SPECULATION)),
            ]
        };
        models().into_iter().map(of_model).collect()
    })
}

fn alone() -> Vec<[Vec<Completion>; 2]> {
    let of_ranks = ranks(1, false, |device, group| {
        let compute = Stream::torch(device).unwrap();
        let of_model = |(_, model): (_, Arc<Decoder>)| {
            let mut zero =
                Zero::from_source(model.clone(), ZeroStage::Zero0, None, device, group.clone(), &Noise)
                    .unwrap();
            let merged = Arc::new(model.merged());
            let own = zero.weights_with_own(|unit, param| model.merges_into(unit, param)).unwrap();
            [
                completions(&model, zero.weights().unwrap(), &compute, None),
                completions(&merged, model.merge(own).unwrap(), &compute, None),
            ]
        };
        models().into_iter().map(of_model).collect()
    });
    of_ranks.into_iter().next().unwrap()
}

#[test]
fn ranks_that_each_have_a_part_sample_what_one_rank_does() {
    let alone = alone();
    for (world_size, together, stage, experts) in [
        (2, 2, STAGES[0], ExpertParts::Columns),
        (2, 2, STAGES[3], ExpertParts::Whole),
        (4, 4, STAGES[3], ExpertParts::Columns),
        (4, 4, STAGES[0], ExpertParts::Whole),
        (4, 2, STAGES[2], ExpertParts::Columns),
    ] {
        let of_ranks = split(world_size, together, stage, experts);
        assert!(of_ranks.iter().all(|rank| *rank == of_ranks[0]), "{together} ranks differ");
        for (((name, _), alone), split) in models().iter().zip(&alone).zip(&of_ranks[0]) {
            for (alone, split) in alone.iter().flatten().zip(split.iter().flatten()) {
                let what = format!("{name}, {together} ranks, {experts:?}");
                assert_eq!(split.tokens, alone.tokens, "{what}");
                for (split, alone) in split.logprobs.iter().zip(&alone.logprobs) {
                    assert!((split - alone).abs() < 1e-4, "{what}: {split} is not {alone}");
                }
            }
        }
    }
}

/// Matrices that are cut by their columns have scales of their own on each rank. Values far below a row's largest may round
/// otherwise by that.
#[test]
fn parts_in_eight_bits_sample_what_one_rank_does_with_them() {
    let shape = DecoderConfig {
        vocab_size: 13,
        num_key_value_heads: 2,
        head_dim: 16,
        intermediate_size: 64,
        max_position_embeddings: 80,
        ..DecoderConfig::plain(2, 32, 4)
    };
    let sampled = |world_size: usize, stage: ZeroStage| {
        ranks(world_size, false, |device, group| {
            let (compute, model) =
                (Stream::torch(device).unwrap(), Decoder::new(shape.clone(), tch::Device::Cpu));
            let model = Arc::new(model.unwrap());
            let together = neighbours(&group, "rollout", world_size).unwrap();
            let split = (world_size > 1)
                .then(|| model.split(peers(&together, &compute), ExpertParts::Columns).unwrap());
            let mut zero =
                Zero::from_source(model.clone(), stage, None, device, group.clone(), &Noise).unwrap();
            let made = |unit: usize, whole: &[Tensor]| match &split {
                Some(split) => split.in_eight_bits(unit, &split.own_part(unit, whole)?),
                None => model.in_eight_bits(unit, whole),
            };
            let weights = zero.weights_made(|_, whole, _| Some(whole), made).unwrap();
            completions(&split.map_or_else(|| model.clone(), Arc::new), weights, &compute, None)
        })
    };
    let alone = &sampled(1, STAGES[0])[0];
    for stage in [STAGES[0], STAGES[3]] {
        let of_ranks = sampled(2, stage);
        assert_eq!(of_ranks[0], of_ranks[1]);
        for (split, alone) in of_ranks[0].iter().zip(alone) {
            assert_eq!(split.tokens, alone.tokens);
            for (split, alone) in split.logprobs.iter().zip(&alone.logprobs) {
                assert!((split - alone).abs() < 1e-4, "{split} is not {alone}");
            }
        }
    }
}

#[test]
fn shapes_that_ranks_cannot_hold_together_are_refused() {
    let plain = DecoderConfig::plain(1, 24, 4);
    let refused = |config: DecoderConfig, field: &str| {
        let message = config.check_split(4, ExpertParts::Columns).unwrap_err().to_string();
        assert!(message.contains(field), "{message}");
    };
    assert!(plain.check_split(4, ExpertParts::Columns).is_ok());
    refused(
        DecoderConfig { num_attention_heads: 6, num_key_value_heads: 6, ..plain.clone() },
        "num_attention_heads",
    );
    refused(DecoderConfig { intermediate_size: 22, ..plain.clone() }, "intermediate_size");
    refused(DecoderConfig { qk_norm: Some(QkNorm::Together), ..plain }, "qk_norm");
    // Four experts of 12 columns.
    let [_, _, qwen3, _] = four_heads();
    let message =
        |ranks, parts| qwen3.check_split(ranks, parts).map_or_else(|it| it.to_string(), |()| String::new());
    assert!(message(4, ExpertParts::Whole).is_empty() && message(4, ExpertParts::Columns).is_empty());
    let odd = DecoderConfig {
        num_attention_heads: 8,
        num_key_value_heads: 8,
        intermediate_size: 24,
        ..qwen3.clone()
    };
    let error = odd.check_split(8, ExpertParts::Whole).unwrap_err().to_string();
    assert!(error.contains("num_experts"), "{error}");
}

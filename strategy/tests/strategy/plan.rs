//! A plan computed without a device matches the device's own accounting.

use std::sync::Arc;

use anyroll_backends::{CollectiveGroup, DType, Device, tensor_peak_bytes};
use anyroll_models::{
    Activation, Decoder, DecoderConfig, ExpertsConfig, LoraConfig, LoraTarget, LoraTargets, ModulePattern,
    Multipliers, NormPlaces, PackedBatch, PackedSize, QkNorm, Runs, Scores, ScoresGrad, Sequence, Unit,
    ValueModel,
};
use anyroll_strategy::{
    Mesh, Moments, ParamsOn, Precision, Recompute, State, StepsOn, Zero, ZeroConfig, ZeroStage,
    plan::{Ranks, driver_bytes, held, scoring_activations, training_activations, whole_weights},
};
use tch::Tensor;

use crate::harness::{ADAMW, STAGES, assert_planned, decoder, ranks, train};

#[path = "../../examples/train/shapes.rs"]
mod shapes;

fn ranks_of(device: &Arc<dyn Device>, group: &CollectiveGroup) -> Ranks {
    Ranks {
        tensor: 1,
        experts: 1,
        world_size: group.world_size(),
        shards: group.world_size(),
        granularity_bytes: device.arena_granularity_bytes(),
        sums_in_rank_order: group.sums_in_rank_order(),
    }
}

fn allocated(zero: &Zero<Decoder>) -> usize {
    zero.group().stream().synchronize().unwrap();
    zero.group().stream().device().memory_info().unwrap().allocated_bytes
}

/// Asserts the device memory of training `model`, by kind.
fn check_training(model: &Arc<Decoder>, config: ZeroConfig, world_size: usize) {
    ranks(world_size, false, |device, group| {
        let plan = held(&**model, config, true, ranks_of(device, &group));
        let before = device.memory_info().unwrap();
        let mut zero = Zero::new(model.clone(), config, Some(ADAMW), device, group, 7).unwrap();
        train(&mut zero, 0..2, 2);
        let with_all = allocated(&zero) - before.allocated_bytes;
        assert_eq!(with_all, plan.device(), "{config:?} x {world_size}: {plan:?}");
        let pinned = device.memory_info().unwrap().pinned_bytes - before.pinned_bytes;
        match (config.steps_on, config.params_on) {
            (StepsOn::Device, _) => assert_eq!(pinned, plan.host),
            // Moments and weights are not pinned, staging buffers are.
            (StepsOn::Host, ParamsOn::Device) => assert_eq!(pinned * 4, plan.host),
            (StepsOn::Host, ParamsOn::Host) => assert!(pinned * 4 > plan.host && pinned < plan.host),
        }
        for (state, planned) in [
            (State::Optimizer, plan.optimizer),
            (State::Gradients, plan.gradients),
            (State::Params, plan.weights),
        ] {
            assert_eq!(
                zero.offload_states(&[state]).unwrap(),
                planned,
                "{state} at {config:?} x {world_size}"
            );
        }
        assert_eq!(allocated(&zero) - before.allocated_bytes, world_size * size_of::<f64>());
    });
}

#[test]
fn states_and_buffers_are_those_that_are_planned() {
    for world_size in [1, 2, 3] {
        for stage in STAGES {
            for tied in [false, true] {
                check_training(&decoder(tied), stage.into(), world_size);
            }
            for steps_on in [StepsOn::Device, StepsOn::Host] {
                let config = ZeroConfig { precision: Precision::Bf16, steps_on, ..stage.into() };
                check_training(&decoder(true), config, world_size);
                let config = ZeroConfig { params_on: ParamsOn::Host, ..config };
                check_training(&decoder(true), config, world_size);
            }
            for precision in [Precision::Fp32, Precision::Bf16] {
                let moments = Moments::EightBit;
                check_training(&decoder(true), ZeroConfig { precision, moments, ..stage.into() }, world_size);
            }
        }
    }
    let shape = decoder(true).config().clone();
    let is_low = |unit: &Unit| !unit.name.ends_with(".2") && unit.name != "lm_head";
    let lora = LoraConfig::new(3, 6.0, LoraTarget::ALL.to_vec());
    let unequal = [(1, LoraTarget::ALL.to_vec()), (2, vec![LoraTarget::Q, LoraTarget::Up])];
    let lora = LoraConfig { dora: true, targets: LoraTargets::ByLayer(unequal.into()), ..lora };
    for stage in STAGES {
        let frozen = Decoder::new(shape.clone(), tch::Device::Cpu).unwrap().freeze(is_low);
        check_training(&Arc::new(frozen), stage.into(), 2);
        let adapted = Decoder::with_lora(shape.clone(), &lora, tch::Device::Cpu).unwrap();
        check_training(&Arc::new(adapted), stage.into(), 2);
    }
}

#[test]
fn a_frozen_model_and_whole_weights_are_those_that_are_planned() {
    for stage in STAGES {
        ranks(2, false, |device, group| {
            let (model, at) = (decoder(true), ranks_of(device, &group));
            let plan = held(&*model, stage.into(), false, at);
            let before = device.memory_info().unwrap().allocated_bytes;
            let mut zero = Zero::new(model.clone(), stage, None, device, group, 7).unwrap();
            zero.score(&batch(2, 6, 11)).unwrap();
            assert_eq!(allocated(&zero) - before, plan.device(), "{stage:?}: {plan:?}");
            let whole = zero.weights().unwrap();
            let gathered = whole_weights(&*model, stage.into(), at, |_, _| false);
            assert_eq!(allocated(&zero) - before, plan.device() + gathered, "{stage:?}");
            drop(whole);
        });
    }
}

/// Adapters are merged into copies, which are freed with their last user.
#[test]
fn weights_to_merge_adapters_into_are_those_that_are_planned() {
    let targets = vec![LoraTarget::K, LoraTarget::V, LoraTarget::Down];
    let targets = LoraTargets::ByLayer([(1, targets)].into());
    let lora = LoraConfig { targets, ..LoraConfig::new(3, 6.0, Vec::new()) };
    let shape = decoder(true).config().clone();
    for stage in STAGES {
        ranks(2, false, |device, group| {
            let at = ranks_of(device, &group);
            let model = Arc::new(Decoder::with_lora(shape.clone(), &lora, tch::Device::Cpu).unwrap());
            let mut zero = Zero::new(model.clone(), stage, Some(ADAMW), device, group, 7).unwrap();
            let (held, is_own) = (allocated(&zero), |unit, param| model.merges_into(unit, param));
            let planned = whole_weights(&*model, stage.into(), at, is_own);
            let [qkv, down] = [(2 + 2) * 6 * 12, 12 * 20].map(|len: usize| len.next_multiple_of(64));
            if stage < ZeroStage::Zero3 {
                assert_eq!(planned, (qkv + down) * 4, "the matrices of one layer, fused as they are");
            }
            let resident = zero.weights().unwrap();
            let values: Vec<Tensor> = resident.iter().flatten().map(Tensor::copy).collect();
            drop(resident);
            let own = zero.weights_with_own(is_own).unwrap();
            assert_eq!(allocated(&zero) - held, planned, "{stage:?}");
            for (unit, tensors) in own.into_iter().enumerate() {
                let of_caller = tensors.into_iter().enumerate().filter(|(param, _)| is_own(unit, *param));
                of_caller.for_each(|(_, mut tensor)| drop(tensor.zero_()));
            }
            assert_eq!(allocated(&zero), held, "{stage:?}");
            let after = zero.weights().unwrap();
            assert!(after.iter().flatten().zip(&values).all(|(after, value)| after == value), "{stage:?}");
        });
    }
}

/// Returns a shape so wide that activations are large compared with the tensors' overhead.
fn wide(qk_norm: bool, tied: bool) -> DecoderConfig {
    DecoderConfig {
        vocab_size: 200,
        hidden_size: 64,
        num_hidden_layers: 3,
        num_attention_heads: 4,
        num_key_value_heads: 2,
        head_dim: 16,
        intermediate_size: 176,
        max_position_embeddings: 64,
        qk_norm: qk_norm.then_some(QkNorm::PerHead),
        tie_word_embeddings: tied,
        ..decoder(true).config().clone()
    }
}

/// Returns a shape with experts of this width in all layers but the second.
fn with_experts(num_experts: i64, num_experts_per_tok: i64, moe_intermediate_size: i64) -> DecoderConfig {
    let layers = vec![true, false, true];
    let experts = ExpertsConfig::plain(layers, num_experts, num_experts_per_tok, moe_intermediate_size);
    DecoderConfig { experts: Some(experts), ..wide(true, false) }
}

fn batch(sequences: usize, len: usize, vocab_size: i64) -> PackedBatch {
    let tokens: Vec<i64> = (0..(sequences * len) as i64).map(|index| index * 7 % vocab_size).collect();
    let sequences: Vec<Sequence> =
        tokens.chunks(len).map(|tokens| Sequence { tokens, prompt_len: 2 }).collect();
    PackedBatch::new(&sequences, 1.0, tch::Device::Cpu).unwrap()
}

#[test]
fn activations_are_those_that_are_planned() {
    const RUNS: Runs = Runs { dtype: DType::F32, on_host: true };
    let (sequences, len) = (6, 48);
    let size = PackedSize::uniform(sequences, 2, len - 2);
    let lora = LoraConfig::new(8, 6.0, LoraTarget::ALL.to_vec());
    let dropping = LoraConfig { dropout: 0.1, ..lora.clone() };
    let dora = LoraConfig { dora: true, ..lora.clone() };
    let fused = |lora: &LoraConfig| {
        let config = DecoderConfig { fused_projections: true, ..wide(false, false) };
        let targets = LoraTargets::Everywhere(LoraTarget::FUSED.to_vec());
        Decoder::with_lora(config, &LoraConfig { targets, ..lora.clone() }, tch::Device::Cpu).unwrap()
    };
    let dropping_dora = LoraConfig { dora: true, ..dropping.clone() };
    let of = |pattern: &str, rank| (ModulePattern::new(pattern).unwrap(), rank);
    let rank_pattern = vec![of("0.self_attn.q_proj", 12), of("mlp.*", 4)];
    let unequal = LoraConfig { rank_pattern, ..lora.clone() };
    let biased = DecoderConfig { qkv_bias: true, o_bias: true, mlp_bias: true, ..wide(false, false) };
    let after =
        DecoderConfig { qk_norm: Some(QkNorm::Together), norms: NormPlaces::After, ..wide(false, false) };
    let multipliers =
        Multipliers { embedding: 12.0, residual: 0.2, logits_scaling: 8.0, ..Multipliers::default() };
    let multiplied = DecoderConfig { multipliers, ..wide(false, true) };
    let both = DecoderConfig {
        qk_norm: Some(QkNorm::PerHead),
        norms: NormPlaces::Both,
        activation: Activation::GeluTanh,
        multipliers: Multipliers { embedding: 12.0, rounds_embedding: true, ..Multipliers::default() },
        ..wide(false, true)
    };
    let keyed = || batch(sequences, len, 200).with_dropout(&[1; 6]).unwrap();
    let new = |shape: DecoderConfig| Decoder::new(shape, tch::Device::Cpu).unwrap();
    let models = [
        ("plain", new(wide(false, false))),
        ("qk-norm, tied", new(wide(true, true))),
        ("logits kept", new(wide(false, false)).keeping_logits(true)),
        ("upper half", new(wide(true, false)).freeze(|unit| !unit.name.ends_with(".2"))),
        ("biases", new(biased)),
        ("multipliers", new(multiplied.clone())),
        ("multipliers, adapters", Decoder::with_lora(multiplied, &lora, tch::Device::Cpu).unwrap()),
        ("norms of branches", new(after.clone())),
        ("norms of branches, adapters", Decoder::with_lora(after, &lora, tch::Device::Cpu).unwrap()),
        ("norms of both", new(both.clone())),
        ("norms of both, adapters", Decoder::with_lora(both, &lora, tch::Device::Cpu).unwrap()),
        ("experts", new(with_experts(8, 2, 88))),
        ("many experts", new(with_experts(32, 8, 24))),
        ("adapters of experts", Decoder::with_lora(with_experts(8, 2, 88), &lora, tch::Device::Cpu).unwrap()),
        (
            "adapters of several ranks",
            Decoder::with_lora(wide(true, true), &unequal, tch::Device::Cpu).unwrap(),
        ),
        ("adapters", Decoder::with_lora(wide(false, true), &lora, tch::Device::Cpu).unwrap()),
        (
            "adapters with dropout",
            Decoder::with_lora(wide(false, true), &dropping, tch::Device::Cpu).unwrap(),
        ),
        ("fused adapters", fused(&lora)),
        ("fused adapters with dropout", fused(&dropping)),
        ("fused magnitudes", fused(&dora)),
        ("fused magnitudes with dropout", fused(&dropping_dora)),
        ("magnitudes", Decoder::with_lora(wide(false, true), &dora, tch::Device::Cpu).unwrap()),
        (
            "magnitudes with dropout",
            Decoder::with_lora(wide(false, true), &dropping_dora, tch::Device::Cpu).unwrap(),
        ),
    ];
    for (name, model) in models {
        let model = Arc::new(model);
        for recompute in [Recompute::None, Recompute::Selective, Recompute::Full] {
            for (world_size, stage) in [(1, ZeroStage::Zero0), (2, ZeroStage::Zero3)] {
                let config = ZeroConfig { recompute, ..stage.into() };
                ranks(world_size, false, |device, group| {
                    let mut zero = Zero::new(model.clone(), config, Some(ADAMW), device, group, 7).unwrap();
                    let batch = keyed();
                    let (_, measured) = tensor_peak_bytes(|| {
                        let gradient = |logprobs: &Tensor| logprobs.full_like(-0.01);
                        zero.accumulate(&batch, |scores| {
                            Ok(ScoresGrad {
                                logprobs: gradient(&scores.logprobs),
                                entropy: None,
                                divergence: None,
                            })
                        })
                        .unwrap();
                    })
                    .unwrap();
                    let planned = training_activations(&*model, &size, config, RUNS);
                    assert_planned(planned, measured, &format!("{name}, {recompute:?}, {stage:?}"));
                });
            }
        }
        ranks(1, false, |device, group| {
            let mut zero = Zero::new(model.clone(), ZeroStage::Zero1, None, device, group, 7).unwrap();
            let batch = batch(sequences, len, 200);
            let (_, measured) = tensor_peak_bytes(|| drop(zero.score(&batch).unwrap())).unwrap();
            assert_planned(scoring_activations(&*model, &size, RUNS), measured, &format!("{name}, scoring"));
        });
    }
}

/// Memory that ranks send from and receive to is libtorch's, too.
#[test]
fn activations_of_a_rank_of_several_are_within_those_that_are_planned() {
    const RUNS: Runs = Runs { dtype: DType::F32, on_host: true };
    let (sequences, len) = (6, 48);
    let whole = PackedSize::uniform(sequences, 2, len - 2);
    let options = [(false, Recompute::None), (true, Recompute::None), (false, Recompute::Full)];
    // Ranks share four heads, and gather keys for three.
    for ((qk_norm, recompute), (num_attention_heads, num_key_value_heads)) in
        options.into_iter().flat_map(|options| [(4, 2), (3, 1)].map(|heads| (options, heads)))
    {
        let shape = DecoderConfig { num_attention_heads, num_key_value_heads, ..wide(qk_norm, true) };
        let model = Arc::new(Decoder::new(shape, tch::Device::Cpu).unwrap());
        let config = ZeroConfig { recompute, ..ZeroStage::Zero1.into() };
        let [alone, planned] =
            [1, 2].map(|ranks| training_activations(&*model, &whole.over(ranks), config, RUNS));
        ranks(2, false, |device, group| {
            let mesh = Mesh::from(group).in_sequence_groups(2).unwrap();
            let mut zero = Zero::new(model.clone(), config, Some(ADAMW), device, mesh, 7).unwrap();
            let batch = batch(sequences, len, 200);
            let gradient = |scores: &Scores| {
                let logprobs = scores.logprobs.full_like(-0.01);
                Ok(ScoresGrad { logprobs, entropy: None, divergence: None })
            };
            let (_, measured) = tensor_peak_bytes(|| zero.accumulate(&batch, gradient).unwrap()).unwrap();
            let what = format!(
                "{measured} measured, {planned} planned, {alone} alone, {recompute:?}, {num_attention_heads} heads"
            );
            // And the parts of the batches and what they see, some numbers for each token, which no plan counts.
            let parts = size_of::<[i64; 18]>() * whole.tokens;
            assert!(measured * 4 > planned * 3 && measured < planned + parts, "{what}");
            assert!(planned * 2 >= alone && planned * 5 < alone * 4, "{what}");
        });
    }
}

/// Groups of four that share half of their tokens; one group is cut in the middle.
#[test]
fn activations_of_groups_are_those_that_are_planned() {
    const RUNS: Runs = Runs { dtype: DType::F32, on_host: true };
    let (sequences, group, prompt, completion) = (6, 4, 24, 24);
    let token = |index: usize| (index * index % 199) as i64;
    let tokens: Vec<Vec<i64>> = (2..2 + sequences)
        .map(|it| {
            let common = (0..prompt).map(|index| token(index + 7 * (it / group)));
            common.chain((0..completion).map(|index| token(index + 11 * it))).collect()
        })
        .collect();
    let tokens: Vec<Sequence> = tokens.iter().map(|tokens| Sequence { tokens, prompt_len: prompt }).collect();
    let size = PackedSize::of_groups(sequences, group, prompt, completion);
    let batch = || PackedBatch::sharing(&tokens, 1.0, tch::Device::Cpu).unwrap();
    assert_eq!([size.tokens, size.copies], [2 * 24 + 6 * 23, 6 * 47]);
    assert_eq!([batch().tokens(), batch().inputs()], [size.tokens as i64, size.copies as i64]);
    for (qk_norm, recompute) in [(false, Recompute::None), (true, Recompute::None), (false, Recompute::Full)]
    {
        let model = Arc::new(Decoder::new(wide(qk_norm, false), tch::Device::Cpu).unwrap());
        let config = ZeroConfig { recompute, ..ZeroStage::Zero1.into() };
        ranks(1, false, |device, group| {
            let mut zero = Zero::new(model.clone(), config, Some(ADAMW), device, group, 7).unwrap();
            let batch = batch();
            let (_, measured) = tensor_peak_bytes(|| {
                let gradient = |logprobs: &Tensor| logprobs.full_like(-0.01);
                zero.accumulate(&batch, |scores| {
                    Ok(ScoresGrad { logprobs: gradient(&scores.logprobs), entropy: None, divergence: None })
                })
                .unwrap();
            })
            .unwrap();
            let planned = training_activations(&*model, &size, config, RUNS);
            assert_planned(planned, measured, &format!("qk-norm {qk_norm}, {recompute:?}"));
            let (_, measured) = tensor_peak_bytes(|| drop(zero.score(&batch).unwrap())).unwrap();
            assert_planned(scoring_activations(&*model, &size, RUNS), measured, "scoring");
        });
    }
}

#[test]
fn activations_under_a_value_head_are_those_that_are_planned() {
    const RUNS: Runs = Runs { dtype: DType::F32, on_host: true };
    let (sequences, len) = (6, 48);
    let size = PackedSize::uniform(sequences, 2, len - 2);
    for recompute in [Recompute::None, Recompute::Full] {
        let model = Arc::new(ValueModel::new(wide(true, false), tch::Device::Cpu).unwrap());
        let config = ZeroConfig { recompute, ..ZeroStage::Zero3.into() };
        ranks(2, false, |device, group| {
            let plan = held(&*model, config, true, ranks_of(device, &group));
            let before = device.memory_info().unwrap().allocated_bytes;
            let mut zero = Zero::new(model.clone(), config, Some(ADAMW), device, group, 7).unwrap();
            let batch = batch(sequences, len, 200);
            let (_, measured) =
                tensor_peak_bytes(|| zero.accumulate(&batch, |values| Ok(values.full_like(-0.01))).unwrap())
                    .unwrap();
            let planned = training_activations(&*model, &size, config, RUNS);
            assert_planned(planned, measured, &format!("{recompute:?}"));
            let (_, measured) = tensor_peak_bytes(|| drop(zero.score(&batch).unwrap())).unwrap();
            assert_planned(scoring_activations(&*model, &size, RUNS), measured, "scoring");
            zero.group().stream().synchronize().unwrap();
            assert_eq!(device.memory_info().unwrap().allocated_bytes - before, plan.device());
        });
    }
}

/// Memory that the driver reported on H200s at the end of a benchmark (docs/results/memory.md), in GiB:
/// sequences of 4,096 tokens, 4 per rank, bf16.
const MEASURED: [(&str, usize, ZeroStage, Recompute, f64); 9] = [
    ("7b", 4, ZeroStage::Zero3, Recompute::None, 91.4),
    ("7b", 4, ZeroStage::Zero2, Recompute::None, 99.1),
    ("7b", 4, ZeroStage::Zero1, Recompute::None, 99.1),
    ("7b", 4, ZeroStage::Zero3, Recompute::Full, 50.0),
    ("1.5b", 4, ZeroStage::Zero0, Recompute::None, 52.5),
    ("1.5b", 4, ZeroStage::Zero2, Recompute::None, 35.2),
    ("1.5b", 4, ZeroStage::Zero3, Recompute::None, 33.7),
    ("1.5b", 1, ZeroStage::Zero1, Recompute::None, 51.0),
    ("0.5b", 1, ZeroStage::Zero1, Recompute::None, 21.0),
];

#[test]
fn plans_are_what_was_measured_on_gpus() {
    const GIB: f64 = (1 << 30) as f64;
    let runs = Runs { dtype: DType::Bf16, on_host: false };
    for (shape, world_size, stage, recompute, measured) in MEASURED {
        let model = Decoder::new(shapes::decoder(shape, 4096), tch::Device::Cpu).unwrap();
        let config = ZeroConfig { precision: Precision::Bf16, recompute, ..stage.into() };
        let at = Ranks {
            world_size,
            shards: world_size,
            tensor: 1,
            experts: 1,
            granularity_bytes: 2 << 20,
            sums_in_rank_order: true,
        };
        let held = held(&model, config, true, at);
        let activations = training_activations(&model, &PackedSize::uniform(4, 1, 4096), config, runs);
        let planned = (held.device() + activations + driver_bytes(world_size)) as f64 / GIB;
        println!(
            "{shape} x {world_size}, {stage:?}, {recompute:?}: {planned:.1} GiB planned, {measured} measured"
        );
        assert!(
            (planned / measured - 1.0).abs() < 0.05,
            "{shape} x {world_size} at {stage:?}, {recompute:?}: {planned:.1}"
        );
    }
}

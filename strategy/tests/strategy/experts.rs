//! Experts that are spread over ranks in training, compared with a rank that has all of them.

use std::sync::Arc;

use anyroll_backends::CollectiveGroup;
use anyroll_models::{
    Decoder, DecoderConfig, ExpertNames, ExpertsConfig, LoraConfig, LoraTarget, Model, Scores, ValueModel,
    absent,
};
use anyroll_strategy::{
    Mesh, ParamsOn, Precision, Recompute, StepsOn, Zero, ZeroConfig, ZeroStage,
    checkpoint::{self, Stamp},
    plan::{Ranks, held, whole_weights},
};
use serde_json::Value;
use tch::Tensor;

use crate::harness::{STAGES, four_heads, ranks};
use crate::sequence::{
    Case, NEARLY_SGD, Outcome, assert_near, floats, joined, loss, outcomes_on, pack, trained,
};

/// Decoders like Qwen 3 with experts; like Mixtral, with experts in every layer; with adapters of attention; and with adapters
/// of experts, and beside others.
fn cases() -> [Case; 5] {
    let [plain, _, qwen3, _] = four_heads();
    let experts =
        ExpertsConfig { names: ExpertNames::Mixtral, ..ExpertsConfig::plain(vec![true; 2], 8, 2, 6) };
    let mixtral = DecoderConfig { experts: Some(experts), num_key_value_heads: 2, ..plain };
    let of_experts = LoraConfig::new(3, 9.0, vec![LoraTarget::Gate, LoraTarget::Down]);
    let of_all = LoraConfig::new(2, 9.0, LoraTarget::ALL.to_vec());
    let attention = [LoraTarget::Q, LoraTarget::K, LoraTarget::V, LoraTarget::O];
    let lora = LoraConfig { dropout: 0.3, ..LoraConfig::new(3, 4.0, attention.to_vec()) };
    let device = tch::Device::Cpu;
    let whole = |config: DecoderConfig| Arc::new(Decoder::new(config, device).unwrap());
    let adapted =
        |config: &DecoderConfig, lora| Arc::new(Decoder::with_lora(config.clone(), lora, device).unwrap());
    let (attention, some, all) =
        (adapted(&qwen3, &lora), adapted(&mixtral, &of_experts), adapted(&qwen3, &of_all));
    let case = |name, model, recompute, shares_prompts| Case { name, model, recompute, shares_prompts };
    [
        case("Qwen 3", whole(qwen3), Recompute::Full, true),
        case("Mixtral", whole(mixtral), Recompute::Selective, true),
        case("Qwen 3 with adapters", attention, Recompute::None, false),
        case("Mixtral with adapters of experts", some, Recompute::Selective, true),
        case("Qwen 3 with all adapters", all, Recompute::Full, true),
    ]
}

/// Ranks in sequence groups, all of them in shard groups, and these in groups among which experts are spread.
fn mesh([sequence, shards, experts]: [usize; 3]) -> impl Fn(CollectiveGroup) -> Mesh + Sync {
    move |group| {
        let mesh = Mesh::from(group).in_sequence_groups(sequence).unwrap();
        mesh.in_shard_groups(shards).unwrap().in_expert_groups(experts).unwrap()
    }
}

#[test]
fn spread_experts_give_the_scores_and_gradients_of_one_rank() {
    let alone = outcomes_on(1, mesh([1, 1, 1]), false, &cases(), &[ZeroStage::Zero0.into()]);
    for (world_size, groups) in
        [(2, [1, 2, 2]), (4, [1, 4, 2]), (4, [1, 4, 4]), (4, [1, 2, 2]), (4, [2, 4, 2])]
    {
        let stages = if groups == [1, 4, 2] { &STAGES[..] } else { &STAGES[2..] };
        let stages: Vec<ZeroConfig> = stages.iter().map(|&stage| stage.into()).collect();
        let spread = outcomes_on(world_size, mesh(groups), false, &cases(), &stages);
        for ((case, spread), alone) in cases().iter().zip(&spread).zip(&alone) {
            let what = format!("{}, {world_size} ranks in groups of {groups:?}", case.name);
            assert_near(&what, &spread[0], &alone[0]);
            assert!(spread.iter().all(|stage| *stage == spread[0]), "{what}: stages differ");
        }
        if groups == [1, 4, 2] {
            let again = outcomes_on(world_size, mesh(groups), true, &cases(), &stages[3..]);
            assert!(again.iter().zip(&spread).all(|(again, spread)| again[0] == spread[0]), "runs differ");
        }
    }
}

#[test]
fn recomputation_and_offload_do_not_change_spread_experts() {
    let of = |recompute, config: ZeroConfig| -> Outcome {
        let [_, mixtral, ..] = cases();
        let case = [Case { recompute, ..mixtral }];
        outcomes_on(2, mesh([1, 2, 2]), false, &case, &[config]).swap_remove(0).swap_remove(0)
    };
    let resident = of(Recompute::None, STAGES[2].into());
    let offloaded = ZeroConfig { steps_on: StepsOn::Host, params_on: ParamsOn::Host, ..STAGES[3].into() };
    assert!(of(Recompute::Full, STAGES[2].into()) == resident, "full recomputation differs");
    assert!(of(Recompute::Selective, STAGES[3].into()) == resident, "selective recomputation differs");
    assert_near("offloaded", &of(Recompute::None, offloaded), &resident);
    let narrow = ZeroConfig { precision: Precision::Bf16, ..STAGES[1].into() };
    for (narrow, wide) in of(Recompute::None, narrow).scores.iter().zip(&resident.scores) {
        assert!((narrow - wide).abs() < 0.15, "{narrow} {wide}");
    }
}

/// Each of two ranks has one of two experts, and each token chooses both.
#[test]
fn sent_rows_are_counted() {
    let [plain, _, qwen3, _] = four_heads();
    let experts = ExpertsConfig { num_experts: 2, moe_intermediate_size: 6, ..qwen3.experts.unwrap() };
    let model = Arc::new(
        Decoder::new(DecoderConfig { experts: Some(experts), ..plain.clone() }, tch::Device::Cpu).unwrap(),
    );
    ranks(2, false, |device, group| {
        let batch = pack(false, 0);
        let rows = batch.tokens() as usize;
        let mesh = mesh([1, 2, 2])(group);
        let mut zero = Zero::new(model.clone(), STAGES[2], Some(NEARLY_SGD), device, mesh, 7).unwrap();
        let accumulate = |zero: &mut Zero<Decoder>| zero.accumulate(&batch, |scores| Ok(loss(scores)));
        accumulate(&mut zero).unwrap();
        assert_eq!(zero.exchanged().unwrap().unwrap().sent_bytes, 0, "nobody asked to measure");
        zero.measure_exchanges();
        accumulate(&mut zero).unwrap();
        let exchanged = zero.exchanged().unwrap().unwrap();
        // There and back, and three times in backward, with a number there and one back.
        assert_eq!(exchanged.sent_bytes, rows * (5 * 16 + 2) * size_of::<f32>());
        assert!(!exchanged.waited.is_zero());
    });
}

#[test]
fn checkpoints_have_all_experts() {
    let folder = tempfile::tempdir().unwrap();
    for (case, Case { model, shares_prompts, .. }) in cases().into_iter().enumerate() {
        let [spread, whole] = ["spread", "whole"].map(|name| folder.path().join(format!("{name}{case}")));
        let of = |device: &_, mesh| {
            Zero::new(model.clone(), STAGES[1 + case % 3], Some(NEARLY_SGD), device, mesh, 7).unwrap()
        };
        let train = |zero: &mut _| {
            trained(
                zero,
                |group| pack(shares_prompts, group),
                |scores: &Scores| floats(&scores.logprobs),
                loss,
            )
        };
        let trained = ranks(4, false, |device, group| {
            let mut zero = of(device, mesh([1, 4, 2])(group));
            train(&mut zero);
            checkpoint::save(&mut zero, &spread, Stamp::default(), Value::Null).unwrap();
            train(&mut zero)
        });
        let resumed = ranks(4, false, |device, group| {
            let mut zero = of(device, mesh([1, 4, 2])(group));
            checkpoint::load(&mut zero, &spread).unwrap();
            train(&mut zero)
        });
        assert!(resumed == trained, "a resumed run differs");
        // One rank loads it, and saves the same, which the four load, with experts on other ranks.
        let alone = ranks(1, false, |device, group| {
            let mut zero = of(device, group.into());
            checkpoint::load(&mut zero, &spread).unwrap();
            checkpoint::save(&mut zero, &whole, Stamp::default(), Value::Null).unwrap();
            train(&mut zero)
        });
        assert_near("loaded by one rank", &joined(trained), &joined(alone));
        let again = |path, groups| {
            let of_ranks = ranks(4, false, |device, group| {
                let mut zero = of(device, mesh(groups)(group));
                checkpoint::load(&mut zero, path).unwrap();
                train(&mut zero)
            });
            joined(of_ranks)
        };
        assert!(again(&whole, [1, 4, 2]) == joined(resumed.clone()), "what one rank saved differs");
        assert_near("other groups", &again(&spread, [1, 4, 4]), &joined(resumed));
    }
}

#[test]
fn values_with_spread_experts_are_those_of_one_rank() {
    let values = |world_size, groups| {
        let of_ranks = ranks(world_size, false, |device, group| {
            let model = Arc::new(ValueModel::new(four_heads()[2].clone(), tch::Device::Cpu).unwrap());
            let mesh = mesh(groups)(group);
            let mut zero =
                Zero::new(model, ZeroStage::Zero1, Some(NEARLY_SGD), device, mesh.clone(), 7).unwrap();
            // A critic begins with the policy's blocks, which here has adapters, too.
            let policy = cases()[2].model.clone();
            let mut policy = Zero::new(policy, ZeroStage::Zero0, None, device, mesh, 8).unwrap();
            zero.copy_shared_weights_from(&mut policy).unwrap();
            // The head starts at 0: the second step is the first that changes the blocks.
            let loss = |values: &Tensor| (values - 1.0) * 0.05;
            trained(&mut zero, |group| pack(true, group), floats, loss);
            trained(&mut zero, |group| pack(true, group), floats, loss)
        });
        joined(of_ranks)
    };
    assert_near("values", &values(4, [1, 4, 2]), &values(1, [1, 1, 1]));
}

#[test]
fn experts_that_ranks_cannot_share_are_refused() {
    let [_, mixtral, ..] = cases();
    let check = |ranks| mixtral.model.config().check_spread(ranks).map_err(|error| error.to_string());
    assert!(check(3).unwrap_err().contains("num_experts"), "{:?}", check(3));
    assert!(check(8).is_ok());
    assert!(mixtral.model.units().iter().all(|unit| !unit.name.ends_with("experts")));
}

#[test]
fn strict_scores_are_bitwise_those_of_one_rank() {
    let model = Arc::new(Decoder::new(four_heads()[2].clone(), tch::Device::Cpu).unwrap().strict(true));
    let scores = |world_size, groups| -> Vec<f32> {
        let of_ranks = ranks(world_size, false, |device, group| {
            let mesh = mesh(groups)(group);
            let rank = mesh.world().rank();
            let mut zero = Zero::new(model.clone(), ZeroStage::Zero0, None, device, mesh, 7).unwrap();
            let own = 4 / world_size;
            let scored = (rank * own..(rank + 1) * own)
                .flat_map(|group| floats(&zero.score(&pack(true, group)).unwrap().logprobs));
            scored.collect::<Vec<_>>()
        });
        of_ranks.concat()
    };
    assert!(scores(2, [1, 2, 2]) == scores(1, [1, 1, 1]), "scores differ");
}

#[test]
fn memory_is_planned() {
    let model = cases()[1].model.clone();
    for stage in STAGES {
        ranks(4, false, |device, group| {
            let at = Ranks {
                world_size: 4,
                shards: 4,
                tensor: 1,
                experts: 2,
                granularity_bytes: device.arena_granularity_bytes(),
                sums_in_rank_order: group.sums_in_rank_order(),
            };
            let part = model.spread_experts(&absent(2)).unwrap().unwrap();
            let plan = held(&part, stage.into(), true, at);
            let allocated = || device.memory_info().unwrap().allocated_bytes;
            let before = allocated();
            let mesh = mesh([1, 4, 2])(group);
            let mut zero = Zero::new(model.clone(), stage, Some(NEARLY_SGD), device, mesh, 7).unwrap();
            for _ in 0..2 {
                zero.accumulate(&pack(true, zero.group().rank()), |scores| Ok(loss(scores))).unwrap();
                let step = zero.step(0.5).unwrap();
                zero.finish_step(&step).unwrap();
            }
            zero.group().stream().synchronize().unwrap();
            assert_eq!(allocated() - before, plan.device(), "{stage:?}: {plan:?}");
            let before = allocated();
            let weights = zero.weights().unwrap();
            zero.group().stream().synchronize().unwrap();
            let planned = whole_weights(&*model, stage.into(), at, |_, _| false);
            assert_eq!(allocated() - before, planned, "{stage:?}: whole weights");
            drop(weights);
        });
    }
}

//! Ranks that hold every layer together in training, compared with a rank that holds all of it.

use std::sync::Arc;

use anyroll_backends::CollectiveGroup;
use anyroll_models::{
    Decoder, DecoderConfig, ExpertParts, LoraConfig, LoraTarget, Model, Multipliers, Scores, ValueModel,
    absent,
};
use anyroll_strategy::{
    Mesh, ParamsOn, Precision, Recompute, StepsOn, Zero, ZeroConfig, ZeroStage,
    checkpoint::{self, Stamp},
    plan::{Ranks, held},
};
use serde_json::Value;
use tch::Tensor;

use crate::harness::{STAGES, four_heads, ranks};
use crate::sequence::{
    Case, NEARLY_SGD, Outcome, assert_near, floats, joined, loss, outcomes_on, pack, trained, trained_on,
};

/// Decoders with four heads of queries: like Llama with a tied head and two key heads; like Qwen 2, with a head of its own;
/// like Qwen 3, with experts; and like Granite and like Gemma 3, with adapters.
fn cases() -> [Case; 5] {
    let [plain, qwen2, qwen3, gemma3] = four_heads();
    // With large weights, a second step multiplies the rounding of the first.
    let llama = DecoderConfig { qkv_bias: false, initializer_range: 0.15, ..qwen2.clone() };
    let qwen2 = DecoderConfig { tie_word_embeddings: false, ..qwen2 };
    let multipliers =
        Multipliers { residual: 0.5, embedding: 2.0, logits_scaling: 1.5, ..Multipliers::default() };
    let granite = DecoderConfig { qkv_bias: true, o_bias: true, mlp_bias: true, multipliers, ..plain };
    let lora = LoraConfig::new(3, 4.0, LoraTarget::ALL.to_vec());
    let device = tch::Device::Cpu;
    let whole = |config: DecoderConfig| Arc::new(Decoder::new(config, device).unwrap());
    let adapted = |config| Arc::new(Decoder::with_lora(config, &lora, device).unwrap());
    let case = |name, model, recompute| Case { name, model, recompute, shares_prompts: true };
    [
        case("Llama", whole(llama), Recompute::None),
        case("Qwen 2", whole(qwen2), Recompute::Selective),
        case("Qwen 3", whole(qwen3), Recompute::Full),
        case("Granite", whole(granite), Recompute::None),
        case("Gemma 3 with adapters", adapted(gemma3), Recompute::Selective),
    ]
}

/// Ranks in tensor groups, whose places are in sequence groups, and all of them in shard groups.
fn mesh([tensor, sequence, shards]: [usize; 3]) -> impl Fn(CollectiveGroup) -> Mesh + Sync {
    move |group| {
        let mesh = Mesh::from(group).in_tensor_groups(tensor).unwrap();
        mesh.in_sequence_groups(sequence).unwrap().in_shard_groups(shards).unwrap()
    }
}

fn alone() -> Vec<Vec<Outcome>> {
    outcomes_on(1, mesh([1, 1, 1]), false, &cases(), &[ZeroStage::Zero0.into()])
}

#[test]
fn parts_of_layers_give_the_scores_and_gradients_of_whole_ones() {
    let alone = alone();
    for (world_size, groups) in [(2, [2, 1, 2]), (4, [4, 1, 4]), (4, [2, 2, 4]), (4, [2, 1, 2])] {
        let all = groups == [2, 2, 4];
        let stages = if all { &STAGES[..] } else { &STAGES[1..2] };
        let stages: Vec<ZeroConfig> = stages.iter().map(|&stage| stage.into()).collect();
        let split = outcomes_on(world_size, mesh(groups), false, &cases(), &stages);
        for ((case, split), alone) in cases().iter().zip(&split).zip(&alone) {
            let what = format!("{}, {world_size} ranks in groups of {groups:?}", case.name);
            assert_near(&what, &split[0], &alone[0]);
            assert!(split.iter().all(|stage| *stage == split[0]), "{what}: stages differ");
        }
        if all {
            let again = outcomes_on(world_size, mesh(groups), true, &cases(), &stages[3..]);
            assert!(again.iter().zip(&split).all(|(again, split)| again[0] == split[0]), "runs differ");
        }
    }
}

/// Each of eight ranks has a key head with two query heads, or with three, and four pairs of ranks share the rows of these.
#[test]
fn four_parts_of_layers_share_sequences() {
    let [_, qwen2, _, _] = four_heads();
    let outcome = |num_attention_heads, world_size, groups| {
        let config = DecoderConfig { num_attention_heads, num_key_value_heads: 4, ..qwen2.clone() };
        let model = Arc::new(Decoder::new(config, tch::Device::Cpu).unwrap());
        joined(ranks(world_size, false, |device, group| {
            let batches = 8 / world_size;
            let own = group.rank() * batches..(group.rank() + 1) * batches;
            let (mesh, sgd) = (mesh(groups)(group), Some(NEARLY_SGD));
            let mut zero = Zero::new(model.clone(), ZeroStage::Zero2, sgd, device, mesh, 7).unwrap();
            let read = |scores: &Scores| floats(&scores.logprobs);
            trained_on(&mut zero, own, |group| pack(true, group), read, loss)
        }))
    };
    for heads in [8, 12] {
        let what = format!("eight ranks, {heads} heads");
        assert_near(&what, &outcome(heads, 8, [4, 2, 8]), &outcome(heads, 1, [1, 1, 1]));
    }
}

#[test]
fn parts_of_layers_are_offloaded_and_may_be_narrow() {
    let cases = &cases()[..1];
    let offloaded = ZeroConfig { steps_on: StepsOn::Host, params_on: ParamsOn::Host, ..STAGES[2].into() };
    let narrow = ZeroConfig { precision: Precision::Bf16, ..STAGES[1].into() };
    let configs = [STAGES[0].into(), offloaded, narrow];
    let [resident, offloaded, narrow] = &outcomes_on(2, mesh([2, 1, 2]), false, cases, &configs)[0][..]
    else {
        unreachable!("there are three configs")
    };
    assert_near("offloaded", offloaded, resident);
    for (narrow, wide) in narrow.scores.iter().zip(&resident.scores) {
        assert!((narrow - wide).abs() < 0.1, "{narrow} {wide}");
    }
}

#[test]
fn checkpoints_have_whole_units() {
    let folder = tempfile::tempdir().unwrap();
    let [split, whole] = ["split", "whole"].map(|name| folder.path().join(name));
    let model = || cases()[3].model.clone();
    let of = |device: &_, mesh| Zero::new(model(), STAGES[1], Some(NEARLY_SGD), device, mesh, 7).unwrap();
    let train = |zero: &mut _| {
        trained(zero, |group| pack(true, group), |scores: &Scores| floats(&scores.logprobs), loss)
    };
    let trained = ranks(4, false, |device, group| {
        let mut zero = of(device, mesh([2, 1, 4])(group));
        train(&mut zero);
        checkpoint::save(&mut zero, &split, Stamp::default(), Value::Null).unwrap();
        train(&mut zero)
    });
    let resumed = ranks(4, false, |device, group| {
        let mut zero = of(device, mesh([2, 1, 4])(group));
        checkpoint::load(&mut zero, &split).unwrap();
        train(&mut zero)
    });
    assert!(resumed == trained, "a resumed run differs");
    // One rank loads it, and saves the same, which the four load.
    let alone = ranks(1, false, |device, group| {
        let mut zero = of(device, group.into());
        checkpoint::load(&mut zero, &split).unwrap();
        checkpoint::save(&mut zero, &whole, Stamp::default(), Value::Null).unwrap();
        train(&mut zero)
    });
    assert_near("loaded by one rank", &joined(trained), &joined(alone));
    let again = ranks(4, false, |device, group| {
        let mut zero = of(device, mesh([2, 1, 4])(group));
        checkpoint::load(&mut zero, &whole).unwrap();
        train(&mut zero)
    });
    assert!(again == resumed, "what one rank saved differs");
}

#[test]
fn memory_is_planned() {
    let model = cases()[2].model.clone();
    for stage in STAGES {
        ranks(4, false, |device, group| {
            let at = Ranks {
                world_size: 4,
                shards: 4,
                tensor: 2,
                experts: 1,
                granularity_bytes: device.arena_granularity_bytes(),
                sums_in_rank_order: group.sums_in_rank_order(),
            };
            let plan = held(&model.split_over(&absent(2)).unwrap(), stage.into(), true, at);
            let before = device.memory_info().unwrap().allocated_bytes;
            let mesh = mesh([2, 1, 4])(group);
            let mut zero = Zero::new(model.clone(), stage, Some(NEARLY_SGD), device, mesh, 7).unwrap();
            for _ in 0..2 {
                zero.accumulate(&pack(true, zero.group().rank()), |scores| Ok(loss(scores))).unwrap();
                let step = zero.step(0.5).unwrap();
                zero.finish_step(&step).unwrap();
            }
            zero.group().stream().synchronize().unwrap();
            let used = device.memory_info().unwrap().allocated_bytes - before;
            assert_eq!(used, plan.device(), "{stage:?}: {plan:?}");
        });
    }
}

#[test]
fn values_of_parts_are_those_of_one_rank() {
    let values = |world_size, groups| {
        let of_ranks = ranks(world_size, false, |device, group| {
            let model = Arc::new(ValueModel::new(four_heads()[1].clone(), tch::Device::Cpu).unwrap());
            let mesh = mesh(groups)(group);
            let mut zero = Zero::new(model, ZeroStage::Zero1, Some(NEARLY_SGD), device, mesh, 7).unwrap();
            // The head starts at 0: the second step is the first that changes the blocks.
            let loss = |values: &Tensor| (values - 1.0) * 0.05;
            trained(&mut zero, |group| pack(true, group), floats, loss);
            trained(&mut zero, |group| pack(true, group), floats, loss)
        });
        joined(of_ranks)
    };
    assert_near("values", &values(4, [4, 1, 4]), &values(1, [1, 1, 1]));
}

#[test]
fn heads_that_ranks_cannot_share_are_refused() {
    let shape = |heads, kv_heads| DecoderConfig {
        num_key_value_heads: kv_heads,
        ..DecoderConfig::plain(1, 24, heads)
    };
    for (heads, kv_heads, ranks, field) in [
        (4, 4, 3, "num_attention_heads"),
        (12, 4, 6, "num_key_value_heads"),
        (4, 1, 4, ""),
        (12, 6, 3, ""),
        (12, 2, 4, ""),
    ] {
        let checked = shape(heads, kv_heads).check_split(ranks, ExpertParts::Columns);
        let message = checked.map_or_else(|error| error.to_string(), |()| String::new());
        assert!(message.contains(field) && message.is_empty() == field.is_empty(), "{message}");
    }
}

//! Frozen matrices in 4 bits: stages stay bitwise equal, and training is that on matrices which were rounded beforehand.

use std::{path::Path, sync::Arc};

use anyroll_backends::{
    CollectiveGroup, Device,
    ops::{FOUR_BIT_BLOCK, FOUR_BIT_BLOCK_BYTES, from_four_bits, in_four_bits},
};
use anyroll_models::{Decoder, DecoderConfig, LoraConfig, LoraTarget, Model};
use anyroll_strategy::{
    FrozenWeights, Mesh, ParamsOn, Precision, Recompute, StepsOn, Zero, ZeroConfig, ZeroStage,
    checkpoint::{self, Stamp},
    plan::{Ranks, held},
};
use tch::{Kind, Tensor};

use crate::harness::{ADAMW, STAGES, decoder, four_heads, ranks, train, trained_and_offloaded, values};
use crate::sequence::{Case, assert_near, outcomes_on};

/// A dense decoder with adapters of all matrices, with the magnitudes of DoRA or without.
fn adapted(dora: bool) -> Arc<Decoder> {
    let shape = DecoderConfig { experts: None, ..decoder(false).config().clone() };
    let lora = LoraConfig { dora, ..LoraConfig::new(3, 6.0, LoraTarget::ALL.to_vec()) };
    Arc::new(Decoder::with_lora(shape, &lora, tch::Device::Cpu).unwrap())
}

fn packed(stage: ZeroStage) -> ZeroConfig {
    ZeroConfig { frozen: FrozenWeights::Nf4, ..stage.into() }
}

fn new(
    model: &Arc<Decoder>,
    config: ZeroConfig,
    device: &Arc<dyn Device>,
    mesh: impl Into<Mesh>,
) -> Zero<Decoder> {
    Zero::new(model.clone(), config, Some(ADAMW), device, mesh, 7).unwrap()
}

/// The norms and weights of three steps on a fault-injecting device, with all states offloaded in between.
fn trained(model: &Arc<Decoder>, config: ZeroConfig, world_size: usize) -> (Vec<f64>, Vec<u32>) {
    trained_and_offloaded(world_size, &format!("{config:?}"), |device, group| {
        new(model, config, device, group)
    })
}

#[test]
fn stages_recomputation_and_places_are_bitwise_equal() {
    for (precision, dora) in [(Precision::Fp32, true), (Precision::Bf16, false)] {
        let model = adapted(dora);
        let config = |stage| ZeroConfig { precision, ..packed(stage) };
        for world_size in [1, 2] {
            let reference = trained(&model, config(ZeroStage::Zero0), world_size);
            let on_host = ZeroConfig { params_on: ParamsOn::Host, ..config(ZeroStage::Zero2) };
            let again = [(Recompute::Selective, ZeroStage::Zero1), (Recompute::Full, ZeroStage::Zero3)];
            let again = again.map(|(recompute, stage)| ZeroConfig { recompute, ..config(stage) });
            let others = STAGES[1..]
                .iter()
                .map(|&stage| config(stage))
                .chain(again)
                .chain([on_host, ZeroConfig { stage: ZeroStage::Zero3, ..on_host }]);
            for config in others {
                assert!(trained(&model, config, world_size) == reference, "{config:?} x {world_size}");
            }
        }
    }
}

/// Rounds a matrix to 4 bits and widens it, outside of the strategy.
fn rounded(matrix: &Tensor) -> Tensor {
    let blocks = (matrix.numel() as i64 + FOUR_BIT_BLOCK - 1) / FOUR_BIT_BLOCK;
    let mut padded = Tensor::zeros([blocks * FOUR_BIT_BLOCK], (matrix.kind(), tch::Device::Cpu));
    padded.narrow(0, 0, matrix.numel() as i64).copy_(&matrix.reshape([-1]));
    let mut bytes = Tensor::zeros([blocks, FOUR_BIT_BLOCK_BYTES], (Kind::Uint8, tch::Device::Cpu));
    in_four_bits(&padded, &mut bytes).unwrap();
    from_four_bits(&bytes, &mut padded).unwrap();
    padded.narrow(0, 0, matrix.numel() as i64).reshape(matrix.size())
}

/// Matrices of frozen layers are rounded, and nothing else is. Steps, and so the adapters' gradients, are those of a strategy
/// with the rounded weights in the precision.
#[test]
fn training_is_that_on_rounded_weights() {
    for (world_size, stage, precision) in
        [(1, ZeroStage::Zero1, Precision::Fp32), (2, ZeroStage::Zero3, Precision::Bf16)]
    {
        ranks(world_size, false, |device, group| {
            let model = adapted(false);
            let wide = ZeroConfig { precision, ..stage.into() };
            let narrow = ZeroConfig { frozen: FrozenWeights::Nf4, ..wide };
            let mut four = new(&model, narrow, device, group.clone());
            let mut plain = new(&model, wide, device, group);
            let (found, exact) = (four.weights().unwrap(), plain.weights().unwrap());
            for (index, unit) in model.units().iter().enumerate() {
                let matrices = model.layer_matrices(index);
                assert_eq!(matrices.len(), if (1..=3).contains(&index) { 4 } else { 0 }, "{}", unit.name);
                for (param, spec) in unit.params.iter().enumerate() {
                    let (exact, found) = (&exact[index][param], &found[index][param]);
                    if matrices.contains(&param) {
                        assert!(found.equal(&rounded(exact)) && !found.equal(exact), "{}", spec.name);
                    } else {
                        assert!(found.equal(exact), "{}", spec.name);
                    }
                }
            }
            // Made one unit at a time, all in the same memory.
            let copies = |_, whole: &[Tensor]| Ok(whole.iter().map(Tensor::copy).collect());
            let made = four.weights_made(|_, whole, _| Some(whole), copies).unwrap();
            assert!(made.iter().flatten().zip(found.iter().flatten()).all(|(made, found)| made.equal(found)));
            plain.copy_weights_from(&mut four).unwrap();
            assert_eq!(train(&mut plain, 0..3, 2), train(&mut four, 0..3, 2));
            assert!(values(&mut plain) == values(&mut four));
            // What is widened has the same 4 bits again.
            four.copy_weights_from(&mut plain).unwrap();
            assert!(values(&mut plain) == values(&mut four));
            assert_eq!(train(&mut plain, 3..4, 2), train(&mut four, 3..4, 2));
        });
    }
}

#[test]
fn checkpoints_resume_at_other_stages_and_on_other_ranks() {
    let folder = tempfile::tempdir().unwrap();
    let path: &Path = &folder.path().join("step_000002");
    let model = adapted(true);
    let config = |stage| ZeroConfig { precision: Precision::Bf16, ..packed(stage) };
    let whole = ranks(2, false, |device, group| {
        let mut zero = new(&model, config(ZeroStage::Zero2), device, group);
        train(&mut zero, 0..2, 2);
        checkpoint::save(&mut zero, path, Stamp::default(), serde_json::Value::Null).unwrap();
        train(&mut zero, 2..4, 2);
        values(&mut zero)
    });
    for (world_size, stage) in [(2, ZeroStage::Zero2), (2, ZeroStage::Zero3), (1, ZeroStage::Zero0)] {
        let resumed = ranks(world_size, false, |device, group| {
            let mut zero = new(&model, config(stage), device, group);
            checkpoint::load(&mut zero, path).unwrap();
            train(&mut zero, 2..4, 2);
            values(&mut zero)
        });
        assert!(resumed[0] == whole[0], "{stage:?} x {world_size}");
    }
}

/// Each rank's experts are blocks of their own, so that spread ones are rounded as those of one rank. Slices of rows have no
/// weights of their own.
#[test]
fn spread_experts_and_slices_are_those_of_one_rank() {
    let [_, _, mut qwen3, _] = four_heads();
    qwen3.experts.as_mut().unwrap().moe_intermediate_size = 8;
    let attention = vec![LoraTarget::Q, LoraTarget::K, LoraTarget::V, LoraTarget::O];
    let model = Decoder::with_lora(qwen3, &LoraConfig::new(3, 4.0, attention), tch::Device::Cpu).unwrap();
    let case = [Case {
        name: "Qwen 3 with adapters",
        model: Arc::new(model),
        recompute: Recompute::None,
        shares_prompts: false,
    }];
    let spread = |group: CollectiveGroup| Mesh::from(group).in_expert_groups(2).unwrap();
    let sliced = |group: CollectiveGroup| Mesh::from(group).in_sequence_groups(2).unwrap();
    let configs = STAGES.map(packed);
    let alone = outcomes_on(1, Mesh::from, false, &case, &configs[..1]);
    let spread = outcomes_on(2, spread, false, &case, &configs);
    let sliced = outcomes_on(2, sliced, false, &case, &configs);
    for (how, of_two) in [("spread", spread), ("sliced", sliced)] {
        assert_near(how, &of_two[0][0], &alone[0][0]);
        assert!(of_two[0].iter().all(|stage| *stage == of_two[0][0]), "{how}: stages differ");
    }
}

#[test]
fn memory_is_that_which_is_planned() {
    let model = adapted(true);
    let check = |config: ZeroConfig, world_size: usize| {
        ranks(world_size, false, |device, group| {
            let at = Ranks {
                tensor: 1,
                experts: 1,
                world_size,
                shards: world_size,
                granularity_bytes: device.arena_granularity_bytes(),
                sums_in_rank_order: group.sums_in_rank_order(),
            };
            let plan = held(&*model, config, true, at);
            let before = device.memory_info().unwrap();
            let mut zero = new(&model, config, device, group);
            train(&mut zero, 0..2, 2);
            zero.group().stream().synchronize().unwrap();
            let after = device.memory_info().unwrap();
            let own = after.allocated_bytes - before.allocated_bytes;
            assert_eq!(own, plan.device(), "{config:?} x {world_size}: {plan:?}");
            if config.steps_on == StepsOn::Device {
                assert_eq!(after.pinned_bytes - before.pinned_bytes, plan.host, "{config:?} x {world_size}");
            }
        });
    };
    for world_size in [1, 2] {
        for stage in STAGES {
            let config = ZeroConfig { precision: Precision::Bf16, ..packed(stage) };
            check(config, world_size);
            check(ZeroConfig { params_on: ParamsOn::Host, ..config }, world_size);
        }
    }
}

//! Hybrid sharding: states are sharded over some ranks, and replicated over the groups of them.

use std::sync::Arc;

use anyroll_backends::{CollectiveGroup, Device};
use anyroll_models::Decoder;
use anyroll_strategy::{
    Mesh, ParamsOn, Precision, Recompute, State, StepsOn, Zero, ZeroConfig, ZeroStage,
    checkpoint::{self, Stamp},
    plan::{Ranks, held},
};

use crate::harness::{ADAMW, STAGES, decoder, dense, floats, ranks, train, values};

/// Micro-batches of one sequence: three for each of four ranks.
const MICRO_BATCHES: usize = 12;

fn zero(
    model: &Arc<Decoder>,
    config: impl Into<ZeroConfig>,
    shards: usize,
    (device, group): (&Arc<dyn Device>, CollectiveGroup),
) -> Zero<Decoder> {
    let mesh = Mesh::from(group).in_shard_groups(shards).unwrap();
    Zero::new(model.clone(), config, Some(ADAMW), device, mesh, 7).unwrap()
}

/// Norms and weights of four steps of four ranks, in shard groups of `shards`.
fn trained(model: &Arc<Decoder>, config: impl Into<ZeroConfig>, shards: usize) -> (Vec<f64>, Vec<f32>) {
    let config = config.into();
    let mut results = ranks(4, true, |device, group| {
        let mut zero = zero(model, config, shards, (device, group));
        let norms = train(&mut zero, 0..4, MICRO_BATCHES);
        (norms, values(&mut zero), floats(&mut zero))
    });
    let (norms, bits, weights) = results.swap_remove(0);
    assert!(results.iter().all(|other| other.0 == norms && other.1 == bits), "ranks differ at {config:?}");
    (norms, weights)
}

#[test]
fn stages_are_bitwise_equal_at_each_size_of_the_groups() {
    for tied in [false, true] {
        let model = decoder(tied);
        let (norms, weights) = trained(&model, ZeroStage::Zero0, 4);
        for shards in [1, 2] {
            let outcome = trained(&model, ZeroStage::Zero0, shards);
            for (apart, whole) in outcome.0.iter().zip(&norms) {
                assert!((apart - whole).abs() <= 1e-5 * whole, "{shards}: norms {apart} and {whole}");
            }
            let most = outcome.1.iter().zip(&weights).map(|(a, b)| (a - b).abs()).fold(0.0, f32::max);
            assert!(most <= 1e-5, "{shards}: weights differ by {most}");
            for stage in &STAGES[1..] {
                assert_eq!(trained(&model, *stage, shards), outcome, "{stage:?} in groups of {shards}");
            }
        }
    }
}

#[test]
fn offload_recomputation_and_16_bits_work_in_groups() {
    let model = dense(false);
    let bf16 = ZeroConfig { precision: Precision::Bf16, ..ZeroStage::Zero0.into() };
    let expected = trained(&model, bf16, 2);
    for config in [
        ZeroConfig { stage: ZeroStage::Zero3, recompute: Recompute::Full, ..bf16 },
        ZeroConfig { stage: ZeroStage::Zero2, steps_on: StepsOn::Host, ..bf16 },
        ZeroConfig { stage: ZeroStage::Zero3, params_on: ParamsOn::Host, ..bf16 },
    ] {
        assert_eq!(trained(&model, config, 2), expected, "{config:?}");
    }
}

#[test]
fn a_checkpoint_goes_on_in_any_groups() {
    let model = decoder(false);
    let folder = tempfile::tempdir().unwrap();
    let stamp = Stamp { run: 3, step: 2 };
    let saved = |shards: usize, stage: ZeroStage| {
        let path = folder.path().join(format!("{shards}"));
        ranks(4, false, |device, group| {
            let mut zero = zero(&model, stage, shards, (device, group));
            train(&mut zero, 0..2, MICRO_BATCHES);
            checkpoint::save(&mut zero, &path, stamp, "extra".into()).unwrap();
            values(&mut zero)
        });
        path
    };
    for (shards, stage) in [(1, ZeroStage::Zero1), (2, ZeroStage::Zero3), (4, ZeroStage::Zero2)] {
        let path = saved(shards, stage);
        checkpoint::verify(&path).unwrap();
        let resumed = |world_size: usize, shards: usize, stage: ZeroStage| {
            let mut all = ranks(world_size, false, |device, group| {
                let mut zero = zero(&model, stage, shards, (device, group));
                assert_eq!(checkpoint::load(&mut zero, &path).unwrap(), "extra");
                let weights = values(&mut zero);
                (weights, train(&mut zero, 2..4, MICRO_BATCHES), values(&mut zero))
            });
            all.swap_remove(0)
        };
        let whole = trained(&model, stage, shards).1;
        let here = resumed(4, shards, stage);
        assert_eq!(here.2, whole.iter().map(|value| value.to_bits()).collect::<Vec<_>>(), "{shards}");
        for (world_size, other, stage) in
            [(1, 1, ZeroStage::Zero0), (2, 2, ZeroStage::Zero3), (4, 2, ZeroStage::Zero1)]
        {
            let there = resumed(world_size, other, stage);
            assert_eq!(there.0, here.0, "weights of {shards} in {other} of {world_size}");
        }
    }
}

/// Gradients of micro-batches are summed over a group, so that a replica's memory is that of fewer ranks.
#[test]
fn memory_is_planned() {
    let model = decoder(false);
    for stage in STAGES {
        ranks(4, false, |device, group| {
            let at = Ranks {
                tensor: 1,
                experts: 1,
                world_size: 4,
                shards: 2,
                granularity_bytes: device.arena_granularity_bytes(),
                sums_in_rank_order: group.sums_in_rank_order(),
            };
            let plan = held(&*model, stage.into(), true, at);
            let before = device.memory_info().unwrap().allocated_bytes;
            let mut zero = zero(&model, stage, 2, (device, group));
            train(&mut zero, 0..2, 2);
            zero.group().stream().synchronize().unwrap();
            let used = device.memory_info().unwrap().allocated_bytes - before;
            // On a host the slices of other replicas are ordinary tensors.
            assert_eq!(used, plan.device() - plan.replicas, "{stage:?}: {plan:?}");
            assert_eq!(zero.offload_states(&[State::Optimizer]).unwrap(), plan.optimizer);
        });
    }
}

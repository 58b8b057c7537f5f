//! Weights in bf16 with fp32 master weights, and recomputation.

use anyroll_strategy::{
    Precision, Recompute, Zero, ZeroConfig, ZeroStage,
    checkpoint::{self, Stamp},
};
use tch::Kind;

use crate::harness::{ADAMW, STAGES, dense, floats, ranks, train, train_with, trained, values, zero};

fn config(stage: ZeroStage, precision: Precision, recompute: Recompute) -> ZeroConfig {
    ZeroConfig { precision, recompute, ..stage.into() }
}

fn bf16(stage: ZeroStage) -> ZeroConfig {
    config(stage, Precision::Bf16, Recompute::None)
}

#[test]
fn stages_are_bitwise_equal_in_bf16() {
    for world_size in [1, 2, 3] {
        for tied in [false, true] {
            let reference = trained(bf16(ZeroStage::Zero0), world_size, tied, false, 12);
            for stage in STAGES {
                let same = trained(bf16(stage), world_size, tied, true, 12) == reference;
                assert!(same, "{stage:?} x {world_size}, tied {tied}");
            }
        }
    }
}

#[test]
fn recomputing_changes_no_bit() {
    for precision in [Precision::Fp32, Precision::Bf16] {
        for (world_size, tied) in [(1, false), (2, true), (3, false)] {
            let reference =
                trained(config(ZeroStage::Zero0, precision, Recompute::None), world_size, tied, false, 12);
            for stage in STAGES {
                for recompute in [Recompute::Selective, Recompute::Full] {
                    let again = config(stage, precision, recompute);
                    let same = trained(again, world_size, tied, true, 12) == reference;
                    assert!(same, "{again:?} x {world_size}, tied {tied}");
                }
            }
        }
    }
}

#[test]
fn the_master_leaves_and_comes_back() {
    let reference = trained(bf16(ZeroStage::Zero0), 2, true, false, 12);
    for stage in STAGES {
        use anyroll_strategy::State::{Gradients, Optimizer, Params};
        let away = ranks(2, true, |device, group| {
            let mut zero = zero(bf16(stage), true, device, group);
            let norms = train_with(&mut zero, 0..4, 12, |zero| {
                zero.offload_states(&[Optimizer, Params, Gradients]).unwrap();
                zero.load_states(&[Params, Optimizer, Gradients]).unwrap();
            });
            (norms, values(&mut zero))
        });
        assert!(away.iter().all(|rank| *rank == reference), "{stage:?}");
    }
}

/// Trains in bf16, saves, loads the checkpoint at another configuration, and continues there.
#[test]
fn a_checkpoint_keeps_the_master_and_loads_at_any_precision() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("step_000002");
    let trained = ranks(2, false, |device, group| {
        let mut zero = zero(bf16(ZeroStage::Zero2), true, device, group);
        train(&mut zero, 0..2, 2);
        checkpoint::save(&mut zero, &path, Stamp::default(), serde_json::Value::Null).unwrap();
        let saved = values(&mut zero);
        train(&mut zero, 2..4, 2);
        (saved, values(&mut zero))
    });
    let (saved, trained) = &trained[0];
    for (world_size, stage) in [(2, ZeroStage::Zero3), (1, ZeroStage::Zero0), (2, ZeroStage::Zero1)] {
        let resumed = ranks(world_size, false, |device, group| {
            let mut zero = zero(bf16(stage), true, device, group);
            checkpoint::load(&mut zero, &path).unwrap();
            let loaded = values(&mut zero);
            train(&mut zero, 2..4, 2);
            (loaded, values(&mut zero))
        });
        assert!(resumed[0].0 == *saved && resumed[0].1 == *trained, "{stage:?} x {world_size}");
    }
    ranks(1, false, |device, group| {
        let mut zero = zero(ZeroStage::Zero0, true, device, group);
        checkpoint::load(&mut zero, &path).unwrap();
        let master = floats(&mut zero);
        let rounded: Vec<u32> = floats_as_bf16(&master);
        assert!(rounded == *saved, "the weights are the rounded master weights");
        assert!(master.iter().zip(saved).any(|(master, saved)| master.to_bits() != *saved));
    });
}

fn floats_as_bf16(values: &[f32]) -> Vec<u32> {
    let rounded = tch::Tensor::from_slice(values).to_kind(Kind::BFloat16).to_kind(Kind::Float);
    Vec::<f32>::try_from(rounded).unwrap().iter().map(|value| value.to_bits()).collect()
}

#[test]
fn bf16_stays_close_to_fp32() {
    let run = |precision| {
        let mut of_ranks = ranks(2, false, |device, group| {
            let mut zero = Zero::new(
                dense(false),
                config(ZeroStage::Zero2, precision, Recompute::None),
                Some(ADAMW),
                device,
                group,
                7,
            )
            .unwrap();
            let norms = train(&mut zero, 0..4, 12);
            let expected = if precision == Precision::Bf16 { Kind::BFloat16 } else { Kind::Float };
            assert_eq!(zero.weights().unwrap()[1][0].kind(), expected);
            (norms, floats(&mut zero))
        });
        of_ranks.remove(0)
    };
    let (exact, rounded) = (run(Precision::Fp32), run(Precision::Bf16));
    // Equal weights at first, up to rounding. Then each step of Adam moves a weight by the sign of its
    // gradient.
    let apart = |(exact, rounded): (&f64, &f64)| (exact - rounded).abs() / exact;
    let norms: Vec<f64> = exact.0.iter().zip(&rounded.0).map(apart).collect();
    assert!(norms[0] < 0.01 && norms.iter().all(|&apart| apart < 0.2), "norms differ by {norms:?}");
    let squares = |values: &mut dyn Iterator<Item = f32>| values.map(|v| f64::from(v).powi(2)).sum::<f64>();
    let difference = squares(&mut exact.1.iter().zip(&rounded.1).map(|(a, b)| a - b)).sqrt();
    let size = squares(&mut exact.1.iter().copied()).sqrt();
    assert!(difference < 0.02 * size, "weights of norm {size} differ by {difference}");
}

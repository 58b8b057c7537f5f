//! Moments in 8 bits.

use anyroll_strategy::{
    Moments, ParamsOn, Precision, StepsOn, Zero, ZeroConfig, ZeroStage,
    checkpoint::{self, Stamp},
};

use crate::harness::{ADAMW, STAGES, dense, floats, ranks, train, train_with, trained, values, zero};

fn rounded(stage: ZeroStage, precision: Precision) -> ZeroConfig {
    ZeroConfig { precision, moments: Moments::EightBit, ..stage.into() }
}

/// Also where states are on the host, or leave the device between steps.
#[test]
fn stages_and_places_are_bitwise_equal() {
    for precision in [Precision::Fp32, Precision::Bf16] {
        for (world_size, tied) in [(1, true), (2, false), (3, true)] {
            let reference = trained(rounded(ZeroStage::Zero0, precision), world_size, tied, false, 12);
            for stage in STAGES {
                let on_device = rounded(stage, precision);
                let on_host = ZeroConfig { steps_on: StepsOn::Host, ..on_device };
                let streamed = ZeroConfig { params_on: ParamsOn::Host, ..on_host };
                for config in [on_device, on_host, streamed] {
                    let same = trained(config, world_size, tied, true, 12) == reference;
                    assert!(same, "{config:?} x {world_size}, tied {tied}");
                }
            }
        }
    }
    use anyroll_strategy::State::{Gradients, Optimizer};
    let reference = trained(rounded(ZeroStage::Zero0, Precision::Bf16), 2, true, false, 12);
    let away = ranks(2, true, |device, group| {
        let mut zero = zero(rounded(ZeroStage::Zero2, Precision::Bf16), true, device, group);
        let norms = train_with(&mut zero, 0..4, 12, |zero| {
            zero.offload_states(&[Optimizer, Gradients]).unwrap();
            zero.load_states(&[Optimizer, Gradients]).unwrap();
        });
        (norms, values(&mut zero))
    });
    assert!(away.iter().all(|rank| *rank == reference));
}

/// A checkpoint has fp32 values, which become the same bits again at each stage. With fp32 moments it goes on too.
#[test]
fn a_checkpoint_keeps_the_bits_of_moments() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("step_000002");
    let config = |stage| rounded(stage, Precision::Bf16);
    let whole = ranks(2, false, |device, group| {
        let mut zero = zero(config(ZeroStage::Zero2), true, device, group);
        train(&mut zero, 0..2, 2);
        checkpoint::save(&mut zero, &path, Stamp::default(), serde_json::Value::Null).unwrap();
        train(&mut zero, 2..4, 2);
        values(&mut zero)
    });
    let resumed = |config: ZeroConfig| {
        let mut all = ranks(2, false, |device, group| {
            let mut zero = zero(config, true, device, group);
            checkpoint::load(&mut zero, &path).unwrap();
            train(&mut zero, 2..4, 2);
            values(&mut zero)
        });
        all.swap_remove(0)
    };
    for stage in STAGES {
        assert!(resumed(config(stage)) == whole[0], "{stage:?}");
    }
    let on_host = ZeroConfig { steps_on: StepsOn::Host, ..config(ZeroStage::Zero1) };
    assert!(resumed(on_host) == whole[0]);
    let wide = ZeroConfig { moments: Moments::Fp32, ..config(ZeroStage::Zero1) };
    assert!(resumed(wide) != whole[0], "nothing was rounded");
}

/// Twenty steps: the distance from training with fp32 moments is small beside the way of the weights.
#[test]
fn training_stays_near_that_with_fp32_moments() {
    let run = |moments: Moments| {
        let mut all = ranks(1, false, |device, group| {
            let config = ZeroConfig { moments, ..ZeroStage::Zero0.into() };
            let mut zero = Zero::new(dense(true), config, Some(ADAMW), device, group, 7).unwrap();
            let start = floats(&mut zero);
            train(&mut zero, 0..20, 2);
            (start, floats(&mut zero))
        });
        all.swap_remove(0)
    };
    let (start, wide) = run(Moments::Fp32);
    let (_, rounded) = run(Moments::EightBit);
    let distance =
        |a: &[f32], b: &[f32]| a.iter().zip(b).map(|(a, b)| f64::from(a - b).powi(2)).sum::<f64>().sqrt();
    let (apart, way) = (distance(&rounded, &wide), distance(&wide, &start));
    assert!(apart > 0.0 && apart < 0.1 * way, "{apart} after a way of {way}");
}

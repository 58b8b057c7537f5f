//! Weights in fp16: the loss scale matches PyTorch's, an overflow has no effect on the weights, and stages
//! agree.

use anyroll_strategy::{
    Error, Fp16Config, Precision, Stepped, StepsOn, Zero, ZeroConfig, ZeroStage,
    checkpoint::{self, Stamp},
};
use tch::Kind;

use crate::harness::{
    ADAMW, STAGES, accumulate, dense, floats, ranks, sequence, train, trained, values, zero,
};

/// Steps whose gradient overflows. The scale at each step comes from tests/python/make_loss_scale_golden.py.
const OVERFLOWS: [usize; 4] = [0, 1, 6, 12];
const SCALES: [f64; 18] = [
    1024.0, 512.0, 256.0, 256.0, 256.0, 512.0, 512.0, 256.0, 256.0, 256.0, 512.0, 512.0, 512.0, 256.0, 256.0,
    256.0, 512.0, 512.0,
];

fn fp16(stage: ZeroStage, initial_scale: f64, growth_interval: u32) -> ZeroConfig {
    let precision = Precision::Fp16(Fp16Config { initial_scale, growth_interval });
    ZeroConfig { precision, ..stage.into() }
}

/// Runs one step on a single sequence, whose gradient overflows or not.
fn step(zero: &mut Zero<anyroll_models::Decoder>, number: u64, overflows: bool) -> Stepped {
    accumulate(zero, &[sequence(number, 3)], if overflows { f64::INFINITY } else { -0.1 });
    let stats = zero.step(1e-2).unwrap();
    zero.finish_step(&stats).unwrap()
}

#[test]
fn stages_are_bitwise_equal() {
    for (world_size, tied) in [(1, false), (2, true), (3, false)] {
        // Large enough that the first step overflows, and no later one for a long time.
        let overflows = |&scale: &f64| {
            let config = fp16(ZeroStage::Zero0, scale, 2);
            let norms =
                ranks(1, false, |device, group| train(&mut zero(config, tied, device, group), 0..1, 12));
            norms[0][0].is_infinite()
        };
        let scale = (10..24).map(|power| f64::from(1 << power)).find(overflows).expect("fp16 ends at 65504");
        let reference = trained(fp16(ZeroStage::Zero0, scale, 2), world_size, tied, false, 12);
        assert!(reference.0.iter().any(|norm| norm.is_infinite()), "{:?}", reference.0);
        assert!(reference.0.iter().any(|norm| norm.is_finite()), "{:?}", reference.0);
        for stage in STAGES {
            let same = trained(fp16(stage, scale, 2), world_size, tied, true, 12) == reference;
            assert!(same, "{stage:?} x {world_size}, tied {tied}");
        }
    }
}

#[test]
fn the_loss_scale_is_that_of_pytorch() {
    for world_size in [1, 2] {
        ranks(world_size, false, |device, group| {
            // One of several ranks overflows, and all ranks skip the step.
            let overflows_here = group.rank() + 1 == world_size;
            let mut zero = zero(fp16(ZeroStage::Zero3, SCALES[0], 3), true, device, group);
            for (number, scale) in SCALES.into_iter().enumerate() {
                let overflows = OVERFLOWS.contains(&number);
                let before = values(&mut zero);
                let stepped = step(&mut zero, number as u64, overflows && overflows_here);
                assert_eq!(stepped.loss_scale, Some(scale), "step {number}");
                assert_eq!(stepped.grad_norm.is_none(), overflows, "step {number}");
                assert_eq!(before == values(&mut zero), overflows, "step {number}");
            }
        });
    }
}

#[test]
fn a_skipped_step_leaves_no_trace_but_the_scale() {
    for stage in STAGES {
        let run = |initial: f64, overflows: u64| {
            let mut of_ranks = ranks(2, false, |device, group| {
                let mut zero = zero(fp16(stage, initial, 2000), true, device, group);
                for number in 0..overflows {
                    step(&mut zero, number, true);
                }
                for number in 0..3 {
                    step(&mut zero, number, false);
                }
                values(&mut zero)
            });
            of_ranks.remove(0)
        };
        assert!(run(4096.0, 2) == run(1024.0, 0), "{stage:?}");
    }
}

#[test]
fn an_overflow_that_no_scale_mends_is_an_error() {
    ranks(1, false, |device, group| {
        let mut zero = zero(fp16(ZeroStage::Zero1, 2.0, 2000), true, device, group);
        let before = values(&mut zero);
        assert_eq!(step(&mut zero, 0, true), Stepped { grad_norm: None, loss_scale: Some(2.0) });
        accumulate(&mut zero, &[sequence(0, 3)], f64::INFINITY);
        let stats = zero.step(1e-2).unwrap();
        assert!(before == values(&mut zero));
        // The next step begins before the failed one is read.
        accumulate(&mut zero, &[sequence(0, 3)], -0.1);
        zero.step(1e-2).unwrap();
        let error = zero.finish_step(&stats).unwrap_err();
        assert!(matches!(error, Error::NonFiniteGradient { step: 2, loss_scale: Some(1.0), .. }), "{error}");
    });
}

#[test]
fn steps_that_are_all_skipped_are_an_error() {
    for world_size in [1, 2] {
        ranks(world_size, false, |device, group| {
            let mut zero = zero(fp16(ZeroStage::Zero2, 65536.0, 2000), true, device, group);
            zero.check_divergence().unwrap();
            for number in 0..3 {
                step(&mut zero, number, true);
            }
            let error = zero.check_divergence().unwrap_err();
            assert!(matches!(error, Error::AllSkipped { steps: 3 }), "{error}");
            step(&mut zero, 3, false);
            zero.check_divergence().unwrap();
        });
    }
}

/// The gradient of this step is finite.
#[test]
fn a_step_that_leaves_the_precision_is_an_error() {
    let too_far =
        [(Precision::Fp32, 1e39), (Precision::Bf16, 1e39), (fp16(ZeroStage::Zero0, 1.0, 9).precision, 1e5)];
    for (stage, (precision, learning_rate)) in
        STAGES.into_iter().flat_map(|stage| too_far.map(|it| (stage, it)))
    {
        for steps_on in [StepsOn::Device, StepsOn::Host] {
            ranks(2, false, |device, group| {
                let config = ZeroConfig { precision, steps_on, ..stage.into() };
                let mut zero = zero(config, true, device, group);
                accumulate(&mut zero, &[sequence(0, 3)], -0.1);
                let stats = zero.step(learning_rate).unwrap();
                zero.finish_step(&stats).unwrap();
                let error = zero.check_divergence().unwrap_err();
                assert!(matches!(error, Error::NonFiniteWeights { elements: 1.. }), "{error}");
            });
        }
    }
}

/// A checkpoint holds the scale, the steps since it grew, and the number of steps taken.
#[test]
fn a_checkpoint_keeps_the_scale() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("step_000003");
    let config = |stage| fp16(stage, 1024.0, 3);
    let rest = |zero: &mut Zero<_>| {
        let scales: Vec<_> = (3..7).map(|number| step(zero, number, false).loss_scale).collect();
        (scales, values(zero))
    };
    let whole = ranks(2, false, |device, group| {
        let mut zero = zero(config(ZeroStage::Zero2), true, device, group);
        for number in 0..3 {
            step(&mut zero, number, number == 0);
        }
        checkpoint::save(&mut zero, &path, Stamp::default(), serde_json::Value::Null).unwrap();
        rest(&mut zero)
    });
    assert_eq!(whole[0].0, [512.0, 1024.0, 1024.0, 1024.0].map(Some));
    for stage in [ZeroStage::Zero2, ZeroStage::Zero0] {
        let resumed = ranks(2, false, |device, group| {
            let mut zero = zero(config(stage), true, device, group);
            checkpoint::load(&mut zero, &path).unwrap();
            rest(&mut zero)
        });
        assert!(resumed == whole, "{stage:?}");
    }
}

#[test]
fn fp16_stays_close_to_fp32() {
    let run = |config: ZeroConfig| {
        let mut of_ranks = ranks(2, false, |device, group| {
            let mut zero = Zero::new(dense(false), config, Some(ADAMW), device, group, 7).unwrap();
            let norms = train(&mut zero, 0..4, 12);
            (zero.weights().unwrap()[1][0].kind(), norms, floats(&mut zero))
        });
        of_ranks.remove(0)
    };
    let (exact, rounded) = (run(ZeroStage::Zero2.into()), run(fp16(ZeroStage::Zero2, 1024.0, 2000)));
    assert_eq!((exact.0, rounded.0), (Kind::Float, Kind::Half));
    let norms: Vec<f64> = exact.1.iter().zip(&rounded.1).map(|(a, b)| (a - b).abs() / a).collect();
    assert!(norms[0] < 2e-3 && norms.iter().all(|&apart| apart < 0.05), "norms are apart by {norms:?}");
    let squares = |values: &mut dyn Iterator<Item = f32>| values.map(|v| f64::from(v).powi(2)).sum::<f64>();
    let difference = squares(&mut exact.2.iter().zip(&rounded.2).map(|(a, b)| a - b)).sqrt();
    let size = squares(&mut exact.2.iter().copied()).sqrt();
    assert!(difference < 0.005 * size, "weights of norm {size} differ by {difference}");
}

//! Stages and world sizes agree bitwise, with each other and after a checkpoint.

use anyroll_strategy::{
    ZeroStage,
    checkpoint::{self, Stamp},
};

use crate::harness::{STAGES, accumulate, ranks, sequence, train, trained, values, zero};

#[test]
fn stages_are_bitwise_equal() {
    for world_size in [1, 2, 3, 4] {
        for tied in [false, true] {
            let reference = trained(ZeroStage::Zero0, world_size, tied, false, 12);
            assert!(reference.0.iter().all(|norm| *norm > 0.05), "clipping is tested only when it is active");
            for stage in STAGES {
                assert!(
                    trained(stage, world_size, tied, true, 12) == reference,
                    "{stage:?} x {world_size}, tied {tied}"
                );
            }
        }
    }
}

#[test]
fn the_split_over_ranks_does_not_change_the_bits() {
    // One micro-batch per rank: the same micro-batches are added in the same order. Only the norm's partial
    // sums differ, in fp64.
    let alone = trained(ZeroStage::Zero0, 1, false, false, 2);
    for stage in [ZeroStage::Zero0, ZeroStage::Zero3] {
        let split = trained(stage, 2, false, false, 2);
        assert!(alone.1 == split.1, "weights at {stage:?}");
        let close = |(a, b): (&f64, &f64)| (a - b).abs() <= 1e-12 * a;
        assert!(alone.0.iter().zip(&split.0).all(close), "{:?} {:?}", alone.0, split.0);
    }
}

#[test]
fn training_goes_on_from_a_checkpoint_as_if_it_had_not_stopped() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("step_000002");
    let whole = ranks(2, false, |device, group| {
        let mut zero = zero(ZeroStage::Zero2, true, device, group);
        train(&mut zero, 0..2, 2);
        checkpoint::save(&mut zero, &path, Stamp::default(), serde_json::json!({"cursor": 5})).unwrap();
        train(&mut zero, 2..4, 2);
        values(&mut zero)
    });
    // Also at another stage and world size: the order of summation is that of the micro-batches.
    for (world_size, stage) in
        [(2, ZeroStage::Zero2), (2, ZeroStage::Zero3), (2, ZeroStage::Zero0), (1, ZeroStage::Zero0)]
    {
        let resumed = ranks(world_size, false, |device, group| {
            let mut zero = zero(stage, true, device, group);
            let extra = checkpoint::load(&mut zero, &path).unwrap();
            assert_eq!((extra["cursor"].as_u64(), zero.steps_done()), (Some(5), 2));
            train(&mut zero, 2..4, 2);
            values(&mut zero)
        });
        assert!(resumed[0] == whole[0], "{stage:?} x {world_size}");
    }
    damaged_checkpoints_are_named(&path);
}

fn damaged_checkpoints_are_named(path: &std::path::Path) {
    let shard = path.join("rank_0001.bin");
    let good = std::fs::read(&shard).unwrap();
    let load = || {
        let mut outcome = ranks(1, false, |device, group| {
            let mut zero = zero(ZeroStage::Zero0, true, device, group);
            let error = checkpoint::load(&mut zero, path).unwrap_err();
            let source = std::error::Error::source(&error).map_or(String::new(), ToString::to_string);
            format!("{error}: {source}")
        });
        outcome.remove(0)
    };
    let check = |bytes: Option<&[u8]>, words: &str| {
        match bytes {
            Some(bytes) => std::fs::write(&shard, bytes).unwrap(),
            None => std::fs::remove_file(&shard).unwrap(),
        }
        let message = load();
        assert!(message.contains("rank_0001.bin") && message.contains(words), "{message}");
    };
    let mut flipped = good.clone();
    flipped[100] ^= 1;
    check(Some(&flipped), "checksum");
    check(Some(&good[..good.len() - 1]), "bytes instead of");
    check(None, "No such file");
}

#[test]
fn a_gradient_that_is_not_finite_changes_nothing() {
    for (stage, gradient) in STAGES.into_iter().flat_map(|stage| [(stage, f64::NAN), (stage, f64::INFINITY)])
    {
        let same = ranks(2, false, |device, group| {
            let mut zero = zero(stage, false, device, group);
            train(&mut zero, 0..1, 2);
            let before = values(&mut zero);
            accumulate(&mut zero, &[sequence(0, 3)], gradient);
            let stats = zero.step(1e-2).unwrap();
            let error = zero.finish_step(&stats).unwrap_err().to_string();
            assert!(error.contains("step 2") && error.contains("the gradient norm is"), "{error}");
            before == values(&mut zero)
        });
        assert_eq!(same, [true, true], "{stage:?}, {gradient}");
    }
}

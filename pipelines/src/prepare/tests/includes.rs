//! Strategies from a file, from a name and from `--set`.

use anyroll_config::{Fp16Config, OptimizerOffload, Precision, Recompute, StrategyConfig, ZeroStage};

use super::{SMALL, read};

/// The strategy of a file with `said` and `sets`.
fn strategy(said: &str, sets: &[&str]) -> StrategyConfig {
    let beside = "{micro_batch_size: 8}";
    assert!(SMALL.contains(beside));
    let file = SMALL.replace(beside, &format!("{{micro_batch_size: 8, {said}}}"));
    read(&file, sets).unwrap().config.strategy
}

#[test]
fn what_comes_later_counts_more() {
    let file = "zero_stage: 0, precision: fp32, recompute: selective";
    // Fields of the file next to the name.
    let found = strategy(&format!("include: zero3_cpu_offload, {file}"), &[]);
    assert_eq!((found.zero_stage, found.precision), (ZeroStage::Stage(0), Precision::Fp32));
    assert_eq!(found.offload.optimizer, OptimizerOffload::CpuStep);

    // A name in `--set` overrides the file; fields that the named strategy does not set are kept.
    let found = strategy(file, &["strategy.include=zero3"]);
    assert_eq!((found.zero_stage, found.precision), (ZeroStage::Stage(3), Precision::Bf16));
    assert_eq!((found.recompute, found.micro_batch_size), (Recompute::Selective, 8));
    let found = strategy(file, &["strategy.include=zero2_fp16"]);
    let fp16 = Precision::Fp16(Fp16Config { initial_scale: 65536.0, growth_interval: 2000 });
    assert_eq!((found.zero_stage, found.precision), (ZeroStage::Stage(2), fp16));

    // The later of several `--set`s.
    let named = "strategy.include=zero3";
    let stage = |sets: &[&str]| strategy(file, sets).zero_stage;
    assert_eq!(stage(&[named, "strategy.zero_stage=1"]), ZeroStage::Stage(1));
    assert_eq!(stage(&["strategy.zero_stage=1", named]), ZeroStage::Stage(3));
    assert_eq!(stage(&[named, "strategy.include=zero1"]), ZeroStage::Stage(1));
    assert_eq!(
        stage(&["strategy={include: zero3, zero_stage: 2, micro_batch_size: 8}"]),
        ZeroStage::Stage(2)
    );
}

//! `strategy.shard_group`: states are sharded over some ranks, and replicated over the groups of them.

use super::sequence::assert_near;
use super::{
    TWO_RANKS, anyroll, assert_same, assert_same_steps, fail, interrupt, lasting_metrics, resume, run_tiny,
    succeed, tiny,
};

const PAIRS: [&str; 2] = ["devices=4", "strategy.shard_group=2"];

#[test]
fn replicas_train_as_one_group_does() {
    let folder = tempfile::tempdir().unwrap();
    let run = |name: &str, sets: &[&str]| {
        run_tiny(&folder, name, TWO_RANKS, &[&["pipeline.rlvr.steps=6"], sets].concat())
    };
    let whole = run("whole", &["devices=4", "strategy.zero_stage=3"]);
    let pairs =
        run("pairs", &[&PAIRS[..], &["strategy.zero_stage=3", "strategy.micro_batch_size=4"]].concat());
    assert_near(&whole, &pairs);
    let first =
        run("first", &[&PAIRS[..], &["strategy.zero_stage=1", "strategy.micro_batch_size=4"]].concat());
    assert_same_steps(&lasting_metrics(&pairs), &lasting_metrics(&first));
    // Sequences and samples of ranks of both groups.
    let over =
        ["strategy.zero_stage=3", "strategy.sequence_parallel=4", "pipeline.rlvr.rollout.tensor_parallel=4"];
    assert_near(&whole, &run("over", &[&PAIRS[..], &over].concat()));
}

#[test]
fn a_run_of_replicas_goes_on_bitwise() {
    let folder = tempfile::tempdir().unwrap();
    let sets = [
        &PAIRS[..],
        &[
            "strategy.zero_stage=2",
            "pipeline.rlvr.steps=24",
            "pipeline.rlvr.checkpoint.every=12",
            "pipeline.rlvr.algorithm.kl_coef=0.01",
        ],
    ]
    .concat();
    let whole = run_tiny(&folder, "whole", TWO_RANKS, &sets);
    let cut = folder.path().join("cut");
    interrupt(tiny(TWO_RANKS, &cut, &sets), &cut, 5);
    succeed(resume(&cut));
    assert_same(&whole, &cut);
}

#[test]
fn groups_that_do_not_divide_the_ranks_are_refused() {
    for (group, problem) in [
        ("3", "4 ranks cannot be divided into groups of 3"),
        ("0", "it is 0"),
        ("rack", "a number of ranks, `all` or `host`"),
    ] {
        let group = format!("strategy.shard_group={group}");
        let error = fail(anyroll(["check", TWO_RANKS, "--set", "devices=4", "--set", &group]));
        assert!(error.contains("shard_group") && error.contains(problem), "{error}");
    }
}

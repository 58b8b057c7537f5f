//! `rollout.tensor_parallel`: ranks that sample together, each with a part of every matrix.

use super::merged_adapters::{LORA, trained};
use super::sequence::assert_near;
use super::{
    TWO_RANKS, anyroll, assert_same, assert_same_steps, fail, interrupt, lasting_metrics, resume, run_tiny,
    succeed, tiny,
};

const FIELD: &str = "pipeline.rlvr.rollout.tensor_parallel";
const TOGETHER: &str = "pipeline.rlvr.rollout.tensor_parallel=2";

#[test]
fn ranks_that_sample_together_learn_as_ranks_that_do_not() {
    let folder = tempfile::tempdir().unwrap();
    let run = |name: &str, sets: &[&str]| {
        let sets = [&["pipeline.rlvr.steps=6", "pipeline.rlvr.selection={mixed_groups: {}}"], sets].concat();
        run_tiny(&folder, name, TWO_RANKS, &sets)
    };
    let alone = run("alone", &[]);
    let together = run("together", &[TOGETHER]);
    assert_near(&alone, &together);
    let sharded = run("sharded", &[TOGETHER, "strategy.zero_stage=3"]);
    assert_same_steps(&lasting_metrics(&together), &lasting_metrics(&sharded));
    assert_near(&alone, &run("four", &[TOGETHER, "devices=4", "strategy.zero_stage=1"]));
}

#[test]
fn adapters_are_sampled_together_as_they_are_and_merged() {
    let folder = tempfile::tempdir().unwrap();
    let run = |name: &str, sets: &[&str]| trained(&folder, name, &[&["devices=2", LORA], sets].concat());
    let alone = run("alone", &[]);
    assert_near(&alone, &run("together", &[TOGETHER]));
    assert_near(&alone, &run("merged", &[TOGETHER, "pipeline.rlvr.rollout.merge_adapters=true"]));
}

#[test]
fn a_run_that_samples_together_goes_on_bitwise() {
    let folder = tempfile::tempdir().unwrap();
    let sets =
        [TOGETHER, "strategy.zero_stage=2", "pipeline.rlvr.steps=16", "pipeline.rlvr.checkpoint.every=8"];
    let whole = run_tiny(&folder, "whole", TWO_RANKS, &sets);
    let cut = folder.path().join("cut");
    interrupt(tiny(TWO_RANKS, &cut, &sets), &cut, 4);
    succeed(resume(&cut));
    assert_same(&whole, &cut);
}

#[test]
fn ranks_that_cannot_sample_together_are_refused() {
    for (sets, problem) in [
        (vec!["pipeline.rlvr.rollout.tensor_parallel=3"], "2 ranks cannot be divided into groups of 3"),
        (
            vec!["devices=8", "pipeline.rlvr.rollout.tensor_parallel=8"],
            "is 4, which 8 ranks cannot share evenly",
        ),
        (vec![TOGETHER, "pipeline.rlvr.rollout.strict=true"], "rollout.strict"),
        (vec![TOGETHER, "pipeline.rlvr.rollout.async={ahead: 1}"], "rollout.async"),
        (vec!["pipeline.rlvr.rollout.tensor_parallel=0"], ""),
    ] {
        let sets = sets.iter().flat_map(|&set| ["--set", set]);
        let error = fail(anyroll(["check", TWO_RANKS].into_iter().chain(sets)));
        assert!(error.contains(FIELD) && error.contains(problem), "{problem}: {error}");
    }
}

//! Roles on other devices than the policy's. The host is one device for all of them, so here they have their
//! own threads and communicators.

use std::fs;
use std::path::Path;

use nix::sys::signal::Signal;

use super::{
    ONE_RANK, Process, TWO_RANKS, assert_nothing_left, assert_same, assert_same_steps,
    asynchronous::{UNEVEN, assert_repeats},
    fail, interrupt, last_checkpoint, lasting_metrics, metrics, rank_of, resume, run_tiny, series, succeed,
    tiny, wait_for_steps,
};

const AHEAD: &str = "pipeline.rlvr.rollout.async.ahead=1";

#[test]
fn where_completions_are_sampled_changes_none_of_them() {
    let folder = tempfile::tempdir().unwrap();
    for (config, devices, advantage) in [
        (ONE_RANK, 1, "{grpo: {}}"),
        (ONE_RANK, 1, "remax"),
        (ONE_RANK, 2, "{grpo: {}}"),
        (TWO_RANKS, 4, "remax"),
    ] {
        let own = format!("roles.rollout.devices={devices}");
        let advantage = format!("pipeline.rlvr.algorithm.advantage={advantage}");
        let together = run_tiny(&folder, &format!("without {devices} {advantage}"), config, &[&advantage]);
        let apart = run_tiny(&folder, &format!("{devices} {advantage}"), config, &[&advantage, &own]);
        assert_eq!(series(&together, "reward/mean")[..4], series(&apart, "reward/mean")[..4]);
        assert!(series(&apart, "rollout/logprob_diff_max").iter().all(|&difference| difference < 1e-4));
        assert!(series(&apart, "time/rollout_s").iter().all(|&seconds| seconds > 0.0));
        // States stay on the device if only evaluation samples, before the first step and after the fourth.
        let [held, sampling] =
            ["perf/allocated_bytes", "perf/generate_allocated_bytes"].map(|name| series(&apart, name));
        assert!(
            sampling[1..4].iter().zip(&held[1..]).all(|(sampling, held)| sampling >= held),
            "{sampling:?}"
        );
        // Engines with fewer sequences round differently; with the same number they are bitwise equal.
        if devices == 1 {
            assert_same_steps(&lasting_metrics(&together), &lasting_metrics(&apart));
        }
    }
}

#[test]
fn one_step_ahead_is_one_step_stale() {
    let folder = tempfile::tempdir().unwrap();
    for (config, devices) in [(ONE_RANK, "roles.rollout.devices=2"), (TWO_RANKS, "roles.rollout={}")] {
        let run = |name: &str| run_tiny(&folder, &format!("{name} {devices}"), config, &[AHEAD, devices]);
        let whole = run("whole");
        let [stale, carried] = ["staleness/mean", "carried/whole_groups"].map(|name| series(&whole, name));
        assert_eq!(stale[0], 0.0, "the first step waits for what it trains on");
        assert!(stale[1..].iter().all(|&steps| steps == 1.0), "{stale:?}");
        assert!(carried.iter().all(|&groups| groups == 0.0), "{carried:?}");
        assert_eq!(series(&whole, "time/rollout_s").len(), stale.len());
        // A seed determines every bit, and a checkpoint includes completions in flight.
        let again = run("again");
        assert_repeats(&whole, &again);
    }
}

#[test]
fn what_several_steps_ahead_have_begun_goes_on_with_new_weights() {
    let folder = tempfile::tempdir().unwrap();
    // A reward model scores several completions together.
    let model = "pipeline.rlvr.reward=[{regex: {pattern: '^.{0,4}$'}}, \
                 {model: {path: tests/golden/reward_model, batch_size: 6}, weight: 0.1}]";
    let remax = "pipeline.rlvr.algorithm.advantage=remax";
    for (config, devices, ahead, bound, set) in [
        (ONE_RANK, 1, "{ahead: 2, max_staleness: 5}", 2.0, model),
        (ONE_RANK, 3, "{ahead: 3}", 3.0, remax),
        (TWO_RANKS, 2, "{ahead: 3}", 3.0, "strategy.zero_stage=3"),
    ] {
        let own = [
            &*format!("roles.rollout.devices={devices}"),
            &format!("pipeline.rlvr.rollout.async={ahead}"),
            set,
        ];
        let sets = [&UNEVEN[..], &own].concat();
        let run = |name: &str| run_tiny(&folder, &format!("{name} {devices}"), config, &sets);
        let whole = run("whole");
        let [largest, continued, tokens] =
            ["staleness/max", "staleness/continued", "carried/tokens"].map(|name| series(&whole, name));
        assert_eq!((largest.len(), largest[0], continued[0]), (12, 0.0, 0.0));
        assert!(largest.iter().all(|&steps| steps <= bound), "{largest:?}");
        assert!(largest.iter().any(|&steps| steps > 1.0), "{largest:?}");
        assert!(continued.iter().any(|&share| share > 0.0), "{continued:?}");
        assert!(tokens[7] > 0.0 && tokens[11] == 0.0, "{tokens:?}");
        // A seed determines every bit, and a checkpoint includes completions in flight.
        let again = run("again");
        assert_repeats(&whole, &again);
    }
}

#[test]
fn what_is_on_its_way_outlasts_an_interruption() {
    let folder = tempfile::tempdir().unwrap();
    let sets = [AHEAD, "roles.rollout={}", "pipeline.rlvr.steps=60", "pipeline.rlvr.checkpoint.every=30"];
    let whole = run_tiny(&folder, "whole", ONE_RANK, &sets);
    let run = folder.path().join("interrupted");
    interrupt(tiny(ONE_RANK, &run, &sets), &run, 10);
    assert!((10..60).contains(&(metrics(&run).len() - 1)));
    succeed(resume(&run));
    assert_same(&whole, &run);
}

#[test]
fn a_rank_that_is_killed_ends_what_others_sample() {
    let folder = tempfile::tempdir().unwrap();
    let run = folder.path().join("run");
    let sets = [AHEAD, "roles.rollout={}", "pipeline.rlvr.steps=1000000"];
    let process = Process::start(tiny(TWO_RANKS, &run, &sets));
    wait_for_steps(&run, 3);
    nix::sys::signal::kill(rank_of(&run, 1), Signal::SIGKILL).unwrap();
    let ended = process.finish();
    assert_eq!(ended.error(), "error: rank 1 was killed by signal 9 (SIGKILL)");
    assert_nothing_left(&run);
}

/// Returns the `--set` of a Python reward that records, for each completion, how many steps the metrics of
/// `run` have by then. Its first line is `first`, with that number as `steps`.
fn watching(folder: &Path, run: &Path, first: &str) -> String {
    let text = format!(
        r#"
def watching(completions, answer):
    steps = sum(1 for line in open({:?}))
    {first}
    with open({:?}, "a") as notes:
        notes.write(f"{{steps}}\n" * len(completions))
    return [float(a == b) for a, b in zip(completions, answer)]
"#,
        run.join("metrics.jsonl"),
        folder.join("notes"),
    );
    let path = folder.join("rewards.py");
    fs::write(&path, text).unwrap();
    format!("pipeline.rlvr.reward=[{{python: {{path: {path:?}, function: watching}}}}]")
}

#[test]
fn completions_are_scored_while_the_step_before_is_trained() {
    let folder = tempfile::tempdir().unwrap();
    let reward = watching(folder.path(), &folder.path().join("run"), "pass");
    let long = ["pipeline.rlvr.epochs=20", "pipeline.rlvr.steps=4", "pipeline.rlvr.evaluation.every=4"];
    let sets = [&[AHEAD, "roles.rollout={}", &*reward], &long[..]].concat();
    run_tiny(&folder, "run", ONE_RANK, &sets);
    let notes = fs::read_to_string(folder.path().join("notes")).unwrap();
    // The first evaluation has a line, and the first step's would be the second.
    let before_its_end = notes.lines().filter(|steps| *steps == "1").count();
    assert!(before_its_end > 8 * 4, "the first step's own are {before_its_end} of 32");
}

#[test]
fn a_reward_that_fails_meanwhile_says_why() {
    let folder = tempfile::tempdir().unwrap();
    let run = folder.path().join("run");
    let reward = watching(folder.path(), &run, "assert steps < 4, 'the fourth step is too much'");
    let sets = [AHEAD, "roles.rollout={}", "pipeline.rlvr.steps=1000000", &*reward];
    let error = fail(tiny(ONE_RANK, &run, &sets));
    for words in ["`python` failed on", "max_error_rate", "the fourth step is too much"] {
        assert!(error.contains(words), "{error}");
    }
    assert_nothing_left(&run);
}

/// A role with its own communicator computes the same.
#[test]
fn a_reference_and_a_critic_of_their_own_are_the_same() {
    let folder = tempfile::tempdir().unwrap();
    let gae = "pipeline.rlvr.algorithm.advantage={gae: {lambda: 0.95}}";
    let critic = "pipeline.rlvr.critic={optimizer: {adamw: {learning_rate: 1e-3}}}";
    let roles = [gae, critic, "pipeline.rlvr.algorithm.kl_coef=0.1", "strategy.zero_stage=2"];
    let apart = ["reference", "critic"].map(|role| format!("roles.{role}.strategy.collective_timeout_s=50"));
    let [reference, critic] = &apart;
    let together = run_tiny(&folder, "together", TWO_RANKS, &roles);
    let apart = run_tiny(&folder, "apart", TWO_RANKS, &[&roles[..], &[reference, critic]].concat());
    assert!(series(&together, "loss/kl").iter().any(|&kl| kl > 0.0));
    assert_same_steps(&lasting_metrics(&together), &lasting_metrics(&apart));
    assert!(last_checkpoint(&together) == last_checkpoint(&apart), "the last checkpoints differ");
}

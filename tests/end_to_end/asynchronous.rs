//! Asynchronous rollout, which continues across steps.

use std::fs;
use std::path::{Path, PathBuf};

use tempfile::TempDir;

use super::{
    ONE_RANK, TWO_RANKS, assert_same, assert_same_steps, last_checkpoint, lasting_metrics, metrics, resume,
    run_tiny, series, succeed,
};

/// Completions of many lengths, few at a time, so that each step leaves some unfinished.
pub(super) const UNEVEN: [&str; 5] = [
    "model.decoder.max_length=40",
    "pipeline.rlvr.rollout.max_new_tokens=24",
    "pipeline.rlvr.rollout.batch_size=10",
    "pipeline.rlvr.warmup.steps=20",
    // A prompt has completions of both kinds even before training.
    "pipeline.rlvr.reward=[{regex: {pattern: '^.{0,4}$'}}]",
];

fn run(folder: &TempDir, name: &str, config: &str, ahead: &str, sets: &[&str]) -> PathBuf {
    let ahead = format!("pipeline.rlvr.rollout.async={ahead}");
    run_tiny(folder, name, config, &[&UNEVEN[..], &[&*ahead], sets].concat())
}

/// Asserts that `again` equals `whole`, also if its last checkpoint is lost and it resumes from the previous
/// one.
#[track_caller]
pub(super) fn assert_repeats(whole: &Path, again: &Path) {
    assert_same(whole, again);
    let (name, _) = last_checkpoint(again);
    fs::remove_dir_all(again.join("checkpoints").join(name)).unwrap();
    succeed(resume(again));
    assert_same(whole, again);
}

#[test]
fn nothing_ahead_is_on_policy() {
    let folder = tempfile::tempdir().unwrap();
    let plain = run_tiny(&folder, "plain", TWO_RANKS, &UNEVEN);
    let none = run(&folder, "none", TWO_RANKS, "{ahead: 0}", &[]);
    assert_same(&plain, &none);
    let has = |name: &str| metrics(&none).iter().any(|step| step.keys().any(|key| key.starts_with(name)));
    assert!(!has("staleness/") && !has("carried/"));
    assert!(!last_checkpoint(&none).1.keys().any(|file| file.ends_with(".own")));
    // On the first mini-batch only the engine differs.
    assert!(series(&none, "rollout/logprob_diff_max").iter().all(|&difference| difference < 1e-4));
}

#[test]
fn what_a_step_leaves_goes_on_in_the_next() {
    let folder = tempfile::tempdir().unwrap();
    for (ahead, bound) in [("{ahead: 1}", 1.0), ("{ahead: 1, max_staleness: 3}", 3.0), ("{ahead: 2}", 2.0)] {
        let run = run(&folder, ahead, ONE_RANK, ahead, &[]);
        let stale = series(&run, "staleness/max");
        assert_eq!(stale.len(), 12);
        assert!(
            stale.iter().all(|&steps| steps <= bound) && stale.iter().any(|&steps| steps > 0.0),
            "{stale:?}"
        );
        let [mean, continued, tokens, sequences] =
            ["staleness/mean", "staleness/continued", "carried/tokens", "carried/sequences"]
                .map(|name| series(&run, name));
        assert_eq!(
            (stale[0], mean[0], continued[0]),
            (0.0, 0.0, 0.0),
            "all completions begin in the first step"
        );
        assert!(continued.iter().any(|&share| share > 0.0), "{continued:?}");
        assert!(sequences[0] > 0.0 && tokens[0] >= sequences[0], "{sequences:?} have {tokens:?} tokens");
        // The last step starts no completions that no step would train on.
        assert_eq!((tokens[11], sequences[11]), (0.0, 0.0));
        // Older weights sampled part of the training data.
        let differences = series(&run, "rollout/logprob_diff_max");
        assert!(differences[0] < 1e-4 && differences.iter().any(|&it| it > 1e-3), "{differences:?}");
    }
}

#[test]
fn what_is_under_way_is_part_of_a_checkpoint() {
    let folder = tempfile::tempdir().unwrap();
    let correction = [
        "pipeline.rlvr.algorithm.old_logprobs=recompute",
        "pipeline.rlvr.algorithm.rollout_correction=truncate",
    ];
    let one = run(&folder, "one", ONE_RANK, "{ahead: 2}", &correction);
    let remax = ["pipeline.rlvr.algorithm.advantage=remax", "strategy.zero_stage=3"];
    let two = run(&folder, "two", TWO_RANKS, "{ahead: 1, max_staleness: 2}", &remax);
    for (whole, config, ahead, sets) in
        [(one, ONE_RANK, "{ahead: 2}", correction), (two, TWO_RANKS, "{ahead: 1, max_staleness: 2}", remax)]
    {
        assert!(series(&whole, "carried/tokens")[7] > 0.0, "step 8 leaves nothing");
        let again = run(&folder, &format!("again {ahead}"), config, ahead, &sets);
        assert_repeats(&whole, &again);
    }
}

#[test]
fn every_stage_leaves_the_same_under_way() {
    let folder = tempfile::tempdir().unwrap();
    let run = |stage: usize| {
        let sets = [&*format!("strategy.zero_stage={stage}"), "pipeline.rlvr.steps=6"];
        run(&folder, &stage.to_string(), TWO_RANKS, "{ahead: 1}", &sets)
    };
    let whole = run(0);
    assert!(series(&whole, "staleness/max").contains(&1.0));
    for stage in [2, 3] {
        let sharded = run(stage);
        assert_same_steps(&lasting_metrics(&whole), &lasting_metrics(&sharded));
        assert!(
            last_checkpoint(&whole) == last_checkpoint(&sharded),
            "the checkpoint of stage {stage} differs"
        );
    }
}

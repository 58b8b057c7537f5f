//! Evaluations: within a run, and alone.

use serde_json::Value;

use super::{ONE_RANK, checkpoints, lasting_metrics, run_tiny, series, whole_lines};

const NO_WARMUP: &str = "pipeline.rlvr.warmup=null";

/// Completions of the evaluations of a run.
fn completions(run: &std::path::Path) -> Vec<String> {
    let lines = whole_lines(&run.join("samples.jsonl"));
    let samples = lines.iter().map(|line| serde_json::from_str::<Value>(line).unwrap());
    let evaluated = samples.filter(|sample| sample["phase"] != "train");
    evaluated.map(|sample| sample["completion"].as_str().unwrap().to_owned()).collect()
}

#[test]
fn without_steps_a_run_is_the_evaluation_before_training() {
    let folder = tempfile::tempdir().unwrap();
    let trained = run_tiny(&folder, "trained", ONE_RANK, &[NO_WARMUP, "pipeline.rlvr.steps=3"]);
    // `keep_best` would keep a checkpoint of an evaluation.
    let sets = [NO_WARMUP, "pipeline.rlvr.steps=0", "pipeline.rlvr.checkpoint.keep_best=true"];
    let alone = run_tiny(&folder, "alone", ONE_RANK, &sets);
    assert_eq!(lasting_metrics(&alone), lasting_metrics(&trained)[..1]);
    let before = completions(&alone);
    assert_eq!(before, completions(&trained)[..before.len()]);
    assert!(before.len() > 10 && checkpoints(&alone).is_empty() && !alone.join("best").exists());
    let report = std::fs::read_to_string(alone.join("report.html")).unwrap();
    assert!(report.contains("before training") && report.contains("finished"), "{report}");
}

#[test]
fn evaluations_sample_as_the_config_says() {
    let folder = tempfile::tempdir().unwrap();
    let alone = |name: &str, sets: &[&str]| {
        run_tiny(&folder, name, ONE_RANK, &[&["pipeline.rlvr.steps=3"], sets].concat())
    };
    let value = |run: &std::path::Path, name: &str| series(run, name)[0];
    let usual = alone("usual", &[]);
    assert!(value(&usual, "eval/pass@1") != value(&usual, "eval/greedy"), "both would be alike in any case");
    // At a temperature near 0, or from the likeliest token alone, each sample is the greedy completion.
    let cold = alone("cold", &["pipeline.rlvr.evaluation.temperature=0.001"]);
    let narrow = alone("narrow", &["pipeline.rlvr.evaluation.top_p=1.0e-9"]);
    for run in [&cold, &narrow] {
        assert_eq!(value(run, "eval/greedy"), value(&usual, "eval/greedy"));
        assert_eq!(value(run, "eval/pass@1"), value(&usual, "eval/greedy"));
        assert_eq!(series(run, "reward/mean"), series(&usual, "reward/mean"), "the rollout is another");
    }
    // The untrained model goes on for as long as it may.
    let longest = |run: &std::path::Path| completions(run).iter().map(String::len).max().unwrap();
    let sets = [NO_WARMUP, "pipeline.rlvr.evaluation.max_new_tokens=9"];
    let (short, long) = (alone("short", &[NO_WARMUP]), alone("long", &sets));
    assert_eq!((longest(&short), longest(&long)), (4, 9));
    assert_eq!(series(&long, "response_length/max"), series(&short, "response_length/max"));
}

//! Runs whose length is given as epochs of their data.

use std::{
    fs,
    ops::Range,
    path::{Path, PathBuf},
};

use tempfile::TempDir;

use super::{ONE_RANK, TINY, assert_same, changed, fail, interrupt, metrics, offline::SFT, resume, succeed};

/// Creates files of prompts to sort, 45 for training and 20 held out. Returns the path of the first.
fn data(folder: &TempDir, pipeline: &str) -> (String, PathBuf) {
    let sorted = |digits: &str| {
        let mut digits: Vec<char> = digits.chars().collect();
        digits.sort_unstable();
        String::from_iter(digits)
    };
    let line = |number: usize| {
        let digits = format!("{:03}", number * 7 % 1000);
        format!("{{\"prompt\": \"{digits}>\", \"answer\": \"{}\"}}\n", sorted(&digits))
    };
    let write = |name: &str, numbers: Range<usize>| {
        let path = folder.path().join(name);
        fs::write(&path, numbers.map(line).collect::<String>()).unwrap();
        path
    };
    let (train, held_out) = (write("train.jsonl", 0..45), write("held_out.jsonl", 45..65));
    let files = format!("path: {}, held_out: {}", train.display(), held_out.display());
    (format!("pipeline.{pipeline}.data={{file: {{{files}}}}}"), train)
}

/// Asserts the number of steps of a run, and its resolved config.
#[track_caller]
fn assert_steps(run: &Path, steps: usize, why: &str) {
    assert_eq!(metrics(run).len(), steps + 1, "with that of step 0");
    let yaml = fs::read_to_string(run.join("resolved.yaml")).unwrap();
    assert!(yaml.contains(&format!("\n    steps: {steps}\n")) && yaml.contains(why), "{yaml}");
}

#[test]
fn a_supervised_run_of_epochs_goes_on_bitwise() {
    let folder = tempfile::tempdir().unwrap();
    let (data, train) = data(&folder, "offline");
    let sets = [
        &data,
        "pipeline.offline.steps={data_epochs: 24}",
        "pipeline.offline.batch_size=16",
        "pipeline.offline.optimizer.schedule.cosine.warmup_steps={share: 0.1}",
        "pipeline.offline.evaluation={every: 20, prompts: 20, completions: 5}",
        "pipeline.offline.checkpoint.every=30",
    ];
    let whole = folder.path().join("whole");
    let told = succeed(changed(SFT, &whole, &sets)).stderr;
    // 24 x 45 / 16 is 67.5.
    let why = "24 epochs of 45 training records, 16 a step";
    assert!(told.contains(&format!("68 steps: {why}")), "{told}");
    assert_steps(&whole, 68, &format!("# pipeline.offline.steps: {why}\n"));
    // The rate rises over a tenth of the steps, 6.8, and ends with the config's ratio.
    let rates: Vec<f64> =
        metrics(&whole)[1..].iter().map(|it| it["learning_rate"].as_f64().unwrap()).collect();
    assert_eq!(rates.iter().position(|rate| *rate == 2e-3), Some(6), "{rates:?}");
    assert!((rates[67] - 1e-4).abs() < 1e-12, "{rates:?}");

    let cut = folder.path().join("cut");
    interrupt(changed(SFT, &cut, &sets), &cut, 10);
    succeed(resume(&cut));
    assert_same(&whole, &cut);

    let more = fs::read_to_string(&train).unwrap() + "{\"prompt\": \"999>\", \"answer\": \"999\"}\n";
    fs::write(&train, more).unwrap();
    let error = fail(resume(&cut));
    assert!(error.contains("its data have changed"), "{error}");
}

#[test]
fn an_rlvr_run_of_epochs_goes_on_bitwise() {
    let folder = tempfile::tempdir().unwrap();
    let (data, _) = data(&folder, "rlvr");
    let own = [&data, "pipeline.rlvr.steps={data_epochs: 12.5}", "pipeline.rlvr.evaluation.every=25"];
    let sets = [&TINY[..], &own, &["pipeline.rlvr.checkpoint.every=40"]].concat();
    let whole = folder.path().join("whole");
    succeed(changed(ONE_RANK, &whole, &sets));
    // 12.5 x 45 / 8 is 70.3.
    let why = "12.5 epochs of 45 training records, 8 a step";
    assert_steps(&whole, 71, &format!("# pipeline.rlvr.steps: {why}\n"));

    let cut = folder.path().join("cut");
    interrupt(changed(ONE_RANK, &cut, &sets), &cut, 5);
    succeed(resume(&cut));
    assert_same(&whole, &cut);

    let error = fail(changed(ONE_RANK, &folder.path().join("made"), &[&TINY[..], &own[1..2]].concat()));
    assert!(error.contains("pipeline.rlvr.steps.data_epochs: the records are made"), "{error}");
}

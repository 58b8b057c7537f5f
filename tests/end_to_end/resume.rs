//! A run that is stopped and resumed ends as if it had never stopped.

use std::fs::{self, OpenOptions};
use std::io::Write;
use std::path::Path;

use nix::sys::signal::{Signal, kill};

use super::{
    Ended, ONE_RANK, Process, TINY, TWO_RANKS, assert_nothing_left, assert_same, changed, checkpoints, fail,
    interrupt, metrics, processes_of, resume, run_tiny, succeed, tiny, wait_for_steps, wait_until,
};

/// Enough steps to be interrupted in the middle.
const LONG: [&str; 4] = [
    "pipeline.rlvr.steps=80",
    "pipeline.rlvr.checkpoint.every=40",
    "pipeline.rlvr.evaluation.every=20",
    // The reference is created once, after the warm-up, and must be restored unchanged.
    "pipeline.rlvr.algorithm.kl_coef=0.01",
];

#[test]
fn one_rank_goes_on_bitwise() {
    let folder = tempfile::tempdir().unwrap();
    let sets = [&LONG[..], &["pipeline.rlvr.warmup.steps=200"]].concat();
    let whole = run_tiny(&folder, "whole", ONE_RANK, &sets);

    let run = folder.path().join("interrupted");
    interrupt_in_the_middle(&run, ONE_RANK, &sets);
    succeed(resume(&run));
    assert_same(&whole, &run);

    // Twice: in the warm-up, and then before the next checkpoint, which leaves a record of step 0.
    let run = folder.path().join("twice");
    interrupt_in_the_warm_up(&run, &sets);
    let process = Process::start(resume(&run));
    wait_for_steps(&run, 5);
    kill_all(process, &run);
    assert_eq!(checkpoints(&run), ["step_000000"]);
    succeed(resume(&run));
    assert_same(&whole, &run);
}

#[test]
fn two_ranks_go_on_bitwise() {
    let folder = tempfile::tempdir().unwrap();
    let whole = run_tiny(&folder, "whole", TWO_RANKS, &LONG);

    let run = folder.path().join("interrupted");
    interrupt_in_the_middle(&run, TWO_RANKS, &LONG);
    succeed(resume(&run));
    assert_same(&whole, &run);

    // Killed after its checkpoint: later records are removed and written again.
    let run = folder.path().join("killed");
    let process = Process::start(tiny(TWO_RANKS, &run, &LONG));
    wait_for_steps(&run, 45);
    // Checkpoints are written in the background.
    wait_until("the checkpoint is whole", || checkpoints(&run) == ["step_000040"]);
    kill_all(process, &run);
    let torn = OpenOptions::new().append(true).open(run.join("metrics.jsonl"));
    torn.unwrap().write_all(b"{\"step\":14").unwrap();
    let last = checkpoints(&run).pop();
    let behind = format!("step_{:06}", metrics(&run).len() - 1);
    assert!(last < Some(behind), "no record behind {last:?}");
    succeed(resume(&run));
    assert_same(&whole, &run);
}

/// Killed before the first checkpoint, after some steps and before the first.
#[test]
fn what_has_no_checkpoint_yet_begins_anew() {
    let folder = tempfile::tempdir().unwrap();
    let whole = run_tiny(&folder, "whole", ONE_RANK, &LONG);
    for (name, steps) in [("killed", 5), ("early", 0)] {
        let run = folder.path().join(name);
        let process = Process::start(tiny(ONE_RANK, &run, &LONG));
        match steps {
            0 => wait_until("the run has a folder", || run.join("resolved.yaml").exists()),
            steps => wait_for_steps(&run, steps),
        }
        kill_all(process, &run);
        assert!(checkpoints(&run).is_empty());
        succeed(resume(&run));
        assert_same(&whole, &run);
    }
}

#[test]
fn a_finished_run_has_nothing_to_go_on_with() {
    let folder = tempfile::tempdir().unwrap();
    let run = run_tiny(&folder, "run", ONE_RANK, &[]);
    let before = fs::read(run.join("metrics.jsonl")).unwrap();
    succeed(resume(&run));
    assert_eq!(fs::read(run.join("metrics.jsonl")).unwrap(), before);
}

#[test]
fn what_cannot_be_resumed_is_told() {
    let folder = tempfile::tempdir().unwrap();
    let check = |run: &Path, words: &[&str]| {
        let error = fail(resume(run));
        for word in words.iter().copied().chain([run.to_str().unwrap()]) {
            assert!(error.contains(word), "no {word:?} in {error}");
        }
    };
    check(&folder.path().join("nowhere"), &["config.yaml"]);

    let run = run_tiny(
        &folder,
        "run",
        ONE_RANK,
        &["pipeline.rlvr.steps=8", "pipeline.rlvr.checkpoint.keep_last=1"],
    );
    let [checkpoint] = &checkpoints(&run)[..] else { panic!("one checkpoint") };
    let checkpoint = run.join("checkpoints").join(checkpoint);
    let shard = checkpoint.join("rank_0000.bin");
    let mut bytes = fs::read(&shard).unwrap();
    bytes[100] ^= 1;
    fs::write(&shard, &bytes).unwrap();
    check(&run, &["rank_0000.bin", "damaged"]);
    fs::remove_dir_all(&checkpoint).unwrap();
    check(&run, &["no checkpoint"]);
}

#[test]
fn a_checkpoint_that_cannot_be_read_gives_way_to_the_one_before_it() {
    let folder = tempfile::tempdir().unwrap();
    let whole = run_tiny(&folder, "whole", ONE_RANK, &[]);
    let run = run_tiny(&folder, "run", ONE_RANK, &[]);
    let [.., older, last] = &checkpoints(&run)[..] else { panic!("two checkpoints") };
    let folder_of = |name: &String| run.join("checkpoints").join(name).display().to_string();
    let (manifest, shard) = (run.join("checkpoints").join(last).join("manifest.json"), "rank_0000.bin");
    let good = fs::read(&manifest).unwrap();
    let check = |words: &str| {
        let error = fail(resume(&run));
        let how =
            format!("remove the folder {}, and the run resumes from {}", folder_of(last), folder_of(older));
        assert!(error.contains(&how) && error.contains(words), "{error}");
    };
    fs::write(&manifest, "{").unwrap();
    check("manifest.json is damaged");
    fs::write(&manifest, good).unwrap();
    fs::remove_file(manifest.with_file_name(shard)).unwrap();
    check(shard);
    fs::remove_dir_all(folder_of(last)).unwrap();
    succeed(resume(&run));
    assert_same(&whole, &run);
}

#[test]
fn a_run_goes_on_with_its_own_data_and_model() {
    let folder = tempfile::tempdir().unwrap();
    let data = folder.path().join("train.jsonl");
    let line = |number: usize| format!("{{\"prompt\": \"{number:03}>\", \"answer\": \"{}\"}}", number % 7);
    let lines: Vec<String> = (0..90).map(line).collect();
    let write = |lines: &[String]| fs::write(&data, lines.join("\n")).unwrap();
    write(&lines);
    let file = format!("pipeline.rlvr.data={{file: {{path: {}, held_out_percent: 40}}}}", data.display());
    let sets = ["pipeline.rlvr.steps=8", "pipeline.rlvr.evaluation.prompts=10", &file];
    let run = folder.path().join("run");
    // The first of the usual changes is one of the data that is replaced here.
    succeed(changed(ONE_RANK, &run, TINY[1..].iter().chain(&sets)));
    fs::remove_dir_all(run.join("checkpoints/step_000008")).unwrap();

    let refused = |words: &[&str]| {
        let error = fail(resume(&run));
        assert!(words.iter().all(|word| error.contains(word)), "{error}");
    };
    let [mut reversed, mut more] = [lines.clone(), lines.clone()];
    reversed.reverse();
    more.push(line(91));
    for lines in [reversed, more] {
        write(&lines);
        refused(&["step_000004", "its data have changed", "bring the files back"]);
    }
    write(&lines);
    let resolved = run.join("resolved.yaml");
    let config = fs::read_to_string(&resolved).unwrap();
    fs::write(&resolved, config.replace("intermediate_size: 176", "intermediate_size: 88")).unwrap();
    refused(&["step_000004", "has the shape", "in the model"]);
    // The first of the two `steps` is the warm-up's.
    fs::write(&resolved, config.replace("\n    steps: 8\n", "\n    steps: 3\n")).unwrap();
    refused(&["step_000004", "4 steps are done, and `steps` is 3: write 4 or above"]);
    fs::write(&resolved, config.replace("steps: 60\n", "steps: 90\n")).unwrap();
    refused(&["4 steps behind a warm-up of 60, and `warmup.steps` is 90: write 60 again"]);
    fs::write(&resolved, config).unwrap();
    succeed(resume(&run));
}

/// A resumed run uses what it saved, and reports what it did not save.
#[test]
fn a_run_does_not_go_on_with_what_it_began_without() {
    let folder = tempfile::tempdir().unwrap();
    let run = run_tiny(&folder, "run", ONE_RANK, &["pipeline.rlvr.steps=8"]);
    let resolved = run.join("resolved.yaml");
    let config = fs::read_to_string(&resolved).unwrap().replace("\n    steps: 8\n", "\n    steps: 9\n");
    let refused = |from: &str, to: &str, words: &[&str]| {
        assert!(config.contains(from), "no {from:?} in {config}");
        fs::write(&resolved, config.replace(from, to)).unwrap();
        let error = fail(resume(&run));
        assert!(words.iter().all(|word| error.contains(word)), "{error}");
    };
    refused("kl_coef: 0.0", "kl_coef: 0.1", &["cannot resume", "it has kept no model to compare with"]);
    let [from, to] = ["      max_new_tokens: 4\n", "      max_new_tokens: 4\n      async: {ahead: 1}\n"];
    refused(from, to, &["cannot resume", "no completions in flight", "`rollout.async.ahead: 0`"]);
    let critic = "    critic: {optimizer: {adamw: {learning_rate: 1.0e-3}}}\n    evaluation:\n";
    let advantage = config.split("      advantage:\n").nth(1).unwrap();
    let advantage = &advantage[..advantage.find("      whiten_advantages").unwrap()];
    let with_critic = config
        .replace(&format!("      advantage:\n{advantage}"), "      advantage: {gae: {}}\n")
        .replace("    evaluation:\n", critic);
    fs::write(&resolved, with_critic).unwrap();
    let error = fail(resume(&run));
    assert!(error.contains("cannot resume") && error.contains("it has no critic"), "{error}");
    fs::write(&resolved, &config).unwrap();
    succeed(resume(&run));
}

fn interrupt_in_the_middle(run: &Path, config: &str, sets: &[&str]) {
    let ended = interrupt(tiny(config, run, sets), run, 10);
    check_interrupted(&ended, run, "interrupted after step ");
    let steps = metrics(run).len() - 1;
    assert!((10..80).contains(&steps), "{steps} steps are done");
    assert_eq!(checkpoints(run).last(), Some(&format!("step_{steps:06}")));
}

fn interrupt_in_the_warm_up(run: &Path, sets: &[&str]) {
    let process = Process::start(tiny(ONE_RANK, run, sets));
    wait_until("the warm-up has begun", || run.join("metrics.jsonl").exists());
    process.send(Signal::SIGINT);
    check_interrupted(&process.finish(), run, "of the warm-up");
    assert_eq!((metrics(run).len(), checkpoints(run)), (0, vec!["step_000000".to_owned()]));
}

#[track_caller]
fn check_interrupted(ended: &Ended, run: &Path, words: &str) {
    assert_eq!(ended.code, Some(130), "{ended:#?}");
    let line = ended.stderr.lines().find(|line| line.contains("interrupted after ")).unwrap_or_default();
    let how = format!("go on with `anyroll run --resume {}`", run.display());
    assert!(line.contains(words) && line.contains(&how), "{}", ended.stderr);
    assert_nothing_left(run);
}

/// Like a machine failure: no process can save anything.
fn kill_all(process: Process, run: &Path) {
    for pid in processes_of(run) {
        // Fails for a rank that has already ended with its parent.
        let _ = kill(pid, Signal::SIGKILL);
    }
    assert_eq!(process.finish().code, None);
    assert_nothing_left(run);
}

//! The objective `ilql`: values of tokens from answers with rewards.

use std::{
    fs,
    path::{Path, PathBuf},
};

use tempfile::TempDir;

use super::{
    anyroll, assert_same, assert_same_steps, changed, fail, interrupt, lasting_metrics, offline::assert_near,
    resume, series, succeed,
};

const ILQL: &str = "configs/offline_ilql_sort_cpu.yaml";

/// Changes that make a run take about a second.
const SMALL: [&str; 8] = [
    "pipeline.offline.data.sort.digits=3",
    "pipeline.offline.steps=12",
    "pipeline.offline.batch_size=16",
    "pipeline.offline.evaluation.every=4",
    "pipeline.offline.evaluation.prompts=19",
    "pipeline.offline.evaluation.completions=5",
    "pipeline.offline.checkpoint.every=4",
    "pipeline.offline.optimizer.schedule.linear.warmup_steps=2",
];

fn command(run: &Path, sets: &[&str]) -> std::process::Command {
    changed(ILQL, run, &[&SMALL[..], sets].concat())
}

#[track_caller]
fn run(folder: &TempDir, name: &str, sets: &[&str]) -> PathBuf {
    let run = folder.path().join(name);
    succeed(command(&run, sets));
    run
}

/// A step covers all answers of all ranks, however it is split, and the stage changes no bit.
#[test]
fn splits_and_stages_learn_the_same() {
    let folder = tempfile::tempdir().unwrap();
    let whole = run(&folder, "whole", &[]);
    assert_near(&whole, &run(&folder, "parts", &["strategy.micro_batch_size=3"]));
    let two = run(&folder, "two", &["devices=2"]);
    assert_near(&whole, &two);
    let sets = ["devices=2", "strategy.zero_stage=3", "strategy.recompute=full"];
    let sharded = run(&folder, "sharded", &sets);
    assert_same_steps(&lasting_metrics(&two), &lasting_metrics(&sharded));
    let one_q = run(&folder, "one_q", &["pipeline.offline.objective.ilql.two_qs=false"]);
    assert!(series(&one_q, "loss/q")[0] < series(&whole, "loss/q")[0], "one head has half the errors");
}

/// The target heads are part of a checkpoint.
#[test]
fn an_interrupted_run_goes_on_bitwise() {
    let folder = tempfile::tempdir().unwrap();
    let sets = ["devices=2", "pipeline.offline.steps=80", "pipeline.offline.checkpoint.every=40"];
    let whole = run(&folder, "whole", &sets);
    let cut = folder.path().join("cut");
    interrupt(command(&cut, &sets), &cut, 10);
    succeed(resume(&cut));
    assert_same(&whole, &cut);
}

/// Two of three answers copy the prompt's digits, with the reward 0, and one sorts them, with the reward 1.
fn biased(folder: &TempDir) -> String {
    let file = folder.path().join("biased.jsonl");
    let lines = |number: usize| {
        let digits = format!("{number:03}");
        let mut sorted: Vec<char> = digits.chars().collect();
        sorted.sort_unstable();
        let sorted: String = sorted.into_iter().collect();
        let line = |answer: &str, reward: u8| {
            format!("{{\"prompt\": \"{digits}>\", \"answer\": \"{answer}\", \"reward\": {reward}}}\n")
        };
        let copy = line(&digits, 0);
        if sorted == digits { String::new() } else { format!("{copy}{copy}{}", line(&sorted, 1)) }
    };
    fs::write(&file, (0..1000).map(lines).collect::<String>()).unwrap();
    format!("pipeline.offline.data={{file: {{path: {}, columns: {{reward: reward}}}}}}", file.display())
}

/// Q of right answers ends above that of wrong ones, and guides completions to the right ones, which the language
/// model alone does not find.
#[test]
fn values_tell_good_answers_from_bad_ones() {
    let folder = tempfile::tempdir().unwrap();
    let data = biased(&folder);
    let train = |name: &str, guidance: u8| {
        let guidance = format!("pipeline.offline.objective.ilql.guidance={guidance}");
        let sets = [
            &*data,
            "pipeline.offline.steps=300",
            "pipeline.offline.batch_size=64",
            "pipeline.offline.evaluation.every=150",
            "pipeline.offline.evaluation.prompts=60",
            "pipeline.offline.evaluation.completions=20",
            "pipeline.offline.checkpoint.every=300",
        ];
        let run = folder.path().join(name);
        succeed(changed(ILQL, &run, &[&SMALL[7..], &sets, &[&*guidance]].concat()));
        run
    };
    let (guided, alone) = (train("guided", 4), train("alone", 0));
    let margin = series(&guided, "eval/q_margin");
    assert!(margin[0].abs() < 0.2 && margin[2] > 1.0, "{margin:?}");
    let [right, wrong] = ["eval/q_desirable", "eval/q_other"].map(|name| series(&guided, name)[2]);
    assert!(right > 0.5 && wrong < 0.0, "{right} {wrong}");
    assert_eq!(series(&alone, "eval/q_margin"), margin, "guidance changes completions only");
    let [guided_exact, alone_exact] = [&guided, &alone].map(|run| series(run, "eval/exact")[2]);
    assert!(guided_exact > 0.8 && alone_exact < 0.4, "{guided_exact} with guidance, {alone_exact} without");

    let asked = |run: &Path, more: &[&str]| {
        let run = run.to_str().unwrap();
        let args = ["generate", run, "--temperature", "0", "--max-new-tokens", "8"];
        let prompts = ["--prompt", "310>", "--prompt", "971>", "--prompt", "843>"];
        anyroll([&args[..], &prompts, more].concat())
    };
    let answer = |run: &Path, more: &[&str]| succeed(asked(run, more)).stdout;
    let sorted = "013\n179\n348\n";
    let plain = answer(&alone, &[]);
    assert_ne!(plain, sorted);
    assert_eq!(answer(&guided, &[]), sorted);
    assert_eq!(answer(&guided, &["--guidance", "0"]), plain);
    assert_eq!(answer(&alone, &["--guidance", "4"]), sorted);
    // An export is the language model alone.
    let exported = folder.path().join("exported");
    let [from, to] = [&guided, &exported].map(|path| path.to_str().unwrap());
    let told = succeed(anyroll(["export", from, "--to", to, "--dtype", "fp32"])).stderr;
    assert!(told.contains("the heads of `ilql` are left out"), "{told}");
    assert_eq!(answer(&exported, &[]), plain);
    let told = fail(asked(&exported, &["--guidance", "4"]));
    assert!(told.contains("`--guidance`") && told.contains("is for runs of `ilql`"), "{told}");
}

/// Rewards come from a column, and what an objective does not read is refused.
#[test]
fn rewards_are_numbers_of_records() {
    let folder = tempfile::tempdir().unwrap();
    let file = folder.path().join("answers.jsonl");
    let line = |number: usize| {
        format!("{{\"prompt\": \"{number:03}>\", \"answer\": \"{number}\", \"score\": {}}}\n", number % 7)
    };
    fs::write(&file, (0..90).map(line).collect::<String>()).unwrap();
    let data = |columns: &str| {
        format!(
            "pipeline.offline.data={{file: {{path: {}, held_out_percent: 40, {columns}}}}}",
            file.display()
        )
    };
    let train =
        |name: &str, more: &[&str]| changed(ILQL, &folder.path().join(name), &[&SMALL[1..], more].concat());
    succeed(train("scored", &[&data("columns: {reward: score}")]));
    let scored = folder.path().join("scored");
    assert_eq!(series(&scored, "loss/q").len(), 12);
    assert!(series(&scored, "values/q_margin").len() == 12, "both kinds are in each step");
    let told = fail(train("none", &[&data("columns: {}")]));
    assert!(told.contains("pipeline.offline.data: record line 1 has no reward"), "{told}");
    let told = fail(train("unread", &[&data("columns: {reward: score}"), "pipeline.offline.objective=sft"]));
    assert!(told.contains("has a reward, and the objective reads none"), "{told}");
    let told = fail(train("warm", &[&data("columns: {reward: score}"), "strategy.zero_stage=auto"]));
    assert!(told.contains("`auto` does not plan the heads of `ilql`"), "{told}");
}

//! Process reward models: trained on labelled steps, resumed, exported, and read by RLVR's reward `model`.

use std::fs;
use std::path::{Path, PathBuf};

use tempfile::TempDir;

use super::offline::assert_near;
use super::{
    ONE_RANK, TWO_RANKS, anyroll, assert_same, assert_same_steps, changed, fail, interrupt, lasting_metrics,
    resume, run_tiny, series, succeed,
};

const PRM: &str = "configs/offline_prm_sort_cpu.yaml";

/// Changes that make a run of the config take about a second.
const SMALL: [&str; 6] = [
    "pipeline.offline.steps=12",
    "pipeline.offline.batch_size=16",
    "pipeline.offline.evaluation={every: 4, prompts: 19}",
    "pipeline.offline.checkpoint.every=4",
    "pipeline.offline.optimizer.schedule.cosine.warmup_steps=2",
    // Of a head of 0 the blocks have no gradient at first, but for rounding.
    "pipeline.offline.optimizer.adamw.eps=1.0e-5",
];

fn train(folder: &TempDir, name: &str, sets: &[&str]) -> PathBuf {
    let run = folder.path().join(name);
    succeed(changed(PRM, &run, SMALL.iter().chain(sets)));
    run
}

/// A record has several labelled steps, of which ranks and micro-batches have unequal numbers.
#[test]
fn any_split_learns_the_same_steps() {
    let folder = tempfile::tempdir().unwrap();
    let whole = train(&folder, "whole", &[]);
    assert_near(&whole, &train(&folder, "parts", &["strategy.micro_batch_size=3"]));
    let two = train(&folder, "two", &["devices=2"]);
    assert_near(&whole, &two);
    let sharded = ["devices=2", "strategy.zero_stage=3", "strategy.recompute=full"];
    let sharded = train(&folder, "sharded", &sharded);
    assert_same_steps(&lasting_metrics(&two), &lasting_metrics(&sharded));
    let last_only = train(&folder, "last", &["pipeline.offline.objective.prm.train_on_last_step_only=true"]);
    // Evaluations read all steps.
    assert_eq!(series(&whole, "eval/loss")[0], series(&last_only, "eval/loss")[0]);
    assert_ne!(series(&whole, "steps/right"), series(&last_only, "steps/right"));
}

#[test]
fn an_interrupted_run_of_steps_goes_on_bitwise() {
    let folder = tempfile::tempdir().unwrap();
    let sets = ["devices=2", "pipeline.offline.steps=80", "pipeline.offline.checkpoint.every=40"];
    let whole = train(&folder, "whole", &sets);
    let cut = folder.path().join("cut");
    interrupt(changed(PRM, &cut, SMALL.iter().chain(&sets)), &cut, 10);
    succeed(resume(&cut));
    assert_same(&whole, &cut);
}

/// Scores of completions by the model in `folder`, with these fields.
fn scores(folder: &Path, cases: &Path, fields: &[&str]) -> Vec<f64> {
    let (path, file) = (format!("path={}", folder.display()), cases.to_str().unwrap());
    let sets = [&path, "chat=false"].into_iter().chain(fields.iter().copied());
    let sets = sets.flat_map(|set| ["--set", set]);
    let scored = succeed(anyroll(["reward", "model", "--file", file].into_iter().chain(sets))).stdout;
    let score = |line: &str| serde_json::from_str::<serde_json::Value>(line).unwrap()["score"].as_f64();
    scored.lines().map(|line| score(line).unwrap()).collect()
}

#[test]
fn a_process_reward_model_finds_the_wrong_step() {
    let folder = tempfile::tempdir().unwrap();
    let run = folder.path().join("run");
    succeed(changed(PRM, &run, &["pipeline.offline.optimizer.adamw.eps=1.0e-5"]));
    let (loss, accuracy) = (series(&run, "eval/loss"), series(&run, "eval/step_accuracy"));
    assert!((loss[0] - 2f64.ln()).abs() < 1e-9 && accuracy[0] == 0.0, "{loss:?} {accuracy:?}");
    assert!(accuracy.last().is_some_and(|&share| share > 0.85), "{accuracy:?}");
    let exported = folder.path().join("exported");
    let [from, to] = [&run, &exported].map(|path| path.to_str().unwrap());
    succeed(anyroll(["export", from, "--to", to, "--dtype", "fp32"]));
    let config = fs::read_to_string(exported.join("config.json")).unwrap();
    assert!(config.contains("Qwen2ForTokenClassification") && config.contains("LABEL_1"), "{config}");
    let refused = fail(anyroll(["generate", from, "--prompt", "314>"]));
    assert!(refused.contains("trained a process reward model, which scores steps"), "{refused}");

    // Each prompt has a 1, so that 9 is wrong as the first step.
    let solutions = folder.path().join("solutions.jsonl");
    let right_and_wrong = (100..140).flat_map(|number: usize| {
        let mut digits: Vec<char> = number.to_string().chars().collect();
        digits.sort_unstable();
        [digits[0], '9'].map(|first| {
            let text = format!("{first}\\n{}\\n{}", digits[1], digits[2]);
            format!("{{\"prompt\": \"{number}>\", \"completion\": \"{text}\"}}\n")
        })
    });
    fs::write(&solutions, right_and_wrong.collect::<String>()).unwrap();
    let found = scores(&exported, &solutions, &["per_step=min"]);
    let mean = |wrong: usize| found.iter().skip(wrong).step_by(2).sum::<f64>() / 40.0;
    assert!(found.len() == 80 && mean(0) - mean(1) > 0.5, "{found:?}");

    let cases = folder.path().join("cases.jsonl");
    let texts = ["1\\n3\\n4", "1\\n3\\n4\\n", "1\\n3", "3\\n1\\n4", "1\\n3\\n5", ""];
    let line = |text: &&str| format!("{{\"prompt\": \"314>\", \"completion\": \"{text}\"}}\n");
    fs::write(&cases, texts.iter().map(line).collect::<String>()).unwrap();
    let of = |per_step: &str| scores(&exported, &cases, &[&format!("per_step={per_step}")]);
    let [min, mean, last, product] = ["min", "mean", "last", "product"].map(of);
    assert!(min[0] == min[1] && last[0] == last[1] && product[0] == product[1], "{min:?} {last:?}");
    for scores in [&min, &mean, &last, &product] {
        assert!(
            scores[5] == 0.0 && scores[..5].iter().all(|score| (0.0..=1.0).contains(score)),
            "{scores:?}"
        );
    }
    // The last step of a prefix is scored by the prefix: all steps of "1, 3, 4" by hand.
    let prefixes = folder.path().join("prefixes.jsonl");
    fs::write(&prefixes, ["1", "1\\n3", "1\\n3\\n4"].iter().map(line).collect::<String>()).unwrap();
    let steps = scores(&exported, &prefixes, &["per_step=last"]);
    let by_hand = [
        (min[0], steps.iter().fold(1.0, |least: f64, next| least.min(*next))),
        (mean[0], steps.iter().sum::<f64>() / 3.0),
        (last[0], steps[2]),
        (product[0], steps.iter().product()),
    ];
    assert!(by_hand.iter().all(|(found, expected)| (found - expected).abs() < 1e-5), "{by_hand:?}");
    rlvr_reads_it(&folder, &exported);
}

/// RLVR with the exported model as its reward, on one and two ranks, held on the host and by the ranks together.
fn rlvr_reads_it(folder: &TempDir, exported: &Path) {
    let records = folder.path().join("prompts.jsonl");
    let line = |number: usize| {
        let mut digits: Vec<char> = format!("{number:03}").chars().collect();
        digits.sort_unstable();
        let steps: Vec<String> = digits.iter().map(char::to_string).collect();
        format!("{{\"prompt\": \"{number:03}>\", \"answer\": \"{}\"}}\n", steps.join("\\n"))
    };
    fs::write(&records, (0..1000).map(line).collect::<String>()).unwrap();
    let data = format!("pipeline.rlvr.data={{file: {{path: {}}}}}", records.display());
    let run = |name: &str, config: &str, fields: &str, sets: &[&str]| {
        let model = format!("{{path: {}, chat: false, {fields}}}", exported.display());
        let reward = format!("pipeline.rlvr.reward=[{{exact: {{}}}}, {{model: {model}, weight: 0.5}}]");
        let usual = [&*data, &reward, "pipeline.rlvr.steps=4", "pipeline.rlvr.rollout.max_new_tokens=7"];
        run_tiny(folder, name, config, &[&usual, sets].concat())
    };
    let one = run("one", ONE_RANK, "per_step: mean", &[]);
    let means = series(&one, "reward/model/mean");
    assert!(means.len() == 4 && means.iter().all(|&mean| mean > 0.0 && mean < 1.0), "{means:?}");
    let two = run("two", TWO_RANKS, "per_step: mean", &[]);
    let [held, sharded] = ["0", "3"].map(|stage| {
        run(stage, TWO_RANKS, &format!("per_step: mean, strategy: {{zero_stage: {stage}}}"), &[])
    });
    assert_same_steps(&lasting_metrics(&held), &lasting_metrics(&sharded));
    for other in [two, held] {
        for (one, two) in means.iter().zip(series(&other, "reward/model/mean")) {
            assert!((one - two).abs() < 1e-5, "{one} and {two}");
        }
    }
    assert_ne!(means, series(&run("min", ONE_RANK, "per_step: min", &[]), "reward/model/mean"));
    let whole = format!("pipeline.rlvr.reward=[{{model: {{path: {}, chat: false}}}}]", exported.display());
    let refused = fail(anyroll(["check", ONE_RANK, "--set", &whole]));
    assert!(refused.contains("is a process reward model") && refused.contains("per_step: min"), "{refused}");
}

/// `check` names the file, the line and the fix.
#[test]
fn records_of_steps_are_checked() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("steps.jsonl");
    let good = "{\"prompt\": \"1>\", \"completions\": [\"1\"], \"labels\": [true]}\n";
    let set = format!("pipeline.offline.data.file.path={}", path.display());
    for (bad, words) in [
        (
            "\"completions\": [\"1\", \"2\"], \"labels\": [true]",
            "`completions` has 2 items, and `labels` has 1",
        ),
        ("\"completions\": [], \"labels\": []", "`completions` is empty"),
        ("\"completions\": [\"1\"], \"labels\": [7]", "`labels[0]` is 7, must be true, false or a number"),
    ] {
        fs::write(&path, format!("{}{{\"prompt\": \"2>\", {bad}}}\n", good.repeat(2))).unwrap();
        let refused = fail(anyroll(["check", PRM, "--set", &set]));
        assert!(refused.contains(&format!("{}:3: {words}", path.display())), "{refused}");
    }
}

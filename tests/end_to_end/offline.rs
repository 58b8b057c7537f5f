//! The `offline` pipeline: supervised training, and training on pairs.

use std::{
    fs,
    path::{Path, PathBuf},
};

use tempfile::TempDir;

use super::{
    Process, anyroll, assert_same, assert_same_steps, changed, fail, interrupt, last_checkpoint,
    lasting_metrics, metrics, resume, series, succeed,
};

pub(super) const SFT: &str = "configs/offline_sft_sort_cpu.yaml";
const DPO: &str = "configs/offline_dpo_sort_cpu.yaml";
const KTO: &str = "configs/offline_kto_sort_cpu.yaml";

/// Changes that make a run of either config take about a second.
const SMALL: [&str; 7] = [
    "pipeline.offline.data.sort.digits=3",
    "pipeline.offline.steps=12",
    "pipeline.offline.batch_size=16",
    "pipeline.offline.evaluation.every=4",
    "pipeline.offline.evaluation.prompts=19",
    "pipeline.offline.evaluation.completions=5",
    "pipeline.offline.checkpoint.every=4",
];

fn small<'a>(config: &'a str, sets: &[&'a str]) -> Vec<&'a str> {
    let schedule = match config {
        SFT => vec!["pipeline.offline.optimizer.schedule.cosine.warmup_steps=2"],
        _ => vec![
            "pipeline.offline.optimizer.schedule.linear.warmup_steps=2",
            "pipeline.offline.warmup.steps=30",
            "pipeline.offline.warmup.optimizer.schedule.constant.warmup_steps=5",
        ],
    };
    [&SMALL[..], &schedule, sets].concat()
}

pub(super) fn command(config: &str, run: &Path, sets: &[&str]) -> std::process::Command {
    changed(config, run, &small(config, sets))
}

#[track_caller]
pub(super) fn run(folder: &TempDir, name: &str, config: &str, sets: &[&str]) -> PathBuf {
    let run = folder.path().join(name);
    succeed(command(config, &run, sets));
    run
}

/// Asserts equality up to rounding, and up to the number of ranks with held-out records.
#[track_caller]
pub(super) fn assert_near(a: &Path, b: &Path) {
    for (a, b) in lasting_metrics(a).iter().zip(lasting_metrics(b)) {
        assert!(a.keys().eq(b.keys()), "{a:?} {b:?}");
        for (name, value) in a {
            let (value, other) = (value.as_f64().unwrap(), b[name].as_f64().unwrap());
            assert!(
                (value - other).abs() <= 2e-4 * value.abs().max(1.0),
                "{name}: {value} and {other} in {a:?}"
            );
        }
    }
    assert_eq!(metrics(a).len(), metrics(b).len());
}

/// A step's loss and gradient cover the whole step, however it is split. Each rank has part of the pairs, and
/// the held-out ones do not divide evenly.
#[test]
fn any_split_learns_the_same() {
    let folder = tempfile::tempdir().unwrap();
    for config in [SFT, DPO, KTO] {
        let name = |what: &str| format!("{}-{what}", config.replace('/', "-"));
        let whole = run(&folder, &name("whole"), config, &[]);
        let parts = run(&folder, &name("parts"), config, &["strategy.micro_batch_size=6"]);
        // With KTO a micro-batch of two often has only one kind of answer.
        if config == KTO {
            let few = run(&folder, &name("few"), config, &["strategy.micro_batch_size=1"]);
            assert_near(&whole, &few);
            assert!(series(&whole, "kl/reference").iter().any(|&kl| kl > 0.0), "the policy moves");
        }
        let sets = ["devices=2", "strategy.zero_stage=3", "strategy.micro_batch_tokens=40"];
        let ranks = run(&folder, &name("ranks"), config, &sets);
        assert_near(&whole, &parts);
        assert_near(&whole, &ranks);
        assert!(series(&whole, "grad_norm").iter().all(|&norm| norm > 0.0));
    }
}

#[test]
fn stages_and_what_leaves_the_device_change_no_bit() {
    let folder = tempfile::tempdir().unwrap();
    let two = ["devices=2"];
    let plain = run(&folder, "plain", DPO, &two);
    let sets = [
        "devices=2",
        "strategy.zero_stage=3",
        "strategy.recompute=full",
        "strategy.offload.optimizer=none",
        "roles.reference.strategy.offload.params=between_steps",
    ];
    let frugal = run(&folder, "frugal", DPO, &sets);
    assert_same_steps(&lasting_metrics(&plain), &lasting_metrics(&frugal));
    let host = run(&folder, "host", SFT, &["strategy.offload.optimizer=cpu_step", "devices=2"]);
    let device = run(&folder, "device", SFT, &two);
    assert_same_steps(&lasting_metrics(&host), &lasting_metrics(&device));
}

#[test]
fn an_interrupted_run_goes_on_bitwise() {
    let folder = tempfile::tempdir().unwrap();
    let sets = ["devices=2", "pipeline.offline.steps=80", "pipeline.offline.checkpoint.every=40"];
    let whole = run(&folder, "whole", DPO, &sets);
    let cut = folder.path().join("cut");
    interrupt(command(DPO, &cut, &sets), &cut, 10);
    succeed(resume(&cut));
    assert_same(&whole, &cut);
    assert!(last_checkpoint(&cut).1.keys().any(|name| name.starts_with("rank_0001")));
}

/// All records are trained on, and the training loss is shown.
#[test]
fn a_run_may_have_no_evaluation() {
    let folder = tempfile::tempdir().unwrap();
    let file = folder.path().join("sums.jsonl");
    let line = |number: usize| format!("{{\"prompt\": \"{number:02}+1=\", \"answer\": {}}}\n", number + 1);
    fs::write(&file, (0..64).map(line).collect::<String>()).unwrap();
    let train = |name: &str, more: &[&str]| {
        let run = folder.path().join(name);
        let data = format!("pipeline.offline.data={{file: {{path: {}}}}}", file.display());
        let sets = ["pipeline.offline.steps={data_epochs: 20}", "pipeline.offline.evaluation={prompts: 0}"];
        let schedule = "pipeline.offline.optimizer.schedule={constant: {}}";
        let sets =
            [&[&*data, sets[0], sets[1], schedule, "pipeline.offline.checkpoint={every: 40}"], more].concat();
        (changed(SFT, &run, &sets), run)
    };
    let (command, whole) = train("whole", &[]);
    let ended = succeed(command);
    let loss = series(&whole, "loss");
    assert_eq!(loss.len(), 20, "64 records a step, and none is held out");
    assert!(loss[19] < loss[0], "{loss:?}");
    let table = format!("{}{}", ended.stdout, ended.stderr);
    assert!(table.contains("train loss") && table.contains("training records, mean of 10 steps"), "{table}");
    assert!(metrics(&whole).iter().all(|step| step.keys().all(|name| !name.starts_with("eval/"))));
    let report = fs::read_to_string(whole.join("report.html")).unwrap();
    assert!(report.contains("train loss, 10-step mean") && !report.contains("\"eval/loss\":{"));
    let sets = ["pipeline.offline.steps=80"];
    let (command, long) = train("long", &sets);
    succeed(command);
    let (command, cut) = train("cut", &sets);
    interrupt(command, &cut, 10);
    succeed(resume(&cut));
    assert_same(&long, &cut);
    let (command, _) = train("best", &["pipeline.offline.checkpoint={every: 4, keep_best: true}"]);
    let ended = Process::start(command).finish();
    assert!(ended.error().contains("with `evaluation.prompts: 0` nothing is evaluated"), "{ended:#?}");
}

#[test]
fn answers_are_learnt() {
    let folder = tempfile::tempdir().unwrap();
    let run = run(
        &folder,
        "run",
        SFT,
        &[
            "pipeline.offline.steps=150",
            "pipeline.offline.batch_size=64",
            "pipeline.offline.evaluation.every=50",
            "pipeline.offline.evaluation.prompts=60",
            "pipeline.offline.evaluation.completions=60",
            "pipeline.offline.checkpoint.keep_best=true",
        ],
    );
    let (loss, exact) = (series(&run, "eval/loss"), series(&run, "eval/exact"));
    assert!(loss[0] > 2.0 && loss[3] < 0.2, "held-out loss went from {loss:?}");
    assert!(exact[0] == 0.0 && exact[3] > 0.8, "completions went from {exact:?}");
    // ln(vocabulary) at the beginning: digits, `>` and two special tokens.
    assert!((loss[0] - 13f64.ln()).abs() < 0.1, "{loss:?}");
    assert!(run.join("best").is_dir() && run.join("report.html").is_file());
    let report = fs::read_to_string(run.join("report.html")).unwrap();
    assert!(report.contains("\"eval/loss\":{") && report.contains("\"loss\":{"), "curves");
}

/// Every objective widens the margin from pairs alone. An objective with a reference starts at a margin of 0.
#[test]
fn every_objective_tells_better_from_worse() {
    let folder = tempfile::tempdir().unwrap();
    for objective in
        ["{dpo: {beta: 0.5}}", "{ipo: {}}", "{hinge: {beta: 0.5}}", "{simpo: {}}", "{orpo: {beta: 1.0}}"]
    {
        let set = format!("pipeline.offline.objective={objective}");
        let sets = [&*set, "pipeline.offline.steps=40", "pipeline.offline.evaluation.every=40"];
        let run = run(&folder, objective, DPO, &sets);
        let (accuracy, margin) = (series(&run, "eval/accuracy"), series(&run, "eval/margin"));
        assert!(accuracy[1] > 0.8 && margin[1] > margin[0], "{objective}: {accuracy:?} {margin:?}");
        let compares_with_itself = margin[0] == 0.0;
        let has_reference = ["dpo", "ipo", "hinge"].iter().any(|name| objective.contains(name));
        assert_eq!(compares_with_itself, has_reference, "{objective}: {margin:?}");
    }
}

/// KTO and APO learn from judged answers, with and without an estimate of the KL divergence.
#[test]
fn judged_answers_tell_better_from_worse() {
    let folder = tempfile::tempdir().unwrap();
    for objective in ["{kto: {beta: 0.5}}", "{apo_zero_unpaired: {beta: 0.5}}"] {
        let set = format!("pipeline.offline.objective={objective}");
        let sets = [&*set, "pipeline.offline.steps=40", "pipeline.offline.evaluation.every=40"];
        let run = run(&folder, objective, KTO, &sets);
        let (loss, margin) = (series(&run, "eval/loss"), series(&run, "eval/margin"));
        assert!((loss[0] - 0.5).abs() < 1e-9 && margin[0] == 0.0, "the reference is the policy: {loss:?}");
        assert!(loss[1] < 0.4 && margin[1] > 0.5, "{objective}: {loss:?} {margin:?}");
        assert_eq!(series(&run, "eval/kl").len(), if objective.contains("kto") { 2 } else { 0 });
    }
}

/// An interrupted run resumes bitwise equal, including its reference; also with part of the records, or one
/// kind.
#[test]
fn judged_answers_in_odd_numbers() {
    let folder = tempfile::tempdir().unwrap();
    let sets = ["devices=2", "pipeline.offline.steps=80", "pipeline.offline.checkpoint.every=40"];
    let whole = run(&folder, "whole", KTO, &sets);
    let cut = folder.path().join("cut");
    interrupt(command(KTO, &cut, &sets), &cut, 10);
    succeed(resume(&cut));
    assert_same(&whole, &cut);

    let file = folder.path().join("judged.jsonl");
    let lines = |is_desirable: &dyn Fn(usize) -> bool| {
        let line = |number: usize| {
            let label = is_desirable(number);
            format!("{{\"prompt\": \"{number:03}>\", \"completion\": \"{number}\", \"label\": {label}}}\n")
        };
        fs::write(&file, (0..90).map(line).collect::<String>()).unwrap();
    };
    let columns = "columns: {answer: completion, label: label}";
    let data = format!(
        "pipeline.offline.data={{file: {{path: {}, held_out_percent: 40, {columns}}}}}",
        file.display()
    );
    let train = |name: &str, sets: &[&str]| {
        let run = folder.path().join(name);
        let sets = [&small(KTO, &[])[1..], &[&*data], sets].concat();
        (changed(KTO, &run, &sets), run)
    };
    // In most steps a rank has no desirable answer, and often no rank has one.
    lines(&|number| number % 15 == 0);
    let two = [
        "devices=2",
        "pipeline.offline.batch_size=2",
        "pipeline.offline.warmup={steps: 0, batch_size: 2, optimizer: {adamw: {learning_rate: 1.0e-3}}}",
    ];
    let (command, few) = train("few", &[two[0], two[1], two[2], "pipeline.offline.evaluation.completions=1"]);
    let told = succeed(command).stderr;
    assert!(told.contains("weights are best where desirable_weight x desirable"), "{told}");
    assert_eq!(series(&few, "loss").len(), 12);
    assert!(series(&few, "reward/chosen").len() < 12, "some steps have none");
    lines(&|_| true);
    let (command, all) = train("all", &[two[2], "pipeline.offline.evaluation.completions=0"]);
    let told = succeed(command).stderr;
    assert!(told.contains("all answers are of one kind"), "{told}");
    assert!(series(&all, "reward/rejected").is_empty());
    assert_eq!(series(&all, "loss").len(), 12);
    lines(&|_| false);
    let (command, _) = train("none", &[]);
    let refused = Process::start(command).finish();
    assert!(refused.error().contains("it learns desirable answers, and a source"), "{refused:#?}");
}

#[test]
fn ktos_loss_is_that_of_the_paper() {
    check_kto("system_prompt: null");
    // The reference is the model with its adapters off.
    check_kto("lora: {rank: 4}");
}

/// Compares KTO's metrics on two held-out records with those computed from `anyroll score` under both models.
#[track_caller]
fn check_kto(model: &str) {
    let folder = tempfile::tempdir().unwrap();
    let record = |number: usize, label: bool| {
        format!("{{\"prompt\": \"{number}+1=\", \"completion\": \"{}\", \"label\": {label}}}\n", number + 1)
    };
    let held_out = folder.path().join("held_out.jsonl");
    fs::write(&held_out, record(3, true) + &record(123_456, false)).unwrap();
    let records: String = (10..40).map(|number| record(number, number % 3 > 0)).collect();
    let file = format!("held_out: {}, columns: {{answer: completion, label: label}}", held_out.display());
    let offline = ["objective: {kto: {beta: 0.2, desirable_weight: 1.5}}", "steps: 20", "batch_size: 6"];
    let evaluation = "evaluation: {every: 20, prompts: 2}";
    let offline = [offline[0], offline[1], offline[2], evaluation];
    let config = config_of_published_model(&folder, &records, model, &file, offline);
    let run = folder.path().join("run");
    let mut command = anyroll(["run", &config, "--set", "model.chat=false", "--output"]);
    command.arg(&run);
    succeed(command);
    let texts = folder.path().join("texts.jsonl");
    let text = |prompt: &str, completion: &str| {
        format!("{{\"prompt\": \"{prompt}\", \"completion\": \"{completion}\", \"finished\": true}}\n")
    };
    let pairs = [("3+1=", "4"), ("123456+1=", "123457"), ("3+1=", "123457"), ("123456+1=", "4")];
    fs::write(&texts, pairs.map(|(prompt, completion)| text(prompt, completion)).concat()).unwrap();
    let tiny = Path::new(env!("CARGO_MANIFEST_DIR")).parent().unwrap().join("tests/golden/tiny_model");
    let scores = |model: &Path| -> Vec<f64> {
        let [model, file] = [model, &texts].map(|path| path.to_str().unwrap());
        let scored = succeed(anyroll(["score", model, "--file", file])).stdout;
        let line = |line: &str| serde_json::from_str::<serde_json::Value>(line).unwrap()["logprob"].as_f64();
        scored.lines().map(|it| line(it).unwrap()).collect()
    };
    let gained: Vec<f64> =
        scores(&run).iter().zip(scores(&tiny)).map(|(policy, reference)| policy - reference).collect();
    let sigmoid = |x: f64| 1.0 / (1.0 + (-x).exp());
    let kl = ((gained[2] + gained[3]) / 2.0).max(0.0);
    let loss = (1.5 * (1.0 - sigmoid(0.2 * (gained[0] - kl))) + 1.0 - sigmoid(0.2 * (kl - gained[1]))) / 2.0;
    let last = |name: &str| *series(&run, name).last().unwrap();
    for (name, expected) in
        [("eval/kl", kl), ("eval/loss", loss), ("eval/margin", 0.2 * (gained[0] - gained[1]))]
    {
        assert!((last(name) - expected).abs() < 1e-4, "{name}: {}, not {expected}; {gained:?}", last(name));
    }
    assert!(kl > 1.0, "the policy has moved: {gained:?}");
}

/// A reward model is trained, exported, and then used as RLVR's reward.
#[test]
fn a_reward_model_tells_better_from_worse() {
    const MODEL: &str = "configs/offline_reward_model_sort_cpu.yaml";
    let folder = tempfile::tempdir().unwrap();
    let sets = [
        "pipeline.offline.data.sort.digits=3",
        "pipeline.offline.steps=120",
        "pipeline.offline.optimizer.schedule.cosine.warmup_steps=5",
        "pipeline.offline.evaluation={every: 60, prompts: 51}",
        "pipeline.offline.optimizer.adamw.eps=1.0e-5", // of a head of 0 the blocks have no gradient at first, but for rounding
        "strategy.micro_batch_size=8",
    ];
    let train = |name: &str, more: &[&str]| {
        let run = folder.path().join(name);
        succeed(changed(MODEL, &run, sets.iter().chain(more)));
        run
    };
    let one = train("one", &[]);
    let accuracy = series(&one, "eval/accuracy");
    assert!(accuracy[0] == 0.0 && accuracy[2] > 0.9, "a head of 0 gives no preference: {accuracy:?}");
    assert!((series(&one, "eval/loss")[0] - 2f64.ln()).abs() < 1e-9);
    // Rounding differences grow with each step.
    let few = "pipeline.offline.steps=12";
    let [few_of_one, few_of_two] =
        [train("few", &[few]), train("few-2", &[few, "devices=2", "strategy.zero_stage=3"])];
    assert_near(&few_of_one, &few_of_two);

    let exported = folder.path().join("exported");
    succeed(anyroll([
        "export",
        one.to_str().unwrap(),
        "--to",
        exported.to_str().unwrap(),
        "--dtype",
        "fp32",
    ]));
    let cases = folder.path().join("cases.jsonl");
    fs::write(
        &cases,
        "{\"prompt\": \"314>\", \"completion\": \"134\"}\n{\"prompt\": \"314>\", \"completion\": \"314\"}\n",
    )
    .unwrap();
    let path = format!("path={}", exported.display());
    let file = cases.to_str().unwrap();
    let scored =
        succeed(anyroll(["reward", "model", "--set", &path, "--set", "chat=false", "--file", file])).stdout;
    let scores: Vec<f64> = scored
        .lines()
        .map(|line| serde_json::from_str::<serde_json::Value>(line).unwrap()["score"].as_f64().unwrap())
        .collect();
    assert!(scores[0] > scores[1] + 0.5, "{scores:?}");
    let refused = fail(anyroll(["generate", one.to_str().unwrap(), "--prompt", "314>"]));
    assert!(refused.contains("trained a reward model, which generates no text"), "{refused}");
}

/// Writes a config to `folder` that trains the tiny published model on these lines. `model`, `file` and
/// `offline` are further fields of these sections.
pub(super) fn config_of_published_model(
    folder: &TempDir,
    records: &str,
    model: &str,
    file: &str,
    offline: [&str; 4],
) -> String {
    let (data, config) = (folder.path().join("records.jsonl"), folder.path().join("config.yaml"));
    fs::write(&data, records).unwrap();
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).parent().unwrap().join("tests/golden/tiny_model");
    let text = format!(
        "\
name: published
backend: cpu
model: {{path: {}, chat: true, {model}}}
strategy: {{micro_batch_size: 4}}
pipeline:
  offline:
    data: {{file: {{path: {}, {file}}}}}
    optimizer: {{adamw: {{learning_rate: 1.0e-2}}}}
    {}
",
        path.display(),
        data.display(),
        offline.join("\n    ")
    );
    fs::write(&config, text).unwrap();
    config.to_str().unwrap().to_owned()
}

/// TRL's own format, with a model in a folder, and adapters whose reference is the model without them.
#[test]
fn conversations_train_adapters_of_a_published_model() {
    let folder = tempfile::tempdir().unwrap();
    let turn = |role: &str, content: &str| format!("{{\"role\": \"{role}\", \"content\": \"{content}\"}}");
    let line = |number: usize| {
        let question = turn("user", &format!("{number}+1="));
        let [chosen, rejected] = [number + 1, number + 2]
            .map(|answer| format!("[{question}, {}]", turn("assistant", &answer.to_string())));
        format!("{{\"chosen\": {chosen}, \"rejected\": {rejected}}}\n")
    };
    let long = line(7).replace("7+1=", &"7+1=".repeat(100));
    let records: String = (0..60).map(line).chain([long]).collect();
    let config = config_of_published_model(
        &folder,
        &records,
        "lora: {rank: 4, dropout: 0.1, targets: [q_proj, v_proj]}",
        "columns: {answer: chosen, rejected: rejected}",
        [
            "objective: {dpo: {}}",
            "steps: 6",
            "batch_size: 4",
            "evaluation: {every: 6, prompts: 3, completions: 1}",
        ],
    );
    let run = folder.path().join("run");
    let bounds =
        ["max_tokens=150", "long_prompts=refuse"].map(|set| format!("pipeline.offline.data.file.{set}"));
    let too_long = fail(anyroll(["check", &config, "--set", &bounds[0], "--set", &bounds[1]]));
    assert!(
        too_long.contains("line 61: the record has") && too_long.contains("`max_tokens` is 150"),
        "{too_long}"
    );
    let mut command = anyroll(["run", &config, "--set", &bounds[0], "--set", "devices=2"]);
    command.arg("--output").arg(&run);
    let ended = succeed(command);
    let told: Vec<&str> = ended.stderr.lines().filter(|line| line.contains("longer than allowed")).collect();
    assert!(told.len() == 1 && told[0].contains("left_out=1 of=61"), "{}", ended.stderr);
    assert_eq!(series(&run, "eval/margin")[0], 0.0, "the reference is the model without adapters");
    assert!(series(&run, "reward/margin").last().is_some_and(|margin| margin.abs() > 0.0));
    let exported = folder.path().join("exported");
    succeed(anyroll(["export", run.to_str().unwrap(), "--to", exported.to_str().unwrap(), "--adapter"]));
    assert!(exported.join("adapter_model.safetensors").is_file());
}

/// All of an assistant's messages, compared with only the last one.
#[test]
fn every_turn_of_a_conversation_can_be_learnt() {
    let folder = tempfile::tempdir().unwrap();
    let line = |number: usize| {
        let said =
            [format!("{number}+1="), (number + 1).to_string(), "And then?".into(), (number + 2).to_string()];
        let turns = said.iter().enumerate().map(|(index, content)| {
            let role = ["user", "assistant"][index % 2];
            format!("{{\"role\": \"{role}\", \"content\": \"{content}\"}}")
        });
        format!("{{\"messages\": [{}]}}\n", turns.collect::<Vec<_>>().join(", "))
    };
    let config = config_of_published_model(
        &folder,
        &(0..60).map(line).collect::<String>(),
        "system_prompt: null",
        "columns: {answer: messages}",
        ["turns: all", "steps: 10", "batch_size: 8", "evaluation: {every: 10, prompts: 3, completions: 1}"],
    );
    let losses = ["all", "last"].map(|turns| {
        let run = folder.path().join(turns);
        let mut command = anyroll(["run", &config]);
        command.args(["--set", &format!("pipeline.offline.turns={turns}"), "--output"]).arg(&run);
        succeed(command);
        series(&run, "eval/loss")
    });
    assert!(losses.iter().all(|of_run| of_run.last() < of_run.first()), "{losses:?}");
    assert!(losses[0][0] != losses[1][0], "both learn the same: {losses:?}");
}

/// Texts without prompts, and long texts of which part is trained on.
#[test]
fn texts_are_learnt_and_cut() {
    let folder = tempfile::tempdir().unwrap();
    let line =
        |number: usize| format!("{{\"text\": \"{}\"}}\n", format!("{number}+1={};", number + 1).repeat(4));
    let offline = ["objective: sft", "steps: 8", "batch_size: 8", "evaluation: {every: 8, prompts: 3}"];
    let records = (0..60).map(line).collect::<String>();
    let file = "max_tokens: 16, long_prompts: {truncate: keep_start}, columns: {text: text}";
    let config = config_of_published_model(&folder, &records, "system_prompt: null", file, offline);
    let train = |name: &str, set: &str| {
        let run = folder.path().join(name);
        let mut command = anyroll(["run", &config, "--set", set, "--output"]);
        command.arg(&run);
        (succeed(command).stderr, run)
    };
    let (told, run) = train("start", "devices=2");
    let cut = told.lines().filter(|line| line.contains("which are truncated")).collect::<Vec<_>>();
    assert!(cut.len() == 1 && cut[0].contains("of=60"), "{told}");
    let loss = series(&run, "eval/loss");
    assert!(loss.len() == 2 && loss[1] < loss[0] - 0.5, "{loss:?}");
    assert!(series(&run, "eval/exact").is_empty(), "there is no prompt to complete");
    let (_, end) = train("end", "pipeline.offline.data.file.long_prompts.truncate=keep_end");
    assert_ne!(series(&end, "eval/loss")[0], loss[0]);
    // A text has no worse answer, and RLVR completes prompts.
    let pairs = fail(anyroll(["check", &config, "--set", "pipeline.offline.objective={dpo: {}}"]));
    assert!(pairs.contains("has no worse answer to compare with"), "{pairs}");
    let few = fail(anyroll(["check", &config, "--set", "pipeline.offline.evaluation.completions=2"]));
    assert!(few.contains("2 completions are asked for, and 0 of the"), "{few}");
}

#[test]
fn what_cannot_be_learnt_is_refused_before_a_device_is_opened() {
    let folder = tempfile::tempdir().unwrap();
    let check = |config: &str, set: &str, words: &str| {
        let ended = Process::start(command(config, &folder.path().join("refused"), &[set])).finish();
        assert_eq!(ended.code, Some(1), "{set}: {ended:#?}");
        assert!(ended.stderr.contains(words), "{set}: {}", ended.stderr);
    };
    check(DPO, "pipeline.offline.data={countdown: {numbers: 3}}", "has no worse answer to compare with");
    check(DPO, "pipeline.offline.objective={dpo: {beta: 0.0}}", "pipeline.offline.objective.dpo.beta");
    check(DPO, "pipeline.offline.objective={dpo: {label_smoothing: 0.5}}", "below 0.5");
    check(KTO, "pipeline.offline.objective={kto: {beta: 0.0}}", "pipeline.offline.objective.kto.beta");
    check(KTO, "pipeline.offline.objective={kto: {desirable_weight: -1}}", "kto.desirable_weight");
    let weights = "pipeline.offline.objective={kto: {desirable_weight: 0, undesirable_weight: 0}}";
    check(KTO, weights, "both weights are 0");
    check(KTO, "pipeline.offline.batch_size=1", "a prompt with another record's answer");
    check(
        KTO,
        "pipeline.offline.data={countdown: {numbers: 3}}",
        "does not say whether its answer is desirable",
    );
    check(DPO, "strategy.micro_batch_size=1", "are two sequences");
    check(
        SFT,
        "pipeline.offline.evaluation.completions=20",
        "20 completions are asked for, and 19 of the 19",
    );
    let every = "pipeline.offline.evaluation.every=0";
    check(SFT, every, "pipeline.offline.evaluation.every");
    check(SFT, "pipeline.offline.turns=all", "has no chat template");
    check(
        DPO,
        "pipeline.offline.turns=all",
        "only `sft`, `distill` and `ilql` learn more than the last message",
    );
    check(SFT, "pipeline.offline.batch_size=0", "pipeline.offline.batch_size");
    check(SFT, "model.decoder.max_length=6", "has room for 6");
    check(SFT, "roles.rollout={devices: 1}", "only `rlvr` samples on devices of its own");
    let missing = fail(anyroll(["check", SFT, "--set", "devices=3"]));
    assert!(missing.contains("64 prompts cannot be shared evenly by 3"), "{missing}");
}

#[test]
fn records_that_teach_nothing_are_told() {
    let folder = tempfile::tempdir().unwrap();
    let file = folder.path().join("pairs.jsonl");
    let check = |objective: &str, line: &dyn Fn(u32) -> [String; 2]| {
        let lines = (0..90).map(|number| {
            let [chosen, rejected] = line(number);
            format!(
                "{{\"prompt\": \"{number:03}>\", \"chosen\": \"{chosen}\", \"rejected\": \"{rejected}\"}}\n"
            )
        });
        fs::write(&file, lines.collect::<String>()).unwrap();
        let columns = "columns: {answer: chosen, rejected: rejected}";
        let path = file.display();
        let data =
            format!("pipeline.offline.data={{file: {{path: {path}, held_out_percent: 40, {columns}}}}}");
        let objective = format!("pipeline.offline.objective={objective}");
        // The first of the usual changes is one of the data that is replaced here.
        let sets = small(SFT, &[&data, &objective]);
        Process::start(anyroll(
            ["check", SFT].into_iter().chain(sets[1..].iter().flat_map(|it| ["--set", *it])),
        ))
        .finish()
    };
    let digits = |number: u32| [(number % 7).to_string(), (number % 5).to_string()];
    let fine = check("{dpo: {}}", &|number| [(number % 7).to_string(), "x".to_owned()]);
    assert!(fine.code == Some(0) && fine.stderr.is_empty(), "{fine:#?}");
    let some = check("{dpo: {}}", &digits);
    let words = "the better answer and the worse one are the same: nothing is compared records=15 first=";
    assert!(some.code == Some(0) && some.stderr.contains(words), "{some:#?}");
    assert!(check("sft", &digits).stderr.is_empty());
    let all = check("{dpo: {}}", &|_| ["1".to_owned(), "1".to_owned()]);
    assert!(
        all.error().contains("in every record the better answer and the worse one are the same"),
        "{all:#?}"
    );
    let empty = check("sft", &|number| ["1".repeat((number % 9) as usize), String::new()]);
    let words = "answers are empty: what they teach is to end at once records=10 first=";
    assert!(empty.code == Some(0) && empty.stderr.contains(words), "{empty:#?}");
    let long = check("sft", &|number| ["1".repeat(number as usize), String::new()]);
    assert!(long.stderr.contains("write `max_tokens: 32` beside the file's path"), "{long:#?}");
}

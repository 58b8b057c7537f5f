//! Runs with a user's own rewards, and with selected completions.

use std::collections::BTreeSet;
use std::fs;
use std::path::Path;

use serde_json::{Value, json};

use super::{
    ONE_RANK, TWO_RANKS, anyroll, assert_same, assert_same_steps, fail, finish, lasting_metrics, resume,
    run_tiny, series, succeed, tiny, whole_lines,
};

const FUNCTIONS: &str = r#"
def exact(completions, answer, finished):
    return [float(a == b and end) for a, b, end in zip(completions, answer, finished)]

def moody(prompts, completions, answer, finished):
    if prompts[0].startswith("1"):
        raise ValueError("a prompt that it does not like")
    return exact(completions, answer, finished)

def logs(completions, answer, finished, log_metric, log_extra):
    scores = exact(completions, answer, finished)
    log_metric("right", scores[0])
    log_metric("length/chars", len(completions[0]))
    if scores[0]:
        log_metric("only if right", 2)
    log_extra("gold", answer)
    log_extra("chars", [len(text) for text in completions])
    return scores

def logs_nan(completions, log_metric):
    log_metric("oops", float("nan"))
    return [0.0]
"#;

/// Returns the `--set` of a Python reward in a file of `folder`.
fn python(folder: &Path, function: &str, max_error_rate: f64) -> String {
    let path = folder.join("rewards.py");
    fs::write(&path, FUNCTIONS).unwrap();
    let fields = format!("path: \"{}\", function: {function}", path.display());
    format!("pipeline.rlvr.reward=[{{python: {{{fields}}}, max_error_rate: {max_error_rate}}}]")
}

#[test]
fn a_python_function_trains_as_the_same_reward_in_rust() {
    let folder = tempfile::tempdir().unwrap();
    let own = python(folder.path(), "exact", 0.0);
    let python = run_tiny(&folder, "python", ONE_RANK, &[&own]);
    let rust = run_tiny(&folder, "rust", ONE_RANK, &[]);
    assert_eq!(series(&python, "loss/policy").len(), 12);
    assert_eq!(series(&python, "reward/mean"), series(&rust, "reward/mean"));
    assert_eq!(series(&python, "grad_norm"), series(&rust, "grad_norm"));
}

/// The logged metrics are compared with the scores that they repeat, and the columns with the samples beside them.
#[test]
fn a_python_function_logs_metrics_and_columns() {
    let folder = tempfile::tempdir().unwrap();
    let own = python(folder.path(), "logs", 0.0);
    succeed(anyroll(["check", TWO_RANKS, "--set", &own]));
    let mixed = "pipeline.rlvr.selection={mixed_groups: {max_batches: 3}}";
    let every = "pipeline.rlvr.samples={every: 1, groups: 4}";
    for (name, sets) in [("plain", &[&*own, every][..]), ("mixed", &[&*own, every, mixed])] {
        let run = run_tiny(&folder, name, TWO_RANKS, sets);
        let right = series(&run, "logged/python/right");
        assert!(right.len() == 12 && right.iter().any(|&mean| mean > 0.0), "{right:?}");
        assert_eq!(right, series(&run, "reward/python/mean"));
        assert!(series(&run, "logged/python/only if right").iter().all(|&mean| mean == 2.0));
        assert!(series(&run, "logged/python/length/chars").iter().all(|&mean| mean > 0.0));
        // An evaluation has a greedy completion and four samples of each prompt.
        let greedy = series(&run, "eval/greedy").into_iter().zip(series(&run, "eval/pass@1"));
        let means = greedy.map(|(greedy, sampled)| (greedy + 4.0 * sampled) / 5.0).collect::<Vec<_>>();
        let logged = series(&run, "eval/logged/python/right");
        assert!(logged.len() == means.len() && logged.len() > 1, "{logged:?} {means:?}");
        assert!(logged.iter().zip(&means).all(|(a, b)| (a - b).abs() < 1e-9), "{logged:?} {means:?}");

        let samples = whole_lines(&run.join("samples.jsonl"));
        let samples = samples.iter().map(|line| serde_json::from_str::<Value>(line).unwrap());
        let mut phases = BTreeSet::new();
        for sample in samples {
            phases.insert(sample["phase"].as_str().unwrap().to_owned());
            let chars = sample["completion"].as_str().unwrap().len();
            let columns = json!({"python": {"gold": sample["answer"], "chars": chars}});
            assert_eq!(sample["columns"], columns, "{sample}");
        }
        assert!(phases.contains("train") && phases.contains("after"), "{phases:?}");
    }
    let [one, again] = ["plain", "again"].map(|name| folder.path().join(name));
    succeed(tiny(TWO_RANKS, &again, &[&own, every]));
    assert_same(&one, &again);

    let error = fail(tiny(TWO_RANKS, &folder.path().join("nan"), &[&python(folder.path(), "logs_nan", 0.0)]));
    for words in ["log_metric('oops', nan): a metric is a finite number", "in logs_nan"] {
        assert!(error.contains(words), "{error}");
    }
}

#[test]
fn a_function_of_texts_gets_no_images() {
    let folder = tempfile::tempdir().unwrap();
    let own =
        python(folder.path(), "exact", 0.0).replace("function: exact", "function: exact, images: uint8");
    let error = fail(tiny(ONE_RANK, &folder.path().join("never"), &[&own]));
    assert!(error.contains("reward[0].python.images: completions are no images"), "{error}");
}

#[test]
fn a_mix_of_domains_is_trained_on_and_measured_apart() {
    let folder = tempfile::tempdir().unwrap();
    let sources = "[{domain: sorting, weight: 3, data: {sort: {digits: 3}}}, \
                   {domain: sums, data: {addition: {digits: 1}}}]";
    let data = format!("pipeline.rlvr.data={{mix: {sources}}}");
    let reward = "pipeline.rlvr.reward=[{exact: {}, domains: [sorting]}, {exact: {}, domains: [sums]}]";
    let run = run_tiny(&folder, "mix", TWO_RANKS, &[&data, reward]);
    for name in ["eval/greedy", "eval/sorting/greedy", "eval/sums/pass@1", "eval/maj@4", "eval/sums/maj@4"] {
        assert!(!series(&run, name).is_empty(), "{name}");
    }
    let mean = |name: &str| series(&run, name)[0];
    // Three of four prompts are sorting prompts.
    let both = 0.75 * mean("eval/sorting/pass@1") + 0.25 * mean("eval/sums/pass@1");
    assert!((mean("eval/pass@1") - both).abs() < 1e-9, "{both}");
    assert!(!series(&run, "reward/exact_2/mean").is_empty());
}

#[test]
fn failures_are_counted_and_end_the_run_above_their_rate() {
    let folder = tempfile::tempdir().unwrap();
    let run = run_tiny(&folder, "moody", TWO_RANKS, &[&python(folder.path(), "moody", 0.9)]);
    let errors = series(&run, "reward/errors");
    assert!(errors.iter().any(|&count| count > 0.0), "{errors:?}");
    let left_out = series(&run, "selection/left_out");
    assert_eq!(left_out, series(&run, "reward/error_rate"));
    assert!(series(&run, "grad_norm").iter().any(|&norm| norm > 0.0), "nothing was learned");

    let strict = python(folder.path(), "moody", 0.0);
    let ended = finish(tiny(ONE_RANK, &folder.path().join("strict"), &[&strict]));
    for words in ["`python` failed on", "max_error_rate", "a prompt that it does not like"] {
        assert!(ended.error().contains(words), "{ended:#?}");
    }
    // One warning for all samples that failed alike.
    let warnings = ended.stderr.lines().filter(|line| line.contains("samples could not be scored"));
    assert_eq!(warnings.count(), 1, "{}", ended.stderr);
}

#[test]
fn what_a_reward_needs_is_missed_by_check() {
    let folder = tempfile::tempdir().unwrap();
    let check = |set: &str| anyroll(["check", ONE_RANK, "--set", set]);
    succeed(check(&python(folder.path(), "exact", 0.0)));
    let ended = finish(check(&python(folder.path(), "no_such", 0.0)));
    for words in ["pipeline.rlvr.reward[0].python.path", "no function `no_such`", "mend the file"] {
        assert!(ended.code == Some(1) && ended.stderr.contains(words), "{ended:#?}");
    }
    let started = fail(tiny(ONE_RANK, &folder.path().join("run"), &[&python(folder.path(), "no_such", 0.0)]));
    assert!(started.contains("the reward `pipeline.rlvr.reward[0]` does not start"), "{started}");
    let nobody = "pipeline.rlvr.reward=[{exact: {}}, {math: {}, domains: [algebra]}]";
    let warned = succeed(check(nobody)).stderr;
    assert!(warned.contains("no record is of this domain") && warned.contains("algebra"), "{warned}");
}

/// A record on which a reward can only fail is named before the run.
#[test]
fn check_names_a_record_that_cannot_be_scored() {
    let folder = tempfile::tempdir().unwrap();
    let file = folder.path().join("golds.jsonl");
    for (reward, good, bad, words) in [
        ("math", r#""4""#, r#"" ""#, "its answer is empty"),
        ("choice", r#""B""#, r#""b""#, "is not a letter from A to Z"),
        ("countdown", r#""4""#, r#""4""#, "its prompt is not a problem"),
        (
            "ifeval",
            r#"{"instruction_id_list": ["punctuation:no_comma"]}"#,
            r#"{"instruction_id_list": []}"#,
            "an empty list of instructions",
        ),
        ("code", r#"{"inputs": [""], "outputs": [""]}"#, r#"{"asserts": []}"#, "its answer has no tests"),
        (
            "code",
            r#"{"inputs": [""], "outputs": [""]}"#,
            r#"{"asserts": ["x = 1"]}"#,
            "nothing is asserted in it",
        ),
    ] {
        let line = |number: usize| {
            let answer = if number == 29 { bad } else { good };
            let prompt = if number == 29 { "1=".to_owned() } else { format!("2,3,4={number}>") };
            format!("{{\"prompt\": \"{prompt}\", \"answer\": {answer}}}\n")
        };
        fs::write(&file, (0..30).map(line).collect::<String>()).unwrap();
        let sets = [
            format!("pipeline.rlvr.data={{file: {{path: {}}}}}", file.display()),
            format!("pipeline.rlvr.reward={reward}"),
            "pipeline.rlvr.evaluation.prompts=2".to_owned(),
        ];
        let mut command = anyroll(["check", ONE_RANK]);
        for set in &sets {
            command.args(["--set", set]);
        }
        let ended = finish(command);
        if ended.stderr.contains("the sandbox refuses") {
            eprintln!("SKIPPED: this machine cannot create the sandbox: {}", ended.stderr);
            continue;
        }
        assert!(ended.stderr.contains(words) && ended.code == Some(1), "{reward}: {ended:#?}");
        assert!(ended.stderr.contains("golds.jsonl:30: "), "{reward}: {ended:#?}");
    }
}

#[test]
fn groups_that_teach_nothing_are_replaced_on_any_number_of_ranks() {
    let folder = tempfile::tempdir().unwrap();
    let mixed = "pipeline.rlvr.selection={mixed_groups: {max_batches: 20}}";
    let same = ["strategy.micro_batch_size=4", "pipeline.rlvr.rollout.batch_size=4", mixed];
    let one = run_tiny(&folder, "one", ONE_RANK, &same);
    let two = run_tiny(&folder, "two", TWO_RANKS, &same);
    for name in ["selection/batches", "selection/teaching_groups", "reward/mean", "response_length/mean"] {
        assert_eq!(series(&one, name), series(&two, name), "{name}");
    }
    let batches = series(&one, "selection/batches");
    assert!(batches.iter().any(|&count| count > 1.0), "{batches:?}");
    let groups = series(&one, "group/mixed").into_iter().zip(series(&one, "selection/filled_up"));
    for (mixed, filled_up) in groups {
        assert!((mixed + filled_up - 1.0).abs() < 1e-9, "{mixed} and {filled_up}");
    }

    // A resumed run draws the same prompts as an uninterrupted one.
    let interrupted = folder.path().join("interrupted");
    succeed(tiny(ONE_RANK, &interrupted, &[&same[..], &["pipeline.rlvr.steps=12"]].concat()));
    fs::remove_dir_all(interrupted.join("checkpoints/step_000012")).unwrap();
    succeed(resume(&interrupted));
    assert_same(&one, &interrupted);
}

#[test]
fn cut_completions_and_groups_of_the_wrong_difficulty_are_left_out() {
    let folder = tempfile::tempdir().unwrap();
    let none = "pipeline.rlvr.selection={difficulty: {min: 2, max: 3}}";
    let run = run_tiny(&folder, "none", ONE_RANK, &[none]);
    assert!(series(&run, "selection/left_out").iter().all(|&share| share == 1.0));
    assert!(series(&run, "grad_norm").iter().all(|&norm| norm == 0.0), "nothing is trained on");

    let cut = ["pipeline.rlvr.selection.leave_out_cut=true", "pipeline.rlvr.rollout.temperature=1.5"];
    let run = run_tiny(&folder, "cut", ONE_RANK, &cut);
    assert_eq!(series(&run, "selection/left_out"), series(&run, "response_length/clipped"));
    assert!(series(&run, "response_length/clipped").iter().any(|&share| share > 0.0));
}

#[test]
fn a_reward_model_in_a_folder_scores_beside_a_verifier() {
    let folder = tempfile::tempdir().unwrap();
    let reward = |path: &str| {
        format!("pipeline.rlvr.reward=[{{exact: {{}}}}, {{model: {{path: {path}}}, weight: 0.1}}]")
    };
    let sets = [&*reward("tests/golden/reward_model"), "pipeline.rlvr.steps=4"];
    let [one, two] =
        [ONE_RANK, TWO_RANKS].map(|config| run_tiny(&folder, &config.replace('/', "_"), config, &sets));
    for name in ["reward/model/mean", "reward/exact/mean", "reward/mean"] {
        let (one, two) = (series(&one, name), series(&two, name));
        assert!(
            one.len() == 4 && one.iter().zip(&two).all(|(a, b)| (a - b).abs() < 1e-5),
            "{name}: {one:?} {two:?}"
        );
    }
    assert!(series(&one, "reward/model/mean").iter().all(|mean| mean.abs() > 1e-3));
    // Batches are the same, whenever their completions end.
    let again =
        run_tiny(&folder, "again", ONE_RANK, &[&sets[..], &["pipeline.rlvr.scoring.workers=1"]].concat());
    assert_eq!(series(&one, "reward/model/mean"), series(&again, "reward/model/mean"));
    let elsewhere = "pipeline.rlvr.reward=[{model: {path: tests/golden/reward_model, backend: elsewhere}}]";
    let error = fail(tiny(ONE_RANK, &folder.path().join("elsewhere"), &[elsewhere]));
    assert!(error.contains("reward[0].model.backend: there is no backend `elsewhere`"), "{error}");
    // A run may be resumed from any folder.
    let resolved = fs::read_to_string(one.join("resolved.yaml")).unwrap();
    assert!(
        resolved.lines().any(|line| line.contains("path: /") && line.ends_with("tests/golden/reward_model"))
    );
    let error = fail(tiny(ONE_RANK, &folder.path().join("wrong"), &[&reward("tests/golden/tiny_model")]));
    assert!(
        error.contains("reward[1].model.path") && error.contains("Qwen2ForSequenceClassification"),
        "{error}"
    );
}

/// Two ranks hold the reward model whole or sharded, always loaded or offloaded, or with its own
/// communicator. The ranks have unequal numbers of its texts, for one domain and not for another.
#[test]
fn how_the_ranks_hold_a_reward_model_changes_no_bit() {
    let folder = tempfile::tempdir().unwrap();
    let sources = "[{domain: sorting, weight: 3, data: {sort: {digits: 3}}}, \
                   {domain: sums, data: {addition: {digits: 1}}}]";
    let data = format!("pipeline.rlvr.data={{mix: {sources}}}");
    let run = |name: &str, config: &str, fields: &str, domains: &str, sets: &[&str]| {
        let model = format!("{{path: tests/golden/reward_model, batch_size: 4{fields}}}");
        let reward = format!(
            "pipeline.rlvr.reward=[{{exact: {{}}}}, {{model: {model}, weight: 0.1, domains: {domains}}}]"
        );
        run_tiny(&folder, name, config, &[&[&*data, &reward, "pipeline.rlvr.steps=4"], sets].concat())
    };
    let whole = run("whole", TWO_RANKS, ", strategy: {}", "[sums]", &[]);
    let means = series(&whole, "reward/model/mean");
    assert!(means.len() == 4 && means.iter().all(|mean| mean.abs() > 1e-3), "{means:?}");
    for (name, strategy, sets) in [
        ("sharded", "{zero_stage: 3}", &[][..]),
        ("sharded and there", "{zero_stage: 3, offload: {params: none}}", &[]),
        ("streamed", "{zero_stage: 3, offload: {params: cpu}}", &["strategy.zero_stage=3"]),
        ("elsewhere", "{zero_stage: 3, collective_timeout_s: 50}", &[]),
        ("beside rollout", "{zero_stage: 3}", &["roles.rollout.devices=2"]),
    ] {
        let other = run(name, TWO_RANKS, &format!(", strategy: {strategy}"), "[sums]", sets);
        assert_same_steps(&lasting_metrics(&whole), &lasting_metrics(&other));
    }
    // With all domains each rank has the same batches as on the host.
    let [held, on_host] = [(", devices: 2", "held"), ("", "on the host")]
        .map(|(fields, name)| run(name, TWO_RANKS, fields, "[]", &[]));
    assert_same_steps(&lasting_metrics(&held), &lasting_metrics(&on_host));
    let one = run("one", ONE_RANK, ", strategy: {zero_stage: 3}", "[]", &[]);
    for (one, two) in series(&one, "reward/model/mean").iter().zip(series(&held, "reward/model/mean")) {
        assert!((one - two).abs() < 1e-5, "{one} and {two}");
    }
}

#[test]
fn a_reward_model_scores_what_was_sampled_ahead() {
    let folder = tempfile::tempdir().unwrap();
    let reward = "pipeline.rlvr.reward=[{exact: {}}, \
                  {model: {path: tests/golden/reward_model, strategy: {zero_stage: 3}}, weight: 0.1}]";
    let ahead = ["roles.rollout={}", "pipeline.rlvr.rollout.async={ahead: 2}", reward];
    let [run, again] = ["run", "again"].map(|name| run_tiny(&folder, name, TWO_RANKS, &ahead));
    assert_eq!(series(&run, "reward/model/mean").len(), 12);
    assert_same(&run, &again);
    fs::remove_dir_all(again.join("checkpoints/step_000012")).unwrap();
    succeed(resume(&again));
    assert_same(&run, &again);
}

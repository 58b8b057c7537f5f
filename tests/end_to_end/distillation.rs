//! A teacher with another model than the policy's: on the policy's samples, and on given answers.

use std::path::Path;

use tempfile::TempDir;

use super::{
    anyroll, assert_same, assert_same_steps, changed, fail, finish, interrupt, lasting_metrics, offline,
    resume, series, succeed,
};

const ON_POLICY: &str = "configs/rlvr_distill_sort_cpu.yaml";
const WRITTEN: &str = "configs/offline_distill_sort_cpu.yaml";

/// Changes that make a run of either config take about a second.
const SMALL: [&str; 4] = [
    "pipeline.rlvr.steps=6",
    "pipeline.rlvr.prompts_per_step=32",
    "pipeline.rlvr.evaluation={every: 3, prompts: 10}",
    "pipeline.rlvr.optimizer.schedule.linear.warmup_steps=0",
];

/// Returns the folder of a run that has learned to sort three digits; the policy is a quarter as wide.
fn teacher(folder: &TempDir) -> String {
    let sets = [
        "pipeline.offline.steps=120",
        "pipeline.offline.evaluation.every=60",
        "pipeline.offline.batch_size=64",
    ];
    let run = offline::run(folder, "sorts", offline::SFT, &sets);
    let to = folder.path().join("teacher");
    succeed(anyroll(["export", run.to_str().unwrap(), "--to", to.to_str().unwrap(), "--dtype", "fp32"]));
    format!("roles.reference.path={}", to.display())
}

fn narrow<'a>(path: &'a str, pipeline: &'a [&'a str], more: &[&'a str]) -> Vec<&'a str> {
    [&[path][..], pipeline, more].concat()
}

#[test]
fn a_policy_learns_from_what_its_teacher_says_of_its_own_answers() {
    let folder = tempfile::tempdir().unwrap();
    let path = &*teacher(&folder);
    let digits = "pipeline.rlvr.data.sort.digits=3";
    let long = [
        digits,
        "pipeline.rlvr.steps=100",
        "pipeline.rlvr.prompts_per_step=128",
        "pipeline.rlvr.evaluation.prompts=50",
    ];
    let run = folder.path().join("learns");
    succeed(changed(ON_POLICY, &run, &narrow(path, &long, &[])));
    let (kl, right) = (series(&run, "kl/reference"), series(&run, "eval/pass@1"));
    assert!(kl[99] < 0.3 * kl[0], "a token's mean divergence went from {} to {}", kl[0], kl[99]);
    assert!(right.last().unwrap() > &(right[0] + 0.3), "rewards improve without training on them: {right:?}");
    assert_eq!(series(&run, "reward/mean").len(), 100, "it is still measured");

    // At the weights that sampled, the gradient equals that of k2 as a loss, computed another way.
    let one = ["pipeline.rlvr.steps=1", "pipeline.rlvr.algorithm.loss=reinforce", digits];
    let sets = [&SMALL[1..], &one].concat();
    let first = |name: &str, more: &[&str]| {
        let run = folder.path().join(name);
        succeed(changed(ON_POLICY, &run, &narrow(path, &sets, more)));
        series(&run, "grad_norm")[0]
    };
    let k2 = "pipeline.rlvr.algorithm.kl_in={loss: {estimator: k2}}";
    let (advantage, loss) = (first("advantage", &[]), first("k2", &[k2]));
    assert!((advantage / loss - 1.0).abs() < 1e-4, "{advantage} and {loss}");
    let doubled = first("doubled", &["pipeline.rlvr.algorithm.kl_coef=2"]);
    assert!((doubled / advantage - 2.0).abs() < 1e-4, "{doubled} and {advantage}");
}

#[test]
fn any_split_of_a_teacher_is_the_same_and_goes_on_to_the_bit() {
    let folder = tempfile::tempdir().unwrap();
    let path = &*teacher(&folder);
    let digits = ["pipeline.rlvr.data.sort.digits=3"];
    let small = [&SMALL[..], &digits].concat();
    let groups = ["pipeline.rlvr.group_size=4", "pipeline.rlvr.algorithm.advantage={grpo: {}}", "devices=2"];
    let run = |name: &str, more: &[&str]| {
        let run = folder.path().join(name);
        succeed(changed(ON_POLICY, &run, &narrow(path, &small, &[&groups[..], more].concat())));
        run
    };
    let plain = run("plain", &[]);
    let held = "roles.reference.strategy={zero_stage: 3, offload: {params: between_steps}}";
    let frugal = run("frugal", &["strategy.zero_stage=3", held]);
    assert_same_steps(&lasting_metrics(&plain), &lasting_metrics(&frugal));

    let steps = ["pipeline.rlvr.steps=40", "pipeline.rlvr.checkpoint.every=20"];
    let whole = run("whole", &steps);
    let cut = folder.path().join("cut");
    let sets = narrow(path, &small, &[&groups[..], &steps].concat());
    interrupt(changed(ON_POLICY, &cut, &sets), &cut, 5);
    succeed(resume(&cut));
    assert_same(&whole, &cut);
}

/// Trains on given answers, of three digits.
fn written(folder: &TempDir, name: &str, path: &str, more: &[&str]) -> std::path::PathBuf {
    let sets = [
        path,
        "pipeline.offline.data.sort.digits=3",
        "pipeline.offline.steps=12",
        "pipeline.offline.batch_size=16",
        "pipeline.offline.optimizer.schedule.cosine.warmup_steps=2",
        "pipeline.offline.evaluation={every: 4, prompts: 19, completions: 5}",
        "pipeline.offline.checkpoint.every=4",
    ];
    let run = folder.path().join(name);
    succeed(changed(WRITTEN, &run, &[&sets[..], more].concat()));
    run
}

#[test]
fn all_odds_of_a_teacher_are_learnt() {
    let folder = tempfile::tempdir().unwrap();
    let path = &*teacher(&folder);
    let long = [
        "pipeline.offline.steps=120",
        "pipeline.offline.evaluation={every: 60, prompts: 50, completions: 50}",
    ];
    let batch = "pipeline.offline.batch_size=64";
    for beta in ["0", "0.5", "1"] {
        let objective = format!("pipeline.offline.objective={{distill: {{beta: {beta}}}}}");
        let run = written(&folder, beta, path, &[&long[..], &[&objective, batch]].concat());
        let (apart, exact) = (series(&run, "eval/divergence"), series(&run, "eval/exact"));
        assert!(apart[2] < 0.2 * apart[0], "beta {beta}: from {apart:?}");
        assert!(exact[2] > exact[0] + 0.5, "beta {beta}: {exact:?}");
        assert_eq!(apart, series(&run, "eval/loss"), "it is the only term");
    }
    let objective = "pipeline.offline.objective={distill: {beta: 0.5, sft_weight: 0.25}}";
    let run = written(&folder, "both", path, &[objective]);
    let [loss, apart, nll] = ["eval/loss", "eval/divergence", "eval/nll"].map(|name| series(&run, name));
    for ((loss, apart), nll) in loss.iter().zip(apart).zip(nll) {
        assert!((loss - apart - 0.25 * nll).abs() < 1e-9, "{loss}, {apart}, {nll}");
    }
}

#[test]
fn any_split_of_written_answers_distills_the_same() {
    let folder = tempfile::tempdir().unwrap();
    let path = &*teacher(&folder);
    let plain = written(&folder, "plain", path, &["devices=2"]);
    let held = "roles.reference.strategy={zero_stage: 3, offload: {params: between_steps}}";
    let sets = ["devices=2", "strategy.zero_stage=3", "strategy.recompute=full", held];
    let frugal = written(&folder, "frugal", path, &sets);
    assert_same_steps(&lasting_metrics(&plain), &lasting_metrics(&frugal));
    let whole = written(&folder, "whole", path, &["strategy.micro_batch_size=16"]);
    let parts = written(&folder, "parts", path, &["strategy.micro_batch_size=3"]);
    offline::assert_near(&whole, &parts);
    offline::assert_near(&whole, &plain);
    // A teacher in bf16 gives nearly the same.
    let coarse = written(&folder, "coarse", path, &["roles.reference.strategy.precision=bf16"]);
    let [fine, coarse] = [&whole, &coarse].map(|run| series(run, "loss"));
    assert!(fine.iter().zip(&coarse).all(|(a, b)| a != b && (a - b).abs() < 0.02), "{fine:?} {coarse:?}");
}

/// With adapters the reference is the model without them; the same model loaded from its folder gives the
/// same.
#[test]
fn a_named_reference_is_compared_with_whatever_is_trained() {
    let folder = tempfile::tempdir().unwrap();
    let line =
        |n: usize| format!("{{\"prompt\": \"{n}+1=\", \"chosen\": {}, \"rejected\": {}}}\n", n + 1, n + 2);
    let records: String = (0..60).map(line).collect();
    let config = offline::config_of_published_model(
        &folder,
        &records,
        "lora: {rank: 4, targets: [q_proj, v_proj]}",
        "columns: {answer: chosen, rejected: rejected}",
        [
            "objective: {dpo: {}}",
            "steps: 6",
            "batch_size: 4",
            "evaluation: {every: 6, prompts: 3, completions: 1}",
        ],
    );
    let run = |name: &str, sets: &[&str]| {
        let run = folder.path().join(name);
        succeed(changed(&config, &run, sets));
        run
    };
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).parent().unwrap().join("tests/golden/tiny_model");
    let set = format!("roles.reference={{path: {}, strategy: {{micro_batch_size: 4}}}}", path.display());
    let (own, named) = (run("own", &[]), run("named", &[&set]));
    assert_same_steps(&lasting_metrics(&own), &lasting_metrics(&named));
    assert!(series(&own, "reward/margin").last().is_some_and(|margin| margin.abs() > 0.0));
}

#[test]
fn a_teacher_that_reads_other_tokens_is_refused() {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).parent().unwrap().join("tests/golden/tiny_model");
    let set = format!("roles.reference.path={}", path.display());
    for config in [ON_POLICY, WRITTEN] {
        let error = fail(anyroll(["check", config, "--set", &set]));
        assert!(error.contains("roles.reference.path") && error.contains("reads other tokens"), "{error}");
    }
}

#[test]
fn what_would_teach_nothing_is_refused() {
    let check = |config: &str, sets: &[&str], words: [&str; 2]| {
        let sets = sets.iter().flat_map(|set| ["--set", set]);
        let ended = finish(anyroll(["check", config].into_iter().chain(sets)));
        assert!(
            !ended.error().is_empty() && words.iter().all(|word| ended.stderr.contains(word)),
            "{ended:#?}"
        );
    };
    let path = "roles.reference.path=null";
    check(ON_POLICY, &[path], ["roles.reference.path", "`advantage: none`"]);
    check(WRITTEN, &[path], ["roles.reference.path", "`objective: distill`"]);
    let negative = "pipeline.rlvr.algorithm.kl_coef=-1";
    check(ON_POLICY, &[path, negative], ["algorithm.kl_coef", "-1.0 is out of range"]);
    for (role, why) in [("policy", "the `model` of the top level"), ("critic", "begins as the policy does")] {
        let own = format!("roles.{role}.path=runs/teacher");
        check(ON_POLICY, &[&own], [&format!("roles.{role}.path"), why]);
    }
}

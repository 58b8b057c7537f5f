//! Runs of `ilql`.

use std::path::Path;

use super::*;

#[track_caller]
fn problem(set: &str) -> String {
    let config = Path::new(env!("CARGO_MANIFEST_DIR")).join("../configs/offline_ilql_sort_cpu.yaml");
    Loaded::read(&config, &[set.to_owned()]).map(drop).unwrap_err().to_string()
}

#[test]
fn fields_that_ilql_cannot_have_are_named() {
    for (set, field, words) in [
        ("objective.ilql.tau=1", "objective.ilql.tau", "above 0 and below 1"),
        ("objective.ilql.gamma=1.5", "objective.ilql.gamma", "from 0 to 1"),
        ("objective.ilql.alpha=0", "objective.ilql.alpha", "above 0 to 1"),
        ("objective.ilql.cql_scale=-1", "objective.ilql.cql_scale", "0 or above"),
        ("objective.ilql.awac_scale=-1", "objective.ilql.awac_scale", "0 or above"),
        ("objective.ilql.beta=.inf", "objective.ilql.beta", "that is finite"),
        ("objective.ilql.guidance=.nan", "objective.ilql.guidance", "that is finite"),
        ("objective.ilql.steps_for_target_q_sync=0", "steps_for_target_q_sync", "1 or above"),
        (
            "optimizer.adamw={learning_rate: 1.0e-3, weight_decay: 0.1, decays: all}",
            "optimizer.adamw.decays",
            "write `matrices`",
        ),
        (
            "warmup={steps: 5, batch_size: 8, optimizer: {adamw: {learning_rate: 1.0e-3}}}",
            "warmup",
            "has no warm-up",
        ),
    ] {
        let error = problem(&format!("pipeline.offline.{set}"));
        assert!(error.contains(field) && error.contains(words), "{set}: {error}");
    }
    let error = problem("strategy.zero_stage=auto");
    assert!(error.contains("strategy.zero_stage") && error.contains("the heads of `ilql`"), "{error}");
}

#[test]
fn a_reward_is_that_of_one_answer() {
    let file =
        |columns: &str| format!("pipeline.offline.data={{file: {{path: a.jsonl, columns: {{{columns}}}}}}}");
    for (columns, field) in [
        ("reward: r, label: l", "columns.reward"),
        ("reward: r, rejected: w", "columns.reward"),
        ("reward: r, text: t", "columns.text"),
    ] {
        let error = problem(&file(columns));
        assert!(error.contains(field) && error.contains("leave"), "{columns}: {error}");
    }
    let error = invalid(SMALL, &["pipeline.rlvr.data={file: {path: a.jsonl, columns: {reward: r}}}"]);
    assert!(error.field.ends_with("columns.reward"), "{error}");
}

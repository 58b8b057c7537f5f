//! Configs with several mistakes: all are reported at once, except those that only follow from another.

use super::*;

/// The fields of all problems, in the order in which a user reads them.
#[track_caller]
fn fields(error: Error) -> Vec<String> {
    let Error::Invalid(all) = error else { panic!("{error}") };
    all.into_iter().map(|problem| problem.field).collect()
}

/// Fields of the problems of `SMALL` with `edits` (a text and its replacement each) and `sets`.
#[track_caller]
fn edited(edits: &[(&str, &str)], sets: &[&str]) -> Vec<String> {
    let text = edits.iter().fold(SMALL.to_owned(), |text, (from, to)| {
        assert!(text.contains(from), "{from}");
        text.replacen(from, to, 1)
    });
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("run.yaml");
    std::fs::write(&path, text).unwrap();
    let sets: Vec<String> = sets.iter().map(|set| (*set).to_owned()).collect();
    let prepared = Draft::read(&path, &sets).unwrap().prepare(&machine(), Purpose::Run);
    prepared.err().map_or(Vec::new(), fields)
}

#[test]
fn five_mistakes_are_reported_at_once() {
    let text = SMALL
        .replace("backend: cpu", "backend: gpuu\nseeed: 3")
        .replace("hidden_size: 16", "hidden_size: 15")
        .replace("digits: 6", "digits: 1")
        .replace("group_size: 4", "group_size: four")
        .replace("learning_rate: 1.0e-3", "learning_rate: -1");
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("run.yaml");
    std::fs::write(&path, text).unwrap();
    let draft = Draft::read(&path, &["pipeline.rlvr.rollout.top_p=2".to_owned()]).unwrap();
    let Err(Error::Invalid(all)) = draft.prepare(&machine(), Purpose::Run) else { panic!("accepted") };
    let found: Vec<(&str, &str)> = all
        .iter()
        .map(|problem| (problem.position.rsplit("run.yaml").next().unwrap(), problem.field.as_str()))
        .collect();
    let expected = [
        (":2:10", "backend"),
        (":3:1", "seeed"),
        (":5:26", "model.decoder.hidden_size"),
        (":10:22", "pipeline.rlvr.data.sort.digits"),
        (":13:17", "pipeline.rlvr.group_size"),
        (":16:30", "pipeline.rlvr.optimizer.adamw.learning_rate"),
        ("--set pipeline.rlvr.rollout.top_p=2", "pipeline.rlvr.rollout.top_p"),
    ];
    assert_eq!(found, expected);
    // Each as if it were alone.
    let alone = only_problem(read(&SMALL.replace("digits: 6", "digits: 1"), &[]).unwrap_err());
    assert_eq!((&all[3].message, &all[3].help), (&alone.message, &alone.help));
    let told = Error::Invalid(all).to_string();
    assert!(
        told.contains("  help: did you mean `seed`?\n") && told.contains("found the text `four`"),
        "{told}"
    );
    assert_eq!(told.matches("  help: ").count(), expected.len());
}

#[test]
fn what_follows_from_a_mistake_is_not_reported() {
    let of_rlvr = |field: &str| format!("pipeline.rlvr.{field}");
    // A misspelt key is reported instead of the missing field of its section, and of no other.
    assert_eq!(edited(&[("group_size", "group_sise")], &[]), [of_rlvr("group_sise")]);
    assert_eq!(
        edited(&[("group_size", "group_sise"), ("    steps: 20\n", "")], &[]),
        [of_rlvr("steps"), of_rlvr("group_sise")]
    );
    assert_eq!(edited(&[("decoder:", "encoder:")], &[]), ["model.encoder"]);
    // Invalid values are not compared with others.
    assert_eq!(
        edited(&[("prompts_per_step: 4", "prompts_per_step: 0")], &["pipeline.rlvr.mini_batches=3"]),
        [of_rlvr("prompts_per_step")]
    );
    assert_eq!(
        edited(&[("prompts_per_step: 4", "prompts_per_step: many")], &["pipeline.rlvr.mini_batches=3"]),
        [of_rlvr("prompts_per_step")]
    );
    assert_eq!(edited(&[("heads: 2", "heads: 0")], &["model.decoder.kv_heads=3"]), ["model.decoder.heads"]);
    assert_eq!(
        edited(&[("group_size: 4", "group_size: 1")], &["pipeline.rlvr.selection.mixed_groups={}"]),
        [of_rlvr("group_size")]
    );
    let schedule = "pipeline.rlvr.optimizer.schedule={wsd: {warmup_steps: 30, decay_steps: 5}}";
    assert_eq!(edited(&[], &[schedule]), [of_rlvr("optimizer.schedule.wsd.warmup_steps")]);
    // Nothing is known of a missing pipeline.
    assert_eq!(
        edited(&[("rlvr:", "rlhf:")], &["strategy.micro_batch_size=0"]),
        ["pipeline", "strategy.micro_batch_size"]
    );
}

#[test]
fn values_that_cannot_be_read_hide_nothing_else() {
    let of_rlvr = |field: &str| format!("pipeline.rlvr.{field}");
    // A missing term, one of a wrong type, one of a wrong kind, and an empty one: later terms of the list are read,
    // but not checked further.
    assert_eq!(
        edited(
            &[
                ("    steps: 20\n", ""),
                ("batch_size: 16", "batch_size: [1]"),
                ("sort: {digits: 6}", "sorting: 1")
            ],
            &["pipeline.rlvr.reward=[math, {maths: {}}, {length: {max_tokens: 0}}]", "seed=-1"]
        ),
        [
            of_rlvr("steps"),
            of_rlvr("data"),
            of_rlvr("rollout.batch_size"),
            of_rlvr("reward[0]"),
            of_rlvr("reward[1].maths"),
            of_rlvr("reward[2].length.buffer_tokens"),
            "seed".to_owned(),
        ]
    );
    // An invalid `--set`, and an invalid include.
    assert_eq!(
        edited(&[("{micro_batch_size: 8}", "{micro_batch_size: 8, include: zero9}")], &["seed", "name.x=1"]),
        ["strategy.include", "seed", "name.x"]
    );
    // A missing section.
    assert_eq!(
        edited(
            &[(
                "model:\n  decoder: {hidden_size: 16, layers: 1, heads: 2, intermediate_size: 32, max_length: 16}\n",
                ""
            )],
            &["threads=0"]
        ),
        ["model", "threads"]
    );
}

#[test]
fn what_is_opened_is_reported_with_the_rest() {
    let sets = [
        "model={path: nowhere}",
        "pipeline.rlvr.data={file: {path: nowhere.jsonl}}",
        "pipeline.rlvr.reward=[{python: {path: none.py, function: f}}, {regex: {pattern: '('}}]",
        "devices=0",
        "pipeline.rlvr.steps={data_epochs: 0}",
    ];
    assert_eq!(
        edited(&[], &sets),
        [
            "model.path",
            "pipeline.rlvr.data.file.path",
            "pipeline.rlvr.reward[0].python.path",
            "pipeline.rlvr.reward[1].regex.pattern",
            "devices",
            "pipeline.rlvr.steps.data_epochs",
        ]
    );
}

//! Solutions in labelled steps, and process reward models.

use std::fs;

use super::*;

/// A process reward model on a file with these lines.
struct Steps {
    folder: tempfile::TempDir,
    lines: Vec<String>,
}

impl Steps {
    fn new(lines: impl IntoIterator<Item = String>) -> Self {
        Self { folder: tempfile::tempdir().unwrap(), lines: lines.into_iter().collect() }
    }

    fn path(&self) -> PathBuf {
        self.folder.path().join("steps.jsonl")
    }

    fn read(&self, sets: &[&str]) -> Result<Loaded, Error> {
        fs::write(self.path(), self.lines.join("\n")).unwrap();
        let text = format!(
            "\
name: steps
backend: cpu
model:
  decoder: {{hidden_size: 16, layers: 1, heads: 2, intermediate_size: 32, max_length: 24}}
strategy: {{micro_batch_size: 8}}
pipeline:
  offline:
    data: {{file: {{path: {}, columns: {{steps: completions, step_labels: labels}}}}}}
    objective: {{prm: {{}}}}
    steps: 2
    batch_size: 4
    optimizer: {{adamw: {{learning_rate: 1.0e-3}}}}
",
            self.path().display()
        );
        read(&text, sets)
    }

    #[track_caller]
    fn refused(&self, sets: &[&str]) -> String {
        only_problem(self.read(sets).unwrap_err()).to_string()
    }
}

fn line(number: usize) -> String {
    format!(r#"{{"prompt": "{number}+1=", "completions": ["a", "bc"], "labels": [true, false]}}"#)
}

fn lines() -> Vec<String> {
    (0..40).map(line).collect()
}

#[test]
fn a_record_that_is_not_in_labelled_steps_is_named_with_its_line() {
    for (broken, words) in [
        (r#""completions": ["a", "b"], "labels": [true]"#, "`completions` has 2 items, and `labels` has 1"),
        (r#""completions": [], "labels": []"#, "`completions` is empty"),
        (r#""completions": ["a"], "labels": [1.5]"#, "`labels[0]` is 1.5, must be true, false or a number"),
        (r#""completions": ["a"]"#, "there is no column `labels`"),
    ] {
        let mut all = lines();
        all[16] = format!(r#"{{"prompt": "x", {broken}}}"#);
        let error = Steps::new(all).refused(&[]);
        assert!(error.contains("steps.jsonl:17: ") && error.contains(words), "{error}");
        assert!(error.contains("pipeline.offline.data.file.path"), "{error}");
    }
}

#[test]
fn a_solution_has_to_fit() {
    let mut all = lines();
    all[20] = format!(r#"{{"prompt": "20+1=", "completions": ["{}"], "labels": [1]}}"#, "a".repeat(30));
    let long = Steps::new(all);
    // 5 characters, 30, a separator, and the token after it.
    let error = long.refused(&[]);
    assert!(error.contains("is 37 tokens") && error.contains("model.decoder.max_length"), "{error}");
    let bound = "pipeline.offline.data.file.max_tokens=20";
    let refuse = "pipeline.offline.data.file.long_prompts=refuse";
    let error = long.refused(&[bound, refuse]);
    assert!(error.contains("line 21: the record has 36 tokens, and `max_tokens` is 20"), "{error}");
    let records = |sets: &[&str]| long.read(sets).unwrap().dataset().unwrap().examples();
    assert_eq!(records(&[bound]).len(), 39);
    // Cut after the first step, whose separator is the 7th token; the last step alone is lost then.
    let cut = |more: &[&str]| {
        let truncate = "pipeline.offline.data.file.long_prompts.truncate=keep_start";
        let sets = ["pipeline.offline.data.file.max_tokens=7", truncate];
        Steps::new((10..50).map(line)).read(&[&sets, more].concat())
    };
    let all = cut(&[]).unwrap().dataset().unwrap().examples();
    assert!(all.len() == 40 && all.iter().all(|record| record.cut.is_some()));
    let shorter = "pipeline.offline.data.file.max_tokens=6";
    assert!(cut(&[shorter]).unwrap_err().to_string().contains("there is no record in "));
    let last = "pipeline.offline.objective.prm.train_on_last_step_only=true";
    assert!(cut(&[last]).unwrap_err().to_string().contains("there is no record in "));
    let ends = "pipeline.offline.data.file.long_prompts.truncate=keep_end";
    let error = Steps::new(lines()).refused(&[bound, ends]);
    assert!(error.contains("judged by the prompt and all steps before it"), "{error}");
}

#[test]
fn steps_are_for_one_objective() {
    let steps = Steps::new(lines());
    let loaded = steps.read(&[]).unwrap();
    assert!(loaded.config.trains_a_reward_model());
    let error = steps.refused(&["pipeline.offline.objective=sft"]);
    assert!(error.contains("has labelled steps") && error.contains("objective: {prm: {}}"), "{error}");
    let sort = "pipeline.offline.data={sort: {digits: 3}}";
    let error = steps.refused(&[sort]);
    assert!(error.contains("has no labelled steps") && error.contains("steps: completions"), "{error}");
    let columns = |fields: &str| format!("pipeline.offline.data.file.columns={{{fields}}}");
    for (fields, field, words) in [
        ("steps: completions", "columns.steps", "these steps have no `step_labels`"),
        ("step_labels: labels", "columns.step_labels", "these are labels of no `steps`"),
        ("steps: completions, step_labels: labels, label: l", "columns.label", "no other labels"),
        ("steps: completions, step_labels: labels, rejected: r", "columns.rejected", "no other labels"),
        ("steps: completions, step_labels: labels, text: t", "columns.text", "no other labels"),
    ] {
        let error = only_problem(steps.read(&[&columns(fields)]).unwrap_err());
        assert!(error.field.ends_with(field) && error.message.contains(words), "{error}");
    }
    let data = format!(
        "pipeline.rlvr.data={{file: {{path: {}, columns: {{steps: completions, step_labels: labels}}}}}}",
        steps.path().display()
    );
    let error = invalid(SMALL, &[&data]);
    assert!(error.field.ends_with("columns.steps") && error.help.contains("leave it out"), "{error}");
    let error = steps.refused(&["pipeline.offline.objective.prm.step_separator="]);
    assert!(error.contains("prm.step_separator"), "{error}");
}

#[test]
fn a_reward_of_steps_needs_a_model_of_steps() {
    let path = |name: &str| std::path::absolute(format!("../tests/golden/{name}")).unwrap();
    let reward = |name: &str, fields: &str| {
        format!(
            "pipeline.rlvr.reward=[{{exact: {{}}}}, {{model: {{path: {}{fields}}}}}]",
            path(name).display()
        )
    };
    for (name, fields, field, words) in [
        ("prm", "", "model.path", "is a process reward model, which scores steps: add `per_step: min`"),
        ("reward_model", ", per_step: last", "model.path", "leave `per_step` out"),
        ("prm", ", step_separator: x", "model.step_separator", "without `per_step`"),
        ("prm", ", per_step: max", "model.per_step", "there is no `max` here"),
        ("prm", ", per_step: min, step_separator: ''", "model.step_separator", "it is empty"),
    ] {
        let error = read(SMALL, &[&reward(name, fields)]).unwrap_err();
        let Error::Invalid(all) = error else { panic!("{error}") };
        let found = all.iter().any(|error| error.field.ends_with(field) && error.message.contains(words));
        assert!(found, "{name}{fields}: {all:?}");
    }
    for fields in [", per_step: min", ", per_step: product, step_separator: '##', chat: false"] {
        let run = resolve(&[&reward("prm", fields)], &machine()).unwrap();
        assert_eq!(read(&run.to_yaml(), &[]).unwrap().resolve(&machine()).unwrap(), run);
    }
}

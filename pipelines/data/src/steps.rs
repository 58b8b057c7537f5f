//! Solutions in labelled steps, for process reward models.

use serde_json::Value;

use super::Step;

/// Reads the steps of a record from the columns `steps` and `labels`, with their names.
///
/// # Errors
/// The problem of a column.
pub(super) fn read(
    (steps_name, steps): (&str, &Value),
    (labels_name, labels): (&str, &Value),
) -> Result<Vec<Step>, String> {
    let list = |name: &str, value: &Value| match value {
        Value::Array(items) if items.is_empty() => Err(format!("`{name}` is empty: remove the record")),
        Value::Array(items) => Ok(items.clone()),
        _ => Err(format!("`{name}` is not a list")),
    };
    let (texts, labels) = (list(steps_name, steps)?, list(labels_name, labels)?);
    if texts.len() != labels.len() {
        return Err(format!(
            "`{steps_name}` has {} items, and `{labels_name}` has {}: each step needs a label",
            texts.len(),
            labels.len()
        ));
    }
    let step = |(index, (text, label)): (usize, (&Value, &Value))| {
        let text = match text {
            Value::String(text) if is_blank(text) => {
                return Err(format!(
                    "`{steps_name}[{index}]` is blank, which is no step: remove it with its label"
                ));
            }
            Value::String(text) => text.clone(),
            _ => return Err(format!("`{steps_name}[{index}]` is not a text")),
        };
        let label = label_of(label).ok_or_else(|| {
            format!("`{labels_name}[{index}]` is {label}, must be true, false or a number from 0 to 1")
        })?;
        Ok(Step { text, label })
    };
    texts.iter().zip(&labels).enumerate().map(step).collect()
}

/// A label as the probability that a step is right.
fn label_of(value: &Value) -> Option<f64> {
    match value {
        Value::Bool(label) => Some(f64::from(u8::from(*label))),
        Value::Number(number) => number.as_f64().filter(|label| (0.0..=1.0).contains(label)),
        _ => None,
    }
}

/// The steps as one text, each with the separator after it.
pub(super) fn joined(steps: &[Step], separator: &str) -> String {
    steps.iter().flat_map(|step| [&step.text, separator]).collect()
}

/// The parts of a completion between separators. A blank part is no step, but belongs to the text; one at the end
/// is left out.
pub(super) fn parts<'a>(text: &'a str, separator: &str) -> Vec<&'a str> {
    let mut parts: Vec<&str> = text.split(separator).collect();
    while parts.last().is_some_and(|last| is_blank(last)) {
        parts.pop();
    }
    parts
}

/// Returns true if a part of a text is no step.
pub(super) fn is_blank(part: &str) -> bool {
    part.trim().is_empty()
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;
    use crate::{Record, digest, distinct};

    fn read_both(steps: &Value, labels: &Value) -> Result<Vec<Step>, String> {
        read(("completions", steps), ("labels", labels))
    }

    #[test]
    fn labels_are_booleans_or_probabilities() {
        let texts = json!(["a", " b", "c\n", "d", "e"]);
        let steps = read_both(&texts, &json!([true, false, 1, 0.0, 0.25])).unwrap();
        let found: Vec<(&str, f64)> = steps.iter().map(|step| (&*step.text, step.label)).collect();
        assert_eq!(found, [("a", 1.0), (" b", 0.0), ("c\n", 1.0), ("d", 0.0), ("e", 0.25)]);
        assert_eq!(joined(&steps[..2], "##"), "a## b##");
    }

    #[test]
    fn what_is_no_list_of_labelled_steps_is_told() {
        let [one, label] = [json!(["a"]), json!([true])];
        for (steps, labels, expected) in [
            (json!([]), json!([]), "`completions` is empty"),
            (one.clone(), json!([]), "`labels` is empty"),
            (json!("a"), label.clone(), "`completions` is not a list"),
            (Value::Null, label.clone(), "`completions` is not a list"),
            (one.clone(), json!(true), "`labels` is not a list"),
            (
                json!(["a", "b"]),
                label.clone(),
                "`completions` has 2 items, and `labels` has 1: each step needs a label",
            ),
            (one.clone(), json!([true, false]), "`completions` has 1 items, and `labels` has 2:"),
            (json!([3]), label.clone(), "`completions[0]` is not a text"),
            (json!([" \n"]), label, "`completions[0]` is blank"),
            (one.clone(), json!([1.5]), "`labels[0]` is 1.5, must be true, false or a number from 0 to 1"),
            (one.clone(), json!([-1]), "`labels[0]` is -1, must be"),
            (one.clone(), json!(["+"]), "`labels[0]` is \"+\", must be"),
            (one, json!([null]), "`labels[0]` is null, must be"),
        ] {
            let error = read_both(&steps, &labels).unwrap_err();
            assert!(error.contains(expected), "{error}, not {expected}");
        }
    }

    #[test]
    fn a_completion_is_divided_at_separators() {
        for (text, expected) in [
            ("a", &["a"][..]),
            ("a\nb\n", &["a", "b"]),
            ("a\n\n b", &["a", "", " b"]),
            ("\na\n \n", &["", "a"]),
            ("", &[]),
            (" \n\n", &[]),
        ] {
            assert_eq!(parts(text, "\n"), expected, "{text:?}");
        }
        assert_eq!(parts("a\n##b##", "##"), ["a\n", "b"]);
    }

    #[test]
    fn a_prompt_may_have_several_solutions_in_steps() {
        let step = |text: &str, label: f64| Step { text: text.to_owned(), label };
        let solution = |steps: Vec<Step>| Record {
            prompt: "1+1".to_owned(),
            answer: joined(&steps, "|"),
            steps,
            ..Record::default()
        };
        let right = solution(vec![step("2", 1.0)]);
        let wrong = solution(vec![step("3", 0.0)]);
        let held_out = distinct(vec![right.clone(), wrong.clone(), right.clone()]);
        assert_eq!(held_out, [right.clone(), wrong]);
        let mislabelled = Record { steps: vec![step("2", 0.5)], ..right.clone() };
        assert_ne!(digest(&[right]), digest(&[mislabelled]));
    }
}

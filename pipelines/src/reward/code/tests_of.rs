//! The tests of a programming task, as records have them.

use serde::Deserialize;

/// At least one test.
#[derive(Debug, PartialEq)]
pub(super) struct Tests(pub(super) Vec<Expected>);

/// A test.
#[derive(Debug, PartialEq)]
pub(super) enum Expected {
    /// What is to be written for an input.
    Output { input: String, output: String },
    /// Lines of Python that must not raise.
    Asserts(String),
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct Answer {
    #[serde(default)]
    inputs: Vec<String>,
    #[serde(default)]
    outputs: Vec<String>,
    #[serde(default)]
    asserts: Vec<String>,
}

impl Tests {
    /// From a record's answer.
    pub(super) fn read(answer: &str) -> Result<Self, String> {
        const FORM: &str =
            "write {\"inputs\": [\"1 2\"], \"outputs\": [\"3\"]} or {\"asserts\": [\"assert f(1) == 2\"]}";
        let Answer { inputs, outputs, asserts } = serde_json::from_str(answer)
            .map_err(|error| format!("its answer has no tests: {error}; {FORM}"))?;
        if inputs.len() != outputs.len() {
            return Err(format!("its answer has {} inputs and {} outputs", inputs.len(), outputs.len()));
        }
        let pairs = inputs.into_iter().zip(outputs);
        let tests = pairs.map(|(input, output)| Expected::Output { input, output });
        let tests: Vec<Expected> = tests.chain(asserts.into_iter().map(Expected::Asserts)).collect();
        match tests.is_empty() {
            true => Err(format!("its answer has no tests; {FORM}")),
            false => Ok(Self(tests)),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn tests_are_read_and_malformed_ones_refused() {
        let tests =
            Tests::read(r#"{"inputs": ["1"], "outputs": ["2"], "asserts": ["assert f(1)"]}"#).unwrap();
        let output = Expected::Output { input: "1".into(), output: "2".into() };
        assert_eq!(tests.0, [output, Expected::Asserts("assert f(1)".into())]);
        for (answer, words) in [
            ("7", "no tests"),
            ("{}", "no tests; write"),
            (r#"{"inputs": ["1"]}"#, "1 inputs and 0 outputs"),
            (r#"{"input": ["1"]}"#, "unknown field `input`"),
        ] {
            assert!(Tests::read(answer).unwrap_err().contains(words), "{answer}");
        }
    }
}

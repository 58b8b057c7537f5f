//! The tests of a programming task, as records have them.

use anyroll_data::Record;
use serde::Deserialize;
use serde_json::{Map, Value};

/// At least one test.
#[derive(Debug, PartialEq)]
pub(super) struct Tests(pub(super) Vec<Expected>);

/// A test.
#[derive(Debug, PartialEq)]
pub(super) enum Expected {
    /// Expected output for an input.
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

/// One of ROLL's `test_cases`.
#[derive(Deserialize)]
struct Case {
    stdin: Option<String>,
    expected_stdout: Option<String>,
    assert_code: Option<String>,
    #[serde(default)]
    import_prefix: String,
    entry_point: Option<String>,
}

impl Tests {
    /// From a record's columns, if it has ROLL's, and else from its answer.
    pub(super) fn of(record: &Record) -> Result<Self, String> {
        let of_roll = match record.columns.get("test_cases") {
            None | Some(Value::Null) => None,
            // A file without nested columns has them as a text.
            Some(Value::String(text)) if text.is_empty() => None,
            Some(Value::String(text)) => Some(serde_json::from_str(text)),
            Some(cases) => Some(serde_json::from_value(cases.clone())),
        };
        match of_roll {
            None => Self::read(&record.answer),
            Some(Ok(cases)) => Self::of_cases(cases, &record.columns),
            Some(Err(error)) => Err(format!("its `test_cases` are none of ROLL's: {error}")),
        }
    }

    /// From ROLL's `test_cases`, whose form is in `case_type`.
    fn of_cases(cases: Vec<Case>, columns: &Map<String, Value>) -> Result<Self, String> {
        let text = |name: &str| columns.get(name).and_then(Value::as_str).unwrap_or_default().trim();
        let kind = text("case_type");
        let lacks =
            |what: &str| format!("one of its `test_cases`, of the `case_type` {kind}, has no `{what}`");
        let tests: Result<Vec<Expected>, String> = match kind {
            "assert" | "pytest" => {
                let asserts =
                    cases.into_iter().map(|case| case.assert_code.ok_or_else(|| lacks("assert_code")));
                asserts.map(|asserts| asserts.map(Expected::Asserts)).collect()
            }
            // ROLL reads the first of them, which defines `check`.
            "check_based" => {
                let check = |Case { import_prefix, assert_code, entry_point, .. }: Case| {
                    let asserts = assert_code.ok_or_else(|| lacks("assert_code"))?;
                    let function = entry_point.ok_or_else(|| lacks("entry_point"))?;
                    Ok(Expected::Asserts(format!("{import_prefix}\n{asserts}\ncheck({function})\n")))
                };
                cases.into_iter().take(1).map(check).collect()
            }
            "text" => {
                Err("its `case_type` is text: `code` runs programs, and has no test of other texts".into())
            }
            _ if !["", "None"].contains(&text("test_case_function")) => {
                Err("its `test_case_function` is called with lines of input: write asserts that call it"
                    .into())
            }
            _ => {
                let pair = |case: Case| {
                    let input = case.stdin.ok_or_else(|| lacks("stdin"))?;
                    Ok(Expected::Output {
                        input,
                        output: case.expected_stdout.ok_or_else(|| lacks("expected_stdout"))?,
                    })
                };
                cases.into_iter().map(pair).collect()
            }
        };
        match tests? {
            tests if tests.is_empty() => Err("its `test_cases` are empty".into()),
            tests => Ok(Self(tests)),
        }
    }

    /// From a record's answer.
    fn read(answer: &str) -> Result<Self, String> {
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
    use serde_json::json;

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

    #[test]
    fn tests_stand_in_columns_of_rolls() {
        let of = |kind: &str, cases: Value| {
            let columns = json!({"case_type": kind, "test_cases": cases, "test_case_function": " "});
            let columns = columns.as_object().unwrap().clone();
            Tests::of(&Record { columns, answer: r#"{"asserts": ["assert 1"]}"#.into(), ..Record::default() })
        };
        let asserts = |text: &str| Tests(vec![Expected::Asserts(text.into())]);
        let cases = json!([{"assert_code": "def test_one():\n    assert f(1) == 2\n"}]);
        assert_eq!(of("pytest", cases.clone()).unwrap(), asserts("def test_one():\n    assert f(1) == 2\n"));
        assert_eq!(of("assert", cases.to_string().into()).unwrap().0.len(), 1);
        let check = json!([{"assert_code": "def check(c):\n    assert c(1) == 2", "entry_point": "f", "import_prefix": "import math"}]);
        let expected = "import math\ndef check(c):\n    assert c(1) == 2\ncheck(f)\n";
        assert_eq!(of("check_based", check).unwrap(), asserts(expected));
        let pairs = json!([{"stdin": "1 2", "expected_stdout": "3"}]);
        let output = Expected::Output { input: "1 2".into(), output: "3".into() };
        assert_eq!(of("io", pairs.clone()).unwrap().0, [output]);
        // Records of a mix have all columns, empty where they are of another domain.
        assert_eq!(of("", "".into()).unwrap(), asserts("assert 1"));
        for (kind, cases, words) in [
            ("text", json!([{"assert_code": "assert '{response}'"}]), "no test of other texts"),
            ("assert", pairs, "of the `case_type` assert, has no `assert_code`"),
            ("io", cases, "has no `stdin`"),
            ("io", json!([]), "are empty"),
            ("io", "[{".into(), "none of ROLL's"),
        ] {
            let why = of(kind, cases).unwrap_err();
            assert!(why.contains(words), "{why}");
        }
    }
}

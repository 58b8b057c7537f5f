//! Output formats of requests: OpenAI's `response_format`, and parts of vLLM's `structured_outputs`.

use anyroll_pipelines::inference::Spec;
use serde_json::{Map, Value};

use super::fields::{Fields, must_be};

/// Limit of texts to choose from.
const MOST_TEXTS: usize = 10_000;

/// Format of a request with the field that has it, if one has.
pub(super) fn format(fields: &mut Fields) -> Result<Option<(&'static str, Spec)>, String> {
    const OURS: &str = "structured_outputs";
    const OPENAIS: &str = "response_format";
    let mut asked = Vec::new();
    for (field, read) in [(OPENAIS, response_format as Read), (OURS, structured_outputs)] {
        let value: Option<Map<String, Value>> = fields.take(field, "an object")?;
        let Some(value) = value else { continue };
        let spec = read(Fields(value)).map_err(|problem| format!("`{field}`: {problem}"))?;
        asked.extend(spec.map(|spec| (field, spec)));
    }
    if asked.len() > 1 {
        return Err(format!("`{OURS}` and `{OPENAIS}` are alternatives: leave one out"));
    }
    Ok(asked.pop())
}

type Read = fn(Fields) -> Result<Option<Spec>, String>;

fn response_format(mut fields: Fields) -> Result<Option<Spec>, String> {
    let kinds = "`text`, `json_object` or `json_schema`";
    let kind: Option<String> = fields.take("type", kinds)?;
    let spec = match kind.as_deref() {
        Some("text") => None,
        Some("json_object") => Some(Spec::json_object()),
        Some("json_schema") => {
            let expected = "an object with a `schema`";
            let described: Option<Map<String, Value>> = fields.take("json_schema", expected)?;
            let mut described = Fields(described.ok_or_else(|| must_be("json_schema", expected))?);
            let schema: Option<Value> = described.take("schema", "a JSON schema")?;
            // Labels, and whether the schema is strict: here it always is.
            for field in ["name", "description", "strict"] {
                described.0.remove(field);
            }
            described.finish()?;
            Some(Spec::Json(schema.ok_or("`json_schema` has no `schema`")?))
        }
        _ => return Err(must_be("type", kinds)),
    };
    fields.finish().map(|()| spec)
}

fn structured_outputs(mut fields: Fields) -> Result<Option<Spec>, String> {
    let json: Option<Value> = fields.take("json", "a JSON schema")?;
    let regex: Option<String> = fields.take("regex", "a pattern")?;
    let choice: Option<Vec<String>> = fields.take("choice", "a list of texts")?;
    fields.finish()?;
    match (json, regex, choice) {
        (Some(schema), None, None) => Ok(Some(Spec::Json(schema))),
        (None, Some(pattern), None) => Ok(Some(Spec::Regex(pattern))),
        (None, None, Some(texts)) if texts.len() > MOST_TEXTS => {
            Err(format!("`choice` has {} texts, must have at most {MOST_TEXTS}", texts.len()))
        }
        (None, None, Some(texts)) if !texts.is_empty() => Ok(Some(Spec::Choice(texts))),
        _ => Err("give one of `json`, `regex` and `choice`".to_owned()),
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::{super::fields::tests::fields, *};

    #[test]
    fn texts_to_choose_from_are_counted() {
        let choice =
            |count: usize| format(&mut fields(json!({"structured_outputs": {"choice": vec!["a"; count]}})));
        assert!(matches!(choice(MOST_TEXTS), Ok(Some(("structured_outputs", Spec::Choice(_))))));
        let told = "`structured_outputs`: `choice` has 100000 texts, must have at most 10000";
        assert_eq!(choice(100_000).unwrap_err(), told);
        assert!(choice(0).unwrap_err().contains("one of"));
    }
}

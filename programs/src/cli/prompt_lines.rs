//! Lines of `generate --file`: where their prompts and answers are, and what their completions carry.

use std::fmt;

use anyroll_config::NamedColumns;
use anyroll_data::find;
use serde::{
    Deserialize, Deserializer,
    de::{Error as _, MapAccess, Visitor},
};
use serde_json::{Map, Value};

use super::columns::Columns;

/// Fields of a completion, which a line cannot have.
const OF_A_COMPLETION: [&str; 7] =
    ["line", "sample", "completion", "finished", "tokens", "ending", "logprob"];

/// Settings of a line that are numbers.
pub(super) const NUMBERS: [&str; 6] =
    ["temperature", "top_k", "top_p", "min_p", "repetition_penalty", "max_new_tokens"];

/// Fields of a line, each given once.
#[derive(Debug)]
pub(super) struct Fields(Map<String, Value>);

impl Fields {
    /// The fields with those of `columns` under the names `prompt` and `answer`. A column that is a path stays too.
    pub fn with(self, columns: Option<&Columns>) -> Result<Map<String, Value>, String> {
        let mut fields = self.0;
        if let Some(field) = OF_A_COMPLETION.iter().find(|field| fields.contains_key(**field)) {
            return Err(format!("`{field}` is a field of its completions: give it another name"));
        }
        let Some(Columns(columns)) = columns else { return Ok(fields) };
        let NamedColumns { prompt, answer, .. } = columns.named();
        for (name, column) in [("prompt", Some(&prompt)), ("answer", answer.as_ref())] {
            let Some(column) = column.filter(|column| *column != name) else { continue };
            if fields.contains_key(name) {
                return Err(format!("it has `{name}` too, and `--columns` says {name}={column}"));
            }
            let value = fields.shift_remove(column).or_else(|| find(&fields, column).cloned());
            let Some(value) = value else {
                let known = fields.keys().map(|key| format!("`{key}`")).collect::<Vec<_>>().join(", ");
                return Err(format!("there is no column `{column}`, only {known}: see `--columns`"));
            };
            fields.insert(name.to_owned(), value);
        }
        Ok(fields)
    }
}

/// The fields of a line that its completions carry: all but its settings.
pub(super) fn to_pass_on(mut fields: Map<String, Value>) -> Map<String, Value> {
    fields.retain(|field, _| !NUMBERS.contains(&field.as_str()) && field != "stop");
    fields
}

impl<'de> Deserialize<'de> for Fields {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        struct FieldsVisitor;

        impl<'de> Visitor<'de> for FieldsVisitor {
            type Value = Fields;

            fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str("an object")
            }

            fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> Result<Fields, A::Error> {
                let mut fields = Map::new();
                while let Some((field, value)) = map.next_entry::<String, Value>()? {
                    if fields.contains_key(&field) {
                        return Err(A::Error::custom(format!("duplicate field `{field}`")));
                    }
                    fields.insert(field, value);
                }
                Ok(Fields(fields))
            }
        }

        deserializer.deserialize_map(FieldsVisitor)
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    fn with(fields: Value, columns: &str) -> Result<Value, String> {
        let Value::Object(fields) = fields else { panic!("no object: {fields}") };
        Fields(fields).with(Some(&columns.parse().unwrap())).map(Value::Object)
    }

    #[test]
    fn columns_are_those_of_a_config() {
        let line = json!({"question": "1+1", "gold": 2, "level": 3});
        let expected = json!({"prompt": "1+1", "answer": 2, "level": 3});
        assert_eq!(with(line.clone(), "prompt=question,answer=gold"), Ok(expected));
        let of_verl = json!({"prompt": "1", "reward_model": {"ground_truth": "2"}, "data_source": "a"});
        assert_eq!(with(of_verl, "verl").unwrap()["answer"], "2");
        for (columns, expected) in [
            ("prompt=q", "there is no column `q`, only `question`, `gold`, `level`"),
            ("answer=gold,prompt=level", ""),
        ] {
            let found = with(line.clone(), columns);
            assert!(found.clone().err().unwrap_or_default().starts_with(expected), "{found:?}");
        }
        assert!(
            with(json!({"prompt": "a", "question": "b"}), "prompt=question")
                .unwrap_err()
                .contains("`prompt` too")
        );
        assert!(
            with(json!({"question": "b", "tokens": 1}), "prompt=question").unwrap_err().contains("`tokens`")
        );
    }
}

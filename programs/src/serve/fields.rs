//! Fields of a request, taken one by one, so that each is read or refused by name.

use std::ops::RangeInclusive;

use serde::de::DeserializeOwned;
use serde_json::{Map, Value};

/// Fields that were not read yet.
#[derive(Debug)]
pub(super) struct Fields(pub Map<String, Value>);

/// Fields without effect if they have one of these JSON values; an empty list allows any value.
const IDLE: [(&str, &[&str]); 16] = [
    ("user", &[]),
    ("metadata", &[]),
    ("safety_identifier", &[]),
    ("prompt_cache_key", &[]),
    ("frequency_penalty", &["0", "0.0"]),
    ("presence_penalty", &["0", "0.0"]),
    ("logit_bias", &["{}"]),
    ("best_of", &["1"]),
    ("echo", &["false"]),
    ("suffix", &["\"\""]),
    ("store", &["false"]),
    ("service_tier", &["\"auto\"", "\"default\""]),
    ("modalities", &["[\"text\"]"]),
    ("tool_choice", &["\"auto\"", "\"none\""]),
    ("parallel_tool_calls", &["true", "false"]),
    ("include_obfuscation", &["false"]),
];

impl Fields {
    /// Value of a field; `null` counts as missing. `expected` describes a valid value.
    pub fn take<T: DeserializeOwned>(&mut self, field: &str, expected: &str) -> Result<Option<T>, String> {
        let value = self.0.remove(field).unwrap_or_default();
        serde_json::from_value(value).map_err(|_| must_be(field, expected))
    }

    /// A boolean field, false if missing.
    pub fn flag(&mut self, field: &str) -> Result<bool, String> {
        Ok(self.take(field, "true or false")?.unwrap_or(false))
    }

    /// A number, possibly with a fraction.
    pub fn number(&mut self, field: &str) -> Result<Option<f64>, String> {
        self.take(field, "a number")
    }

    /// An integer.
    pub fn count(&mut self, field: &str, range: RangeInclusive<u64>) -> Result<Option<u64>, String> {
        let expected = match (range.start(), range.end()) {
            (least, &u64::MAX) => format!("an integer of at least {least}"),
            (least, most) => format!("an integer from {least} to {most}"),
        };
        let number: Option<u64> = self.take(field, &expected)?;
        match number.is_none_or(|number| range.contains(&number)) {
            true => Ok(number),
            false => Err(must_be(field, &expected)),
        }
    }

    /// Refuses remaining fields, which would be ignored, unless their values have no effect.
    pub fn finish(self) -> Result<(), String> {
        for (field, value) in self.0.iter().filter(|(_, value)| !value.is_null()) {
            match IDLE.iter().find(|(name, _)| name == field) {
                None => return Err(format!("`{field}` is not supported: leave it out")),
                Some((_, values)) if values.is_empty() || values.contains(&value.to_string().as_str()) => {}
                Some((_, values)) => {
                    return Err(must_be(field, &format!("{}, or left out", values.join(" or "))));
                }
            }
        }
        Ok(())
    }
}

/// Error for an invalid value.
pub(super) fn must_be(field: &str, expected: &str) -> String {
    format!("`{field}` must be {expected}")
}

#[cfg(test)]
pub(super) mod tests {
    use serde_json::json;

    use super::*;

    pub(crate) fn fields(body: Value) -> Fields {
        let Value::Object(fields) = body else { panic!("no object: {body}") };
        Fields(fields)
    }

    #[test]
    fn whole_numbers_are_within_their_range_or_refused_by_name() {
        let count = |value: Value| fields(json!({"n": value})).count("n", 1..=128);
        assert_eq!(count(json!(1)), Ok(Some(1)));
        assert_eq!(count(json!(128)), Ok(Some(128)));
        assert_eq!(count(Value::Null), Ok(None));
        assert_eq!(fields(json!({})).count("n", 1..=128), Ok(None));
        for wrong in [json!(0), json!(129), json!(-1), json!(u64::MAX), json!(1.5), json!("1"), json!([1])] {
            let expected = "`n` must be an integer from 1 to 128";
            assert_eq!(count(wrong.clone()), Err(expected.to_owned()), "{wrong}");
        }
        let negative = fields(json!({"seed": -1})).count("seed", 0..=u64::MAX);
        assert_eq!(negative, Err("`seed` must be an integer of at least 0".to_owned()));
    }

    #[test]
    fn what_asks_for_nothing_is_accepted_and_all_else_refused_by_name() {
        for idle in [
            json!({"anything": null, "logit_bias": null, "presence_penalty": 0, "frequency_penalty": 0.0}),
            json!({"logit_bias": {}, "best_of": 1, "store": false}),
            json!({"tool_choice": "auto", "parallel_tool_calls": true, "user": "me"}),
        ] {
            assert_eq!(fields(idle.clone()).finish(), Ok(()), "{idle}");
        }
        for (asks, expected) in [
            (json!({"best_of": 2}), "`best_of` must be 1, or left out"),
            (json!({"presence_penalty": 0.5}), "`presence_penalty` must be 0 or 0.0, or left out"),
            (json!({"logit_bias": {"5": 1}}), "`logit_bias` must be {}, or left out"),
            (json!({"mirostat": 1}), "`mirostat` is not supported: leave it out"),
        ] {
            assert_eq!(fields(asks.clone()).finish(), Err(expected.to_owned()), "{asks}");
        }
    }
}

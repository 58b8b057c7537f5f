//! The option `--columns`: names of a file's columns.

use std::str::FromStr;

use anyroll_config::{ColumnsConfig, NamedColumns};
use serde::{
    Deserialize,
    de::{IntoDeserializer, value::Error as ValueError},
};
use serde_json::{Map, Value};

/// Columns as a config's `columns` has them: a system's name, or names of parts.
#[derive(Clone, Debug, PartialEq)]
pub(super) struct Columns(pub ColumnsConfig);

impl Columns {
    /// Parses columns of prompts to complete, which have no parts that only training reads.
    pub fn of_prompts(text: &str) -> Result<Self, String> {
        let columns: Self = text.parse()?;
        let NamedColumns { rejected, label, reward, text, steps, step_labels, .. } = columns.0.named();
        match [rejected, label, reward, text, steps, step_labels].iter().all(Option::is_none) {
            true => Ok(columns),
            false => Err("prompts to complete have the parts prompt, answer and domain".to_owned()),
        }
    }
}

impl FromStr for Columns {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        if !text.contains('=') {
            let system = IntoDeserializer::<ValueError>::into_deserializer(text);
            let help = || "write prompt=NAME,answer=NAME, or roll, verl, trl or openrlhf".to_owned();
            return ColumnsConfig::deserialize(system).map(Self).map_err(|_| help());
        }
        let mut parts = Map::new();
        for pair in text.split(',') {
            let (part, name) = pair.split_once('=').unwrap_or((pair, ""));
            let (part, name) = (part.trim(), name.trim());
            if name.is_empty() || parts.insert(part.to_owned(), name.into()).is_some() {
                return Err(format!("give `{part}` one column, as in {part}=NAME"));
            }
        }
        let columns = serde_json::from_value(Value::Object(parts)).map_err(|error| error.to_string())?;
        Ok(Self(ColumnsConfig::Named(columns)))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn columns_are_a_systems_name_or_pairs() {
        assert_eq!("verl".parse(), Ok(Columns(ColumnsConfig::Verl)));
        let expected = NamedColumns {
            prompt: "question".into(),
            answer: Some("gold".into()),
            domain: None,
            ..NamedColumns::default()
        };
        assert_eq!("prompt=question, answer=gold".parse(), Ok(Columns(ColumnsConfig::Named(expected))));
        for (wrong, expected) in [
            ("question", "write prompt=NAME,answer=NAME, or roll"),
            ("prompt=", "give `prompt` one column"),
            ("prompt=a,prompt=b", "give `prompt` one column"),
            ("prompts=a", "unknown field `prompts`, expected one of `prompt`"),
            ("prompt=a,b", "give `b` one column"),
        ] {
            let error = wrong.parse::<Columns>().unwrap_err();
            assert!(error.contains(expected), "{error}, not {expected}");
        }
        assert!("answer=a,rejected=b".parse::<Columns>().is_ok());
        assert!(
            Columns::of_prompts("answer=a,rejected=b").unwrap_err().contains("prompt, answer and domain")
        );
        assert_eq!(Columns::of_prompts("roll"), Ok(Columns(ColumnsConfig::Roll)));
    }
}

//! The filter `tojson` of chat templates: Python's `json.dumps`.

use minijinja::value::{Kwargs, Rest, ValueKind};
use minijinja::{Error, Value};

use super::bounds::{Text, error, float};

/// Deepest nesting of a value, as Python's own limit.
const MAX_DEPTH: usize = 200;

/// Options of `json.dumps` that the filter has.
struct Format {
    ascii: bool,
    indent: Option<String>,
    /// Texts between items, and between a key and its value.
    separators: (String, String),
    sort_keys: bool,
}

/// Writes a value as JSON. `positional` arguments have the order of transformers' filter: `ensure_ascii`, `indent`,
/// `separators` and `sort_keys`.
pub(super) fn to_json(value: &Value, positional: Rest<Value>, named: Kwargs) -> Result<String, Error> {
    let option = |place: usize, name: &str| -> Result<Value, Error> {
        let named: Option<Value> = named.get(name)?;
        Ok(named.or_else(|| positional.get(place).cloned()).unwrap_or_default())
    };
    let indent = match option(1, "indent")? {
        none if none.is_none() || none.is_undefined() => None,
        text if text.as_str().is_some() => text.as_str().map(str::to_owned),
        number => {
            let width = if number.is_true() && number.as_i64().is_none() { Some(1) } else { number.as_i64() };
            let width = width.ok_or_else(|| error("`indent` of tojson is neither a number nor a text"))?;
            let width = usize::try_from(width).unwrap_or(0);
            if width > 1000 {
                return Err(error("`indent` of tojson is more than 1000"));
            }
            Some(" ".repeat(width))
        }
    };
    let separators = option(2, "separators")?;
    let separators = if separators.is_none() || separators.is_undefined() {
        (if indent.is_some() { "," } else { ", " }.to_owned(), ": ".to_owned())
    } else {
        let pair: Vec<Value> = separators.try_iter()?.collect();
        match &pair[..] {
            [item, key] if item.as_str().is_some() && key.as_str().is_some() => {
                (item.to_string(), key.to_string())
            }
            _ => return Err(error("`separators` of tojson are not two texts")),
        }
    };
    let (ascii, sort_keys) = (option(0, "ensure_ascii")?.is_true(), option(3, "sort_keys")?.is_true());
    named.assert_all_used()?;
    let format = Format { ascii, indent, separators, sort_keys };
    let mut text = Text::default();
    format.write(&mut text, value, 0)?;
    text.finish()
}

impl Format {
    fn write(&self, text: &mut Text, value: &Value, depth: usize) -> Result<(), Error> {
        if depth > MAX_DEPTH {
            return Err(error(format!("tojson has a value nested more than {MAX_DEPTH} deep")));
        }
        match value.kind() {
            ValueKind::None | ValueKind::Bool | ValueKind::Number => text.push(&scalar(value)?),
            ValueKind::String => self.string(text, value.as_str().unwrap_or_default()),
            ValueKind::Seq | ValueKind::Iterable => {
                let items = value.try_iter()?.map(|item| (None, item));
                self.items(text, ["[", "]"], items, depth)
            }
            ValueKind::Map => {
                let mut keys = Vec::new();
                for key in value.try_iter()? {
                    if key.as_str().is_none() && self.sort_keys {
                        return Err(error("tojson sorts only keys that are texts"));
                    }
                    keys.push(key);
                }
                if self.sort_keys {
                    keys.sort_by(|a, b| a.as_str().cmp(&b.as_str()));
                }
                let items = keys.into_iter().map(|key| {
                    let item = value.get_item(&key).unwrap_or_default();
                    (Some(key), item)
                });
                self.items(text, ["{", "}"], items, depth)
            }
            kind => Err(error(format!("tojson cannot write a value of the type {kind}"))),
        }
    }

    /// Items of a list, or with a key each those of an object.
    fn items(
        &self,
        text: &mut Text,
        [open, close]: [&str; 2],
        items: impl Iterator<Item = (Option<Value>, Value)>,
        depth: usize,
    ) -> Result<(), Error> {
        text.push(open)?;
        let mut is_empty = true;
        for (key, item) in items {
            if !std::mem::take(&mut is_empty) {
                text.push(&self.separators.0)?;
            }
            self.line(text, depth + 1)?;
            if let Some(key) = key {
                match key.as_str() {
                    Some(key) => self.string(text, key)?,
                    None => self.string(text, &scalar(&key)?)?,
                }
                text.push(&self.separators.1)?;
            }
            self.write(text, &item, depth + 1)?;
        }
        if !is_empty {
            self.line(text, depth)?;
        }
        text.push(close)
    }

    /// A new line with its indent, if there is one.
    fn line(&self, text: &mut Text, depth: usize) -> Result<(), Error> {
        let Some(indent) = &self.indent else { return Ok(()) };
        text.push("\n")?;
        (0..depth).try_for_each(|_| text.push(indent))
    }

    fn string(&self, text: &mut Text, value: &str) -> Result<(), Error> {
        text.push("\"")?;
        let mut start = 0;
        for (at, char) in value.char_indices() {
            let escaped = match char {
                '"' => "\\\"".to_owned(),
                '\\' => "\\\\".to_owned(),
                '\n' => "\\n".to_owned(),
                '\r' => "\\r".to_owned(),
                '\t' => "\\t".to_owned(),
                '\u{8}' => "\\b".to_owned(),
                '\u{c}' => "\\f".to_owned(),
                '\0'..='\u{1f}' => format!("\\u{:04x}", u32::from(char)),
                ' '..='~' => continue,
                _ if !self.ascii => continue,
                _ => char.encode_utf16(&mut [0; 2]).iter().map(|unit| format!("\\u{unit:04x}")).collect(),
            };
            text.push(&value[start..at])?;
            text.push(&escaped)?;
            start = at + char.len_utf8();
        }
        text.push(&value[start..])?;
        text.push("\"")
    }
}

/// JSON of a value without parts.
fn scalar(value: &Value) -> Result<String, Error> {
    Ok(match value.kind() {
        ValueKind::None => "null".to_owned(),
        ValueKind::Bool => value.is_true().to_string(),
        ValueKind::Number if value.is_integer() => value.to_string(),
        ValueKind::Number => match f64::try_from(value.clone())? {
            number if number.is_nan() => "NaN".to_owned(),
            number if number.is_infinite() => if number > 0.0 { "Infinity" } else { "-Infinity" }.to_owned(),
            number => float(number),
        },
        kind => return Err(error(format!("tojson cannot write a key of the type {kind}"))),
    })
}

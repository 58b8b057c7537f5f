//! Methods of Python's `str`, `list` and `dict` that a template may call.

use minijinja::value::{Kwargs, Rest, ValueKind, from_args};
use minijinja::{Error, State, Value};
use minijinja_contrib::pycompat;

use super::bounds::{Text, checked, error};
use super::operators::{formatted, slice};

/// Calls a method; names unknown here are those of minijinja.
pub(super) fn call(state: &mut State, value: &Value, method: &str, args: &[Value]) -> Result<Value, Error> {
    let result = match (value.kind(), method) {
        (ValueKind::String, _) => of_text(value.as_str().unwrap_or_default(), method, args)?,
        (ValueKind::Map | ValueKind::Seq | ValueKind::Iterable, "copy") => Some(value.clone()),
        (ValueKind::Seq | ValueKind::Iterable, "count" | "index") => Some(of_list(value, method, args)?),
        _ => None,
    };
    match result {
        Some(result) => checked(result),
        None => pycompat::unknown_method_callback(state, value, method, args),
    }
}

fn of_list(value: &Value, method: &str, args: &[Value]) -> Result<Value, Error> {
    let (wanted,): (&Value,) = from_args(args)?;
    let mut places = value.try_iter()?.enumerate().filter(|(_, item)| item == wanted);
    if method == "count" {
        return Ok(Value::from(places.count()));
    }
    let found = places.next().map(|(index, _)| Value::from(index));
    found.ok_or_else(|| error(format!("{wanted:?} is not in the list")))
}

/// Arguments of a method by place or name.
struct Arguments {
    method: String,
    places: Vec<Value>,
    names: Kwargs,
}

impl Arguments {
    fn of(method: &str, args: &[Value]) -> Result<Self, Error> {
        let (places, names): (Rest<Value>, Kwargs) = from_args(args)?;
        Ok(Arguments { method: method.to_owned(), places: places.to_vec(), names })
    }

    /// The argument at a place, if it is there and not none.
    fn value(&self, place: usize, name: &str) -> Result<Option<Value>, Error> {
        let named = if name.is_empty() { None } else { self.names.get::<Option<Value>>(name)? };
        Ok(named.or_else(|| self.places.get(place).cloned()).filter(|value| !value.is_none()))
    }

    fn text(&self, place: usize, name: &str) -> Result<Option<String>, Error> {
        let Some(value) = self.value(place, name)? else { return Ok(None) };
        let text = value.as_str().map(str::to_owned);
        text.map(Some).ok_or_else(|| error(format!("`{}` needs a text, not {}", self.method, value.kind())))
    }

    fn required(&self, place: usize) -> Result<String, Error> {
        self.text(place, "")?.ok_or_else(|| error(format!("`{}` lacks an argument", self.method)))
    }

    fn number(&self, place: usize, name: &str) -> Result<Option<i64>, Error> {
        let Some(value) = self.value(place, name)? else { return Ok(None) };
        let number = value.as_i64();
        number
            .map(Some)
            .ok_or_else(|| error(format!("`{}` needs an integer, not {}", self.method, value.kind())))
    }

    /// Ends the reading of arguments, at most `most` of them by place.
    fn end(&self, most: usize) -> Result<(), Error> {
        if self.places.len() > most {
            return Err(error(format!("`{}` has more than {most} arguments", self.method)));
        }
        self.names.assert_all_used()
    }
}

/// White space of Python's `str.isspace`.
pub(super) fn is_space(char: char) -> bool {
    char.is_whitespace() || ('\u{1c}'..='\u{1f}').contains(&char)
}

fn is_line_end(char: char) -> bool {
    matches!(char, '\n' | '\r' | '\u{b}' | '\u{c}' | '\u{1c}'..='\u{1e}' | '\u{85}' | '\u{2028}' | '\u{2029}')
}

/// Result of a method of `str`; `None` if there is no such method.
fn of_text(text: &str, method: &str, args: &[Value]) -> Result<Option<Value>, Error> {
    if method == "format" {
        return formatted(text, args).map(|text| Some(Value::from(text)));
    }
    let arguments = Arguments::of(method, args)?;
    let arguments = &arguments;
    if let Some(answer) = is(text, method) {
        arguments.end(0)?;
        return Ok(Some(Value::from(answer)));
    }
    if let Some(text) = with_case(text, method) {
        arguments.end(0)?;
        return Ok(Some(Value::from(text)));
    }
    Ok(Some(match method {
        "strip" | "lstrip" | "rstrip" => Value::from(stripped(text, method, arguments)?),
        "split" | "rsplit" => split(text, method == "rsplit", arguments)?,
        "splitlines" => {
            let keeps = arguments.value(0, "keepends")?.is_some_and(|value| value.is_true());
            arguments.end(1)?;
            Value::from(lines(text, keeps))
        }
        "partition" | "rpartition" => partition(text, method == "rpartition", arguments)?,
        "startswith" | "endswith" => Value::from(has_end(text, method == "startswith", arguments)?),
        "find" | "rfind" | "index" | "rindex" | "count" => found(text, method, arguments)?,
        "removeprefix" => {
            let prefix = arguments.required(0)?;
            arguments.end(1)?;
            Value::from(text.strip_prefix(&*prefix).unwrap_or(text))
        }
        "removesuffix" => {
            let suffix = arguments.required(0)?;
            arguments.end(1)?;
            Value::from(text.strip_suffix(&*suffix).unwrap_or(text))
        }
        "replace" => {
            let (old, new) = (arguments.required(0)?, arguments.required(1)?);
            let count = arguments.number(2, "count")?.unwrap_or(-1);
            arguments.end(3)?;
            Value::from(replaced(text, &old, &new, usize::try_from(count).unwrap_or(usize::MAX))?)
        }
        "join" => {
            let parts = arguments.value(0, "")?.ok_or_else(|| error("`join` lacks an argument"))?;
            arguments.end(1)?;
            let mut all = Text::default();
            for (index, part) in parts.try_iter()?.enumerate() {
                all.push(if index == 0 { "" } else { text })?;
                all.push(part.as_str().ok_or_else(|| {
                    error(format!("`join` needs texts, and item {index} is of the type {}", part.kind()))
                })?)?;
            }
            Value::from(all.finish()?)
        }
        "center" | "ljust" | "rjust" | "zfill" => Value::from(padded(text, method, arguments)?),
        "expandtabs" => {
            let size = arguments.number(0, "tabsize")?.unwrap_or(8);
            arguments.end(1)?;
            Value::from(expanded(text, usize::try_from(size).unwrap_or(0))?)
        }
        _ => return Ok(None),
    }))
}

/// Answer of a method that asks for the kind of all characters.
fn is(text: &str, method: &str) -> Option<bool> {
    let all = |is: fn(char) -> bool| !text.is_empty() && text.chars().all(is);
    let some = |is: fn(char) -> bool| text.chars().any(is);
    Some(match method {
        "isalnum" => all(char::is_alphanumeric),
        "isalpha" => all(char::is_alphabetic),
        "isascii" => text.is_ascii(),
        "isdecimal" | "isdigit" | "isnumeric" => all(char::is_numeric),
        "isidentifier" => {
            all(|it| it.is_alphanumeric() || it == '_') && !text.starts_with(|it: char| it.is_numeric())
        }
        "islower" => some(char::is_lowercase) && !some(char::is_uppercase),
        "isupper" => some(char::is_uppercase) && !some(char::is_lowercase),
        "isprintable" => !some(|it| it.is_control() || (is_space(it) && it != ' ')),
        "isspace" => all(is_space),
        "istitle" => some(|it| it.is_uppercase() || it.is_lowercase()) && titled(text) == text,
        _ => return None,
    })
}

/// Text of a method that changes upper and lower case.
pub(super) fn with_case(text: &str, method: &str) -> Option<String> {
    Some(match method {
        "upper" => text.to_uppercase(),
        "lower" => text.to_lowercase(),
        "casefold" => text.to_lowercase().replace('ß', "ss"),
        "title" => titled(text),
        "capitalize" => {
            let mut chars = text.chars();
            let first = chars.next().map(|it| it.to_uppercase().to_string()).unwrap_or_default();
            first + &chars.as_str().to_lowercase()
        }
        "swapcase" => {
            let swapped = |it: char| match it.is_uppercase() {
                true => it.to_lowercase().to_string(),
                false => it.to_uppercase().to_string(),
            };
            text.chars().map(swapped).collect()
        }
        _ => return None,
    })
}

/// The text with an upper-case letter at the start of each run of letters.
fn titled(text: &str) -> String {
    let mut is_in_word = false;
    let mut titled = String::with_capacity(text.len());
    for char in text.chars() {
        match is_in_word {
            true => titled.extend(char.to_lowercase()),
            false => titled.extend(char.to_uppercase()),
        }
        is_in_word = char.is_uppercase() || char.is_lowercase();
    }
    titled
}

fn stripped(text: &str, method: &str, arguments: &Arguments) -> Result<String, Error> {
    let chars = arguments.text(0, "chars")?;
    arguments.end(1)?;
    let is = |it: char| chars.as_ref().map_or_else(|| is_space(it), |chars| chars.contains(it));
    Ok(match method {
        "lstrip" => text.trim_start_matches(is),
        "rstrip" => text.trim_end_matches(is),
        _ => text.trim_matches(is),
    }
    .to_owned())
}

fn split(text: &str, from_end: bool, arguments: &Arguments) -> Result<Value, Error> {
    let (separator, most) = (arguments.text(0, "sep")?, arguments.number(1, "maxsplit")?.unwrap_or(-1));
    arguments.end(2)?;
    let most = usize::try_from(most).unwrap_or(usize::MAX);
    if separator.as_deref() == Some("") {
        return Err(error("the separator of `split` is empty"));
    }
    let pieces = most.saturating_add(1);
    let mut parts: Vec<&str> = match (&separator, from_end) {
        (Some(separator), false) => text.splitn(pieces, &**separator).collect(),
        (Some(separator), true) => text.rsplitn(pieces, &**separator).collect(),
        (None, _) => words(text, from_end, most),
    };
    if from_end {
        parts.reverse();
    }
    Ok(parts.into_iter().map(Value::from).collect())
}

/// The first `most` words of a text and the rest, or the last ones from its end.
fn words(text: &str, from_end: bool, most: usize) -> Vec<&str> {
    let trimmed = |text| match from_end {
        true => str::trim_end_matches(text, is_space),
        false => str::trim_start_matches(text, is_space),
    };
    let (mut words, mut rest) = (Vec::new(), trimmed(text));
    while !rest.is_empty() {
        if words.len() == most {
            words.push(rest);
            break;
        }
        let (word, after) = match from_end {
            true => {
                let before = rest.trim_end_matches(|it| !is_space(it));
                (&rest[before.len()..], before)
            }
            false => rest.split_at(rest.find(is_space).unwrap_or(rest.len())),
        };
        words.push(word);
        rest = trimmed(after);
    }
    words
}

pub(super) fn lines(text: &str, keeps_ends: bool) -> Vec<String> {
    let (mut lines, mut rest) = (Vec::new(), text);
    while !rest.is_empty() {
        let Some(at) = rest.find(is_line_end) else {
            lines.push(rest.to_owned());
            break;
        };
        let length = if rest[at..].starts_with("\r\n") {
            2
        } else {
            rest[at..].chars().next().map_or(0, char::len_utf8)
        };
        lines.push(rest[..if keeps_ends { at + length } else { at }].to_owned());
        rest = &rest[at + length..];
    }
    lines
}

fn partition(text: &str, from_end: bool, arguments: &Arguments) -> Result<Value, Error> {
    let separator = arguments.required(0)?;
    arguments.end(1)?;
    if separator.is_empty() {
        return Err(error("the separator of `partition` is empty"));
    }
    let cut = if from_end { text.rsplit_once(&*separator) } else { text.split_once(&*separator) };
    let parts = match cut {
        Some((before, after)) => [before, &separator, after],
        None if from_end => ["", "", text],
        None => [text, "", ""],
    };
    Ok(Value::from(minijinja::value::Tuple::from(parts.map(Value::from))))
}

/// The part of `text` between the indices at two places, and its start in characters.
fn part(text: &str, arguments: &Arguments, place: usize) -> Result<(String, i64), Error> {
    let (start, stop) = (arguments.number(place, "")?, arguments.number(place + 1, "")?);
    arguments.end(place + 2)?;
    if start.is_none() && stop.is_none() {
        return Ok((text.to_owned(), 0));
    }
    let or_none = |index: Option<i64>| index.map_or(Value::from(()), Value::from);
    let part = slice(&Value::from(text), or_none(start), or_none(stop), Value::from(()))?;
    let length = text.chars().count() as i64;
    let start = start.unwrap_or(0);
    let start = if start < 0 { (start + length).max(0) } else { start };
    Ok((part.to_string(), start))
}

fn has_end(text: &str, at_start: bool, arguments: &Arguments) -> Result<bool, Error> {
    let wanted = arguments.value(0, "")?.unwrap_or_default();
    let (text, _) = part(text, arguments, 1)?;
    let wanted: Vec<Value> = match wanted.kind() {
        ValueKind::Seq | ValueKind::Iterable => wanted.try_iter()?.collect(),
        _ => vec![wanted],
    };
    for wanted in wanted {
        let Some(wanted) = wanted.as_str() else {
            let kind = wanted.kind();
            return Err(error(format!(
                "`{}` needs a text or a tuple of texts, not {kind}",
                arguments.method
            )));
        };
        let is_there = if at_start { text.starts_with(wanted) } else { text.ends_with(wanted) };
        if is_there {
            return Ok(true);
        }
    }
    Ok(false)
}

fn found(text: &str, method: &str, arguments: &Arguments) -> Result<Value, Error> {
    let wanted = arguments.required(0)?;
    let (text, start) = part(text, arguments, 1)?;
    if method == "count" {
        return Ok(Value::from(text.matches(&*wanted).count()));
    }
    let at = if method.starts_with('r') { text.rfind(&*wanted) } else { text.find(&*wanted) };
    match at {
        Some(at) => Ok(Value::from(start + text[..at].chars().count() as i64)),
        None if method.ends_with("find") => Ok(Value::from(-1)),
        None => Err(error(format!("`{method}`: the text is not found"))),
    }
}

/// `text` with the first `count` occurrences of `old` replaced.
pub(super) fn replaced(text: &str, old: &str, new: &str, count: usize) -> Result<String, Error> {
    let (mut all, mut end) = (Text::default(), 0);
    for (at, part) in text.match_indices(old).take(count) {
        all.push(&text[end..at])?;
        all.push(new)?;
        end = at + part.len();
    }
    all.push(&text[end..])?;
    all.finish()
}

fn padded(text: &str, method: &str, arguments: &Arguments) -> Result<String, Error> {
    let width = arguments.number(0, "")?.ok_or_else(|| error(format!("`{method}` lacks an argument")))?;
    let fill = arguments.text(1, "")?.unwrap_or_else(|| " ".to_owned());
    arguments.end(2)?;
    let mut chars = fill.chars();
    let (Some(fill), None) = (chars.next(), chars.next()) else {
        return Err(error(format!("`{method}` fills with one character")));
    };
    let length = text.chars().count();
    let width = usize::try_from(width).unwrap_or(0);
    let missing = width.saturating_sub(length);
    let mut padded = Text::default();
    let text = match method {
        "zfill" => {
            let sign = if text.starts_with(['+', '-']) { &text[..1] } else { "" };
            padded.push(sign)?;
            padded.fill('0', missing)?;
            &text[sign.len()..]
        }
        "rjust" => {
            padded.fill(fill, missing)?;
            text
        }
        "center" => {
            padded.fill(fill, missing / 2 + (missing & width & 1))?;
            text
        }
        _ => text,
    };
    padded.push(text)?;
    match method {
        "ljust" => padded.fill(fill, missing)?,
        "center" => padded.fill(fill, missing - (missing / 2 + (missing & width & 1)))?,
        _ => {}
    }
    padded.finish()
}

fn expanded(text: &str, size: usize) -> Result<String, Error> {
    let (mut all, mut column) = (Text::default(), 0);
    for char in text.chars() {
        match char {
            '\t' => {
                let width = if size == 0 { 0 } else { size - column % size };
                all.fill(' ', width)?;
                column += width;
            }
            _ => {
                all.fill(char, 1)?;
                column = if matches!(char, '\n' | '\r') { 0 } else { column + 1 };
            }
        }
    }
    all.finish()
}

//! Bounds of a render's time and memory, which hold for any template.

use std::cell::Cell;
use std::fmt::{self, Write};
use std::time::{Duration, Instant};

use minijinja::value::{Tuple, ValueKind};
use minijinja::{Error, ErrorKind, Value};

/// Most instructions of a render. A conversation of a thousand messages takes less than a million.
pub(super) const FUEL: u64 = 10_000_000;
/// Most bytes of a text that a template makes.
pub(super) const MAX_TEXT: usize = 16 << 20;
/// Most bytes of all texts that a render makes.
const MAX_WORK: usize = 1 << 30;
/// Most items of a list that a template makes.
pub(super) const MAX_ITEMS: usize = 1 << 20;
/// Deepest nesting of a value.
const MAX_NESTING: usize = 100;
/// Longest time of a render.
const MAX_TIME: Duration = Duration::from_secs(10);

thread_local! {
    /// End of the render's time, its bytes so far, and how often it assigned to an attribute.
    static SPENT: Cell<(Option<Instant>, usize, usize)> = const { Cell::new((None, 0, 0)) };
}

/// Starts a render of this thread.
pub(super) fn start() {
    SPENT.set((Instant::now().checked_add(MAX_TIME), 0, 0));
}

/// An error with this message.
pub(super) fn error(message: impl Into<String>) -> Error {
    Error::new(ErrorKind::InvalidOperation, message.into())
}

pub(super) fn too_long() -> Error {
    error(format!("it makes a text of more than {} MiB", MAX_TEXT >> 20))
}

/// Counts work on `bytes` of text.
pub(super) fn spend(bytes: usize) -> Result<(), Error> {
    let (end, spent, kept) = SPENT.get();
    let spent = spent.saturating_add(bytes);
    SPENT.set((end, spent, kept));
    if spent > MAX_WORK {
        return Err(error(format!("it makes more than {} MiB of text in all", MAX_WORK >> 20)));
    }
    match end {
        Some(end) if Instant::now() > end => {
            Err(error(format!("it runs for more than {} s", MAX_TIME.as_secs())))
        }
        _ => Ok(()),
    }
}

/// Returns a value that a template made, if it is not too large.
pub(super) fn checked(value: Value) -> Result<Value, Error> {
    let bytes = value.as_str().map_or(0, str::len);
    if bytes > MAX_TEXT {
        return Err(too_long());
    }
    let items = if bytes == 0 { value.len().unwrap_or(0) } else { 0 };
    if items > MAX_ITEMS {
        return Err(error(format!("it makes a list of more than {MAX_ITEMS} items")));
    }
    spend(bytes + items * size_of::<Value>())?;
    Ok(value)
}

/// Returns a value that an attribute keeps beyond a loop's round, if it is not nested too deeply. Nested values are
/// read and dropped by recursion, whose stack is limited.
pub(super) fn kept(value: Value) -> Result<Value, Error> {
    // The nesting of a template's own literals is small, so that a look from time to time suffices.
    const EVERY: usize = 16;
    let (end, spent, kept) = SPENT.get();
    SPENT.set((end, spent, kept + 1));
    let is_whole = kept.is_multiple_of(EVERY);
    let mut left = if is_whole { MAX_ITEMS } else { 2 * MAX_NESTING };
    if is_deep(&value, 0, &mut left) {
        return Err(error(format!("it nests values more than {MAX_NESTING} deep")));
    }
    if is_whole && left == 0 {
        return Err(error(format!("it makes a value of more than {MAX_ITEMS} parts")));
    }
    checked(value)
}

/// Returns true if the first `left` values inside are nested too deeply.
fn is_deep(value: &Value, depth: usize, left: &mut usize) -> bool {
    if depth > MAX_NESTING {
        return true;
    }
    let is_list = matches!(value.kind(), ValueKind::Seq | ValueKind::Iterable);
    if !is_list && value.kind() != ValueKind::Map {
        return false;
    }
    let Ok(items) = value.try_iter() else { return false };
    for item in items {
        if *left == 0 {
            return false;
        }
        *left -= 1;
        let item = if is_list { item } else { value.get_item(&item).unwrap_or_default() };
        if is_deep(&item, depth + 1, left) {
            return true;
        }
    }
    false
}

/// A text that ends with an error where it is too long.
#[derive(Default)]
pub(super) struct Text(String);

impl Text {
    pub(super) fn push(&mut self, text: &str) -> Result<(), Error> {
        if self.0.len() + text.len() > MAX_TEXT {
            return Err(too_long());
        }
        self.0.push_str(text);
        Ok(())
    }

    /// Adds `count` times the character.
    pub(super) fn fill(&mut self, char: char, count: usize) -> Result<(), Error> {
        if self.0.len().saturating_add(count.saturating_mul(char.len_utf8())) > MAX_TEXT {
            return Err(too_long());
        }
        self.0.extend(std::iter::repeat_n(char, count));
        Ok(())
    }

    /// Adds Python's `str` of a value.
    pub(super) fn value(&mut self, value: &Value) -> Result<(), Error> {
        match value.as_str() {
            Some(text) => self.push(text),
            None if value.is_undefined() => Ok(()),
            None => self.repr(value, 0),
        }
    }

    /// Adds Python's `repr` of a value.
    pub(super) fn repr(&mut self, value: &Value, depth: usize) -> Result<(), Error> {
        if depth > MAX_NESTING {
            return Err(error(format!("it writes values nested more than {MAX_NESTING} deep")));
        }
        match value.kind() {
            ValueKind::Number if !value.is_integer() => {
                let number = f64::try_from(value.clone())?;
                self.push(&float(number))
            }
            ValueKind::Seq | ValueKind::Iterable => {
                let is_tuple = value.downcast_object_ref::<Tuple>().is_some();
                let (open, close) = if is_tuple { ("(", ")") } else { ("[", "]") };
                self.push(open)?;
                let mut count = 0;
                for item in value.try_iter()? {
                    self.push(if count == 0 { "" } else { ", " })?;
                    self.repr(&item, depth + 1)?;
                    count += 1;
                }
                self.push(if is_tuple && count == 1 { "," } else { "" })?;
                self.push(close)
            }
            ValueKind::Map => {
                self.push("{")?;
                for (index, key) in value.try_iter()?.enumerate() {
                    self.push(if index == 0 { "" } else { ", " })?;
                    self.repr(&key, depth + 1)?;
                    self.push(": ")?;
                    self.repr(&value.get_item(&key)?, depth + 1)?;
                }
                self.push("}")
            }
            ValueKind::Undefined => self.push("Undefined"),
            _ => write!(self, "{value:?}").map_err(|_| too_long()),
        }
    }

    pub(super) fn finish(self) -> Result<String, Error> {
        spend(self.0.len())?;
        Ok(self.0)
    }
}

impl Write for Text {
    fn write_str(&mut self, text: &str) -> fmt::Result {
        self.push(text).map_err(|_| fmt::Error)
    }
}

/// Python's `str` of a value.
pub(super) fn text(value: &Value) -> Result<String, Error> {
    let mut text = Text::default();
    text.value(value)?;
    text.finish()
}

/// Python's `repr` of a float: the shortest digits, with an exponent for large and small ones.
pub(super) fn float(number: f64) -> String {
    if number.is_nan() {
        return "nan".to_owned();
    }
    if number.is_infinite() {
        return if number > 0.0 { "inf" } else { "-inf" }.to_owned();
    }
    let size = number.abs();
    if number == 0.0 || (1e-4..1e16).contains(&size) {
        return format!("{number:?}");
    }
    let scientific = format!("{number:e}");
    let (digits, exponent) = scientific.split_once('e').unwrap_or((&scientific, "0"));
    let (sign, exponent) = exponent.strip_prefix('-').map_or(('+', exponent), |exponent| ('-', exponent));
    format!("{digits}e{sign}{exponent:0>2}")
}

//! Every foreign key and what became of it.

use std::fmt;

use indexmap::IndexMap;
use serde_json::{Map, Value};

use super::{document::Document, shell, values};

/// What became of a key.
#[derive(Clone, Debug, PartialEq)]
pub enum Fate {
    /// It means the same here.
    Mapped {
        /// Our field and its value.
        to: String,
    },
    /// It is something else here.
    Changed {
        /// Our field and its value; empty if there is none.
        to: String,
        /// Why.
        why: String,
    },
    /// Nothing here depends on it.
    Idle {
        /// Why.
        why: String,
    },
    /// What it asks for is not to be had here.
    Refused {
        /// Why, and what to do.
        why: String,
    },
}

/// A foreign key, its value and its fate.
#[derive(Clone, Debug, PartialEq)]
pub struct Row {
    /// The key, with dots.
    pub key: String,
    /// Its value, as JSON or as the word it is.
    pub value: String,
    /// Whether its file does not say it, and its system takes this.
    pub is_default: bool,
    /// What became of it.
    pub fate: Fate,
}

impl fmt::Display for Row {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { key, value, is_default, fate } = self;
        let value = format!("{value}{}", if *is_default { " by default" } else { "" });
        match fate {
            Fate::Mapped { to } => write!(f, "mapped    {key}: {value} -> {to}"),
            Fate::Changed { to, why } if to.is_empty() => write!(f, "changed   {key}: {value} ({why})"),
            Fate::Changed { to, why } => write!(f, "changed   {key}: {value} -> {to} ({why})"),
            Fate::Idle { why } => write!(f, "no effect {key}: {value} ({why})"),
            Fate::Refused { why } => write!(f, "refused   {key}: {value} ({why})"),
        }
    }
}

/// Our config as far as it is known: `strategy.zero_stage` and the like, with values.
#[derive(Clone, Debug, Default)]
pub(super) struct Draft {
    fields: IndexMap<String, Value>,
}

/// The top-level fields in the order in which a config is read.
const TOP: [&str; 8] = ["name", "seed", "backend", "devices", "threads", "model", "strategy", "roles"];

impl Draft {
    pub(super) fn get(&self, field: &str) -> Option<&Value> {
        self.fields.get(field)
    }

    pub(super) fn yaml(&self) -> String {
        let mut root = Map::new();
        for top in TOP.iter().chain(&["pipeline"]) {
            let below = |field: &str| field == *top || field.starts_with(&format!("{top}."));
            for (field, value) in self.fields.iter().filter(|(field, _)| below(field)) {
                values::insert(&mut root, field, value.clone());
            }
        }
        serde_saphyr::to_string(&Value::Object(root)).expect("plain values")
    }

    /// A schedule is set as a whole: beside the kind that a config has, a field of another kind would be a second one.
    pub(super) fn sets(&self) -> Vec<String> {
        let mut sets = Map::new();
        for (field, value) in &self.fields {
            match field.split_once(".schedule.") {
                Some((above, below)) => {
                    let schedule = sets.entry(format!("{above}.schedule"));
                    let schedule = schedule.or_insert_with(|| Value::Object(Map::new()));
                    values::insert(schedule.as_object_mut().expect("just made"), below, value.clone());
                }
                None => drop(sets.insert(field.clone(), value.clone())),
            }
        }
        sets.iter().map(|(field, value)| format!("{field}={value}")).collect()
    }
}

/// Foreign keys that wait for a rule, and the draft that rules fill.
pub(super) struct Ledger {
    keys: IndexMap<String, Value>,
    order: Vec<String>,
    /// Keys that the file leaves to its system's defaults.
    assumed: Vec<String>,
    draft: Draft,
    rows: Vec<Row>,
    /// Whether values may have variables that stand for what is set elsewhere.
    is_partial: bool,
}

impl Ledger {
    pub(super) fn new(document: Document) -> Self {
        let is_partial = document.is_partial;
        let keys = document.flat();
        let order = keys.keys().cloned().collect();
        Self { keys, order, assumed: Vec::new(), draft: Draft::default(), rows: Vec::new(), is_partial }
    }

    /// What the foreign system takes for keys that its file leaves out: here the default may be another.
    pub(super) fn assume(&mut self, defaults: &[(&str, Value)]) {
        for (key, value) in defaults {
            if !self.keys.contains_key(*key) {
                self.keys.insert((*key).to_owned(), value.clone());
                self.order.push((*key).to_owned());
                self.assumed.push((*key).to_owned());
            }
        }
    }

    /// Adds the keys of a file that this one names.
    pub(super) fn include(&mut self, keys: IndexMap<String, Value>) {
        self.order.extend(keys.keys().cloned());
        self.keys.extend(keys);
    }

    /// Gives keys of an older version the names of the newer one.
    pub(super) fn rename<'a>(&mut self, names: impl IntoIterator<Item = &'a (&'a str, &'a str)>) {
        for (old, new) in names {
            if let Some(index) = self.keys.get_index_of(*old) {
                let (_, value) = self.keys.shift_remove_index(index).expect("just found");
                self.keys.insert((*new).to_owned(), value);
                self.order.iter_mut().filter(|key| key == old).for_each(|key| *key = (*new).to_owned());
            }
        }
    }

    /// The keys that no rule has taken yet.
    pub(super) fn keys(&self) -> impl Iterator<Item = &String> {
        self.keys.keys()
    }

    /// A key's value, while no rule has taken it.
    pub(super) fn peek(&self, key: &str) -> Option<&Value> {
        self.keys.get(key)
    }

    pub(super) fn number(&self, key: &str) -> Option<f64> {
        values::number(self.peek(key)?)
    }

    pub(super) fn whole(&self, key: &str) -> Option<u64> {
        values::whole(self.peek(key)?)
    }

    pub(super) fn truth(&self, key: &str) -> Option<bool> {
        values::truth(self.peek(key)?)
    }

    pub(super) fn text(&self, key: &str) -> Option<String> {
        Some(values::text(self.peek(key)?))
    }

    /// What our field has become so far.
    pub(super) fn draft(&self, field: &str) -> Option<&Value> {
        self.draft.get(field)
    }

    /// The key means `field: value`.
    pub(super) fn map(&mut self, key: &str, field: &str, value: impl Into<Value>) {
        let value = value.into();
        let to = written(field, &value);
        self.settle(key, field, value, Fate::Mapped { to });
    }

    /// The key becomes `field: value`, which is something else, because of `why`.
    pub(super) fn change(&mut self, key: &str, field: &str, value: impl Into<Value>, why: impl Into<String>) {
        let value = value.into();
        let to = written(field, &value);
        self.settle(key, field, value, Fate::Changed { to, why: why.into() });
    }

    /// As [`Self::map`], also where an earlier rule has filled the field.
    pub(super) fn replace(&mut self, key: &str, field: &str, value: Value) {
        self.draft.fields.insert(field.to_owned(), value.clone());
        self.map(key, field, value);
    }

    /// The key has part in what an earlier row says.
    pub(super) fn fold(&mut self, key: &str, why: impl Into<String>) {
        self.close(key, Fate::Changed { to: String::new(), why: why.into() });
    }

    /// Nothing here depends on the key.
    pub(super) fn idle(&mut self, key: &str, why: impl Into<String>) {
        self.close(key, Fate::Idle { why: why.into() });
    }

    /// What the key asks for is not to be had.
    pub(super) fn refuse(&mut self, key: &str, why: impl Into<String>) {
        self.close(key, Fate::Refused { why: why.into() });
    }

    /// As [`Self::map`] for a number that stays as it is; `auto` and the like leave our default.
    pub(super) fn copy_number(&mut self, key: &str, field: &str) {
        match (self.peek(key), self.number(key)) {
            (None, _) => {}
            (Some(_), Some(number)) => self.map(key, field, values::json(number)),
            (Some(value), None) if values::is_unset(value) => self.idle(key, "left to its default"),
            (Some(_), None) => self.refuse(key, "not a number"),
        }
    }

    /// As [`Self::map`] for a truth value that stays as it is.
    pub(super) fn flag(&mut self, key: &str, field: &str) {
        match (self.peek(key), self.truth(key)) {
            (None, _) => {}
            (Some(_), Some(truth)) => self.map(key, field, truth),
            (Some(_), None) => self.refuse(key, "neither true nor false"),
        }
    }

    /// A key that is on or off: on is `field: value`, off is what is here without it.
    pub(super) fn switch(&mut self, key: &str, field: &str, value: impl Into<Value>) {
        match (self.peek(key), self.truth(key)) {
            (None, _) => {}
            (Some(_), Some(true)) => self.map(key, field, value),
            (Some(_), Some(false)) => self.idle(key, "off"),
            (Some(_), None) => self.refuse(key, "neither true nor false"),
        }
    }

    /// A key that is true or false, where both are values of our field.
    pub(super) fn either(&mut self, key: &str, field: &str, if_true: &str, if_false: &str) {
        match (self.peek(key), self.truth(key)) {
            (None, _) => {}
            (Some(_), Some(truth)) => self.map(key, field, if truth { if_true } else { if_false }),
            (Some(_), None) => self.refuse(key, "neither true nor false"),
        }
    }

    /// As [`Self::map`] for a text that stays as it is.
    pub(super) fn copy_text(&mut self, key: &str, field: &str) {
        if let Some(text) = self.text(key) {
            self.map(key, field, text);
        }
    }

    /// A LoRA's matrices by name: a list, one name, or all.
    pub(super) fn lora_targets(&mut self, key: &str) {
        let names: Vec<String> = match self.peek(key) {
            None => return,
            Some(Value::Array(names)) => names.iter().map(values::text).collect(),
            Some(one) => values::text(one).split(',').map(|name| name.trim().to_owned()).collect(),
        };
        match names.iter().any(|name| name == "all-linear") {
            true => self.idle(key, "all matrices have an adapter by default"),
            false => self.map(key, "model.lora.targets", names),
        }
    }

    /// Sets a field that no key names and that a config has to have, where nothing has set it.
    pub(super) fn fill(&mut self, field: &str, value: impl Into<Value>) {
        self.draft.fields.entry(field.to_owned()).or_insert_with(|| value.into());
    }

    /// Fills what is below `to` as it is below `from`.
    pub(super) fn fill_as(&mut self, to: &str, from: &str) {
        let part = |(field, value): (&String, &Value)| {
            field
                .strip_prefix(from)
                .filter(|part| part.starts_with('.'))
                .map(|part| (part.to_owned(), value.clone()))
        };
        let parts: Vec<(String, Value)> = self.draft.fields.iter().filter_map(part).collect();
        for (part, value) in parts {
            self.fill(&format!("{to}{part}"), value);
        }
    }

    /// Takes our field, with what is below it, out of the draft.
    pub(super) fn take(&mut self, field: &str) -> Value {
        let (below, mut taken) = (format!("{field}."), Map::new());
        self.draft.fields.retain(|name, value| {
            let part = name.strip_prefix(&below);
            if let Some(part) = part {
                values::insert(&mut taken, part, value.take());
            }
            part.is_none()
        });
        Value::Object(taken)
    }

    /// Keys that nothing here depends on: `(key, why)`, where a key that ends in `*` stands for all that begin so.
    pub(super) fn idle_all(&mut self, table: &[(&str, &str)]) {
        for (pattern, why) in table {
            for key in self.matching(pattern) {
                self.idle(&key, *why);
            }
        }
    }

    /// Features that are not to be had: refused, unless the value says that they are off.
    pub(super) fn refuse_all(&mut self, table: &[(&str, &str)]) {
        for (pattern, why) in table {
            for key in self.matching(pattern) {
                match values::is_off(&self.keys[&key]) {
                    true => self.idle(&key, "off"),
                    false => self.refuse(&key, *why),
                }
            }
        }
    }

    fn matching(&self, pattern: &str) -> Vec<String> {
        let fits = |key: &&String| match pattern.strip_suffix('*') {
            Some(prefix) => key.starts_with(prefix),
            None => *key == pattern,
        };
        self.keys.keys().filter(fits).cloned().collect()
    }

    /// As [`Self::idle_all`], for all keys that end so.
    pub(super) fn idle_ending(&mut self, end: &str, why: &str) {
        let keys: Vec<String> = self.keys.keys().filter(|key| key.ends_with(end)).cloned().collect();
        for key in keys {
            self.idle(&key, why);
        }
    }

    /// Keeps what a key has, such as a password, out of the report.
    pub(super) fn hide(&mut self, key: &str) {
        if let Some(value) = self.keys.get_mut(key) {
            *value = Value::String("(hidden)".to_owned());
        }
    }

    /// Whether the key's value has a variable in it whose value is not known.
    fn is_unknown(&self, key: &str) -> bool {
        self.is_partial && self.text(key).is_some_and(|text| !shell::is_expanded(&text))
    }

    fn settle(&mut self, key: &str, field: &str, value: Value, fate: Fate) {
        let fate = match self.draft.get(field) {
            _ if self.is_unknown(key) => fate,
            Some(other) if *other != value => Fate::Refused {
                why: format!("`{}` was said before; keep one of the two", written(field, other)),
            },
            _ => {
                self.draft.fields.insert(field.to_owned(), value);
                fate
            }
        };
        self.close(key, fate);
    }

    fn close(&mut self, key: &str, fate: Fate) {
        let fate = match fate {
            Fate::Idle { .. } => fate,
            _ if self.is_unknown(key) => {
                Fate::Refused { why: "what its `$` stands for is not known: write the value".to_owned() }
            }
            fate => fate,
        };
        let value = values::text(&self.keys.shift_remove(key).expect("a rule takes a key that is there"));
        let is_default = self.assumed.iter().any(|assumed| assumed == key);
        self.rows.push(Row { key: key.to_owned(), value, is_default, fate });
    }

    /// Refuses what no rule took; rows come in the file's order.
    pub(super) fn finish(mut self) -> (Draft, Vec<Row>) {
        for key in self.keys.keys().cloned().collect::<Vec<_>>() {
            self.refuse(&key, "the importer does not know this key");
        }
        let place = |row: &Row| self.order.iter().position(|key| *key == row.key);
        self.rows.sort_by_key(place);
        (self.draft, self.rows)
    }
}

fn written(field: &str, value: &Value) -> String {
    format!("{field}: {}", values::text(value))
}

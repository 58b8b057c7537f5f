//! Record of every foreign key and its outcome.

use std::{
    collections::{HashMap, HashSet},
    fmt, mem,
};

use indexmap::IndexMap;
use serde_json::{Map, Value};

use super::{document::Document, shell, values};

/// Outcome of a key.
#[derive(Clone, Debug, PartialEq)]
pub enum Outcome {
    /// It has the same meaning here.
    Mapped {
        /// Our field and its value.
        to: String,
    },
    /// It becomes something different here.
    Changed {
        /// Our field and its value; empty if there is none.
        to: String,
        /// Difference or reason.
        why: String,
    },
    /// It has no effect here.
    Idle {
        /// Reason.
        why: String,
    },
    /// It is not supported here.
    Refused {
        /// Reason and fix.
        why: String,
    },
}

/// A foreign key with its value and outcome.
#[derive(Clone, Debug, PartialEq)]
pub struct Row {
    /// The key, with dots.
    pub key: String,
    /// Its value, as JSON or as a plain word.
    pub value: String,
    /// True if the file omits it and the value is the system's default.
    pub is_default: bool,
    /// Outcome.
    pub outcome: Outcome,
}

impl fmt::Display for Row {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { key, value, is_default, outcome } = self;
        // A row is one line, whatever its value is.
        let in_line = |text: &str| text.replace('\n', "\\n");
        let value = format!("{}{}", in_line(value), if *is_default { " by default" } else { "" });
        let outcome = &match outcome {
            Outcome::Mapped { to } => Outcome::Mapped { to: in_line(to) },
            Outcome::Changed { to, why } => Outcome::Changed { to: in_line(to), why: why.clone() },
            other => other.clone(),
        };
        match outcome {
            Outcome::Mapped { to } => write!(f, "mapped    {key}: {value} -> {to}"),
            Outcome::Changed { to, why } if to.is_empty() => write!(f, "changed   {key}: {value} ({why})"),
            Outcome::Changed { to, why } => write!(f, "changed   {key}: {value} -> {to} ({why})"),
            Outcome::Idle { why } => write!(f, "no effect {key}: {value} ({why})"),
            Outcome::Refused { why } => write!(f, "refused   {key}: {value} ({why})"),
        }
    }
}

/// Our config so far: fields such as `strategy.zero_stage` with values.
#[derive(Clone, Debug, Default)]
pub(super) struct Draft {
    fields: IndexMap<String, Value>,
}

/// Top-level fields in the order of a config.
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

    /// The fields as `--set` arguments. A schedule is set as a whole, since a field of another kind would add
    /// a second kind.
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

/// Foreign keys that no rule has consumed, and the draft that rules fill.
pub(super) struct Ledger {
    keys: IndexMap<String, Value>,
    order: Vec<String>,
    /// Keys that the file omits, filled with its system's defaults.
    assumed: Vec<String>,
    draft: Draft,
    rows: Vec<Row>,
    /// Top-level keys whose values other keys take by `${...}`.
    referenced: HashSet<String>,
    /// True if values may contain variables set outside the file.
    is_partial: bool,
}

impl Ledger {
    pub(super) fn new(mut document: Document) -> Self {
        let (is_partial, lost) = (document.is_partial, document.take_lost());
        let referenced = mem::take(&mut document.referenced);
        let keys = document.flat();
        let order = keys.keys().chain(lost.keys()).cloned().collect();
        let why = "the command ends before this line, at a comment or for lack of a backslash: the shell does \
                   not pass it on";
        let row = |(key, value)| Row {
            key,
            value: values::text(&value),
            is_default: false,
            outcome: Outcome::Refused { why: why.to_owned() },
        };
        let rows = lost.into_iter().map(row).collect();
        Self { keys, order, assumed: Vec::new(), draft: Draft::default(), rows, referenced, is_partial }
    }

    /// Adds the foreign system's defaults for keys that its file omits, where defaults here may differ.
    pub(super) fn assume(&mut self, defaults: &[(&str, Value)]) {
        for (key, value) in defaults {
            if !self.keys.contains_key(*key) {
                self.keys.insert((*key).to_owned(), value.clone());
                self.order.push((*key).to_owned());
                self.assumed.push((*key).to_owned());
            }
        }
    }

    /// Gives a key whose value means unset the foreign system's default.
    pub(super) fn assume_if_unset(&mut self, key: &str, usual: Value) {
        match self.keys.get_mut(key) {
            Some(value) if values::is_unset(value) => {
                *value = usual;
                self.assumed.push(key.to_owned());
            }
            Some(_) => {}
            None => self.assume(&[(key, usual)]),
        }
    }

    /// Adds the keys of an included file.
    pub(super) fn include(&mut self, keys: IndexMap<String, Value>) {
        self.order.extend(keys.keys().cloned());
        self.keys.extend(keys);
    }

    /// Renames keys of an older version to those of the newer one.
    pub(super) fn rename<'a>(&mut self, names: impl IntoIterator<Item = &'a (&'a str, &'a str)>) {
        for (old, new) in names {
            if let Some(index) = self.keys.get_index_of(*old) {
                let (_, value) = self.keys.shift_remove_index(index).expect("just found");
                self.keys.insert((*new).to_owned(), value);
                self.order.iter_mut().filter(|key| key == old).for_each(|key| *key = (*new).to_owned());
            }
        }
    }

    /// Keys that no rule has consumed.
    pub(super) fn keys(&self) -> impl Iterator<Item = &String> {
        self.keys.keys()
    }

    /// Value of a key, until a rule consumes it.
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

    /// Current value of our field.
    pub(super) fn draft(&self, field: &str) -> Option<&Value> {
        self.draft.get(field)
    }

    /// Maps the key to `field: value`.
    pub(super) fn map(&mut self, key: &str, field: &str, value: impl Into<Value>) {
        let value = value.into();
        let to = written(field, &value);
        self.settle(key, field, value, Outcome::Mapped { to });
    }

    /// Maps the key to `field: value`, which differs from it for the reason `why`.
    pub(super) fn change(&mut self, key: &str, field: &str, value: impl Into<Value>, why: impl Into<String>) {
        let value = value.into();
        let to = written(field, &value);
        self.settle(key, field, value, Outcome::Changed { to, why: why.into() });
    }

    /// [`Self::map`], which overwrites a field that earlier rules set, also in their rows.
    pub(super) fn replace(&mut self, key: &str, field: &str, value: Value) {
        self.draft.fields.insert(field.to_owned(), value.clone());
        for row in &mut self.rows {
            if let Outcome::Mapped { to } | Outcome::Changed { to, .. } = &mut row.outcome
                && to.strip_prefix(field).is_some_and(|rest| rest.starts_with(": "))
            {
                *to = written(field, &value);
            }
        }
        self.map(key, field, value);
    }

    /// Closes a key that is part of an earlier row.
    pub(super) fn fold(&mut self, key: &str, why: impl Into<String>) {
        self.close(key, Outcome::Changed { to: String::new(), why: why.into() });
    }

    /// Closes a key with the same meaning here, whose value goes to the ranks' environment variable `variable`.
    pub(super) fn pass(&mut self, key: &str, variable: &str) {
        self.close(key, Outcome::Mapped { to: variable.to_owned() });
    }

    /// Closes a key that has no effect here.
    pub(super) fn idle(&mut self, key: &str, why: impl Into<String>) {
        self.close(key, Outcome::Idle { why: why.into() });
    }

    /// Closes a key that is not supported here.
    pub(super) fn refuse(&mut self, key: &str, why: impl Into<String>) {
        self.close(key, Outcome::Refused { why: why.into() });
    }

    /// Closes keys with another meaning here: `(key, why)`, with `*` as in [`Self::idle_all`]. What is off or
    /// not set has no effect.
    pub(super) fn fold_all(&mut self, table: &[(&str, &str)]) {
        for (pattern, why) in table {
            for key in self.matching(pattern) {
                match values::is_off(&self.keys[&key]) {
                    true => self.idle(&key, "off"),
                    false => self.fold(&key, *why),
                }
            }
        }
    }

    /// [`Self::map`] for an unchanged number; `auto` and similar values leave our default.
    pub(super) fn copy_number(&mut self, key: &str, field: &str) {
        match (self.peek(key), self.number(key)) {
            (None, _) => {}
            (Some(_), Some(number)) => self.map(key, field, values::json(number)),
            (Some(value), None) if values::is_unset(value) => self.idle(key, "left to its default"),
            (Some(_), None) => self.refuse(key, "not a number"),
        }
    }

    /// [`Self::map`] for an unchanged boolean.
    pub(super) fn flag(&mut self, key: &str, field: &str) {
        match (self.peek(key), self.truth(key)) {
            (None, _) => {}
            (Some(_), Some(truth)) => self.map(key, field, truth),
            (Some(_), None) => self.refuse(key, "neither true nor false"),
        }
    }

    /// A boolean key: true means `field: value`, false is the behaviour here without it.
    pub(super) fn switch(&mut self, key: &str, field: &str, value: impl Into<Value>) {
        match (self.peek(key), self.truth(key)) {
            (None, _) => {}
            (Some(_), Some(true)) => self.map(key, field, value),
            (Some(_), Some(false)) => self.idle(key, "off"),
            (Some(_), None) => self.refuse(key, "neither true nor false"),
        }
    }

    /// A boolean key, for which our field has two values.
    pub(super) fn either(&mut self, key: &str, field: &str, if_true: &str, if_false: &str) {
        match (self.peek(key), self.truth(key)) {
            (None, _) => {}
            (Some(_), Some(truth)) => self.map(key, field, if truth { if_true } else { if_false }),
            (Some(_), None) => self.refuse(key, "neither true nor false"),
        }
    }

    /// [`Self::map`] for an unchanged text.
    pub(super) fn copy_text(&mut self, key: &str, field: &str) {
        if let Some(text) = self.text(key) {
            self.map(key, field, text);
        }
    }

    /// Form of the weights that sample, which the other tables refuse but for `fp8`.
    pub(super) fn rollout_weights(&mut self, key: &str) {
        if self.text(key).is_some_and(|form| form.eq_ignore_ascii_case("fp8")) {
            let why = "with `fp8_activations: true`; the difference to training is corrected";
            self.change(key, "pipeline.rlvr.rollout.weights", "fp8", why);
            self.fill("pipeline.rlvr.rollout.fp8_activations", true);
        }
    }

    /// Frozen weights in 4 bits, which the other tables refuse but beside adapters without magnitudes. Returns true for such.
    pub(super) fn frozen_weights(&mut self, key: &str) -> bool {
        let is_asked = self.truth(key) == Some(true) && self.draft("model.lora.dora").is_none();
        if is_asked {
            let why =
                "matrices of the layers, stacked experts too; embeddings, head and norms keep the precision";
            self.change(key, "strategy.frozen_weights", "nf4", why);
        }
        is_asked
    }

    /// AdamW with moments in 8 bits.
    pub(super) fn moments_in_eight_bits(&mut self, key: &str) {
        let why = "blocks of 256 elements as in bitsandbytes; embeddings and small weights too";
        self.change(key, "strategy.moments", "8bit", why);
    }

    /// Names of the matrices with LoRA adapters: a list, one name, or all.
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

    /// Sets a required field that no key maps to, if it is still unset.
    pub(super) fn fill(&mut self, field: &str, value: impl Into<Value>) {
        self.draft.fields.entry(field.to_owned()).or_insert_with(|| value.into());
    }

    /// Copies the fields below `from` to those below `to`.
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

    /// Removes our field, with the fields below it, from the draft.
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

    /// Closes keys without effect: `(key, why)`. A key ending in `*` matches all keys with that prefix.
    pub(super) fn idle_all(&mut self, table: &[(&str, &str)]) {
        for (pattern, why) in table {
            for key in self.matching(pattern) {
                self.idle(&key, *why);
            }
        }
    }

    /// Refuses unsupported features, unless their value turns them off.
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

    /// [`Self::idle_all`] for all keys with this suffix.
    pub(super) fn idle_ending(&mut self, end: &str, why: &str) {
        let keys: Vec<String> = self.keys.keys().filter(|key| key.ends_with(end)).cloned().collect();
        for key in keys {
            self.idle(&key, why);
        }
    }

    /// Hides the value of a key, such as a password, in the report.
    pub(super) fn hide(&mut self, key: &str) {
        if let Some(value) = self.keys.get_mut(key) {
            *value = Value::String("(hidden)".to_owned());
        }
    }

    /// Returns true if the key's value contains an unknown variable.
    fn is_unknown(&self, key: &str) -> bool {
        self.is_partial && self.text(key).is_some_and(|text| !shell::is_expanded(&text))
    }

    fn settle(&mut self, key: &str, field: &str, value: Value, outcome: Outcome) {
        let outcome = match self.draft.get(field) {
            _ if self.is_unknown(key) => outcome,
            Some(other) if *other != value => Outcome::Refused {
                why: format!("conflicts with `{}`; keep one of the two", written(field, other)),
            },
            _ => {
                self.draft.fields.insert(field.to_owned(), value);
                outcome
            }
        };
        self.close(key, outcome);
    }

    fn close(&mut self, key: &str, outcome: Outcome) {
        let outcome = match outcome {
            Outcome::Idle { .. } => outcome,
            _ if self.is_unknown(key) => {
                Outcome::Refused { why: "the value of its `$` is unknown: write it out".to_owned() }
            }
            outcome => outcome,
        };
        let value = values::text(&self.keys.shift_remove(key).expect("a rule takes a key that is there"));
        let is_default = self.assumed.iter().any(|assumed| assumed == key);
        self.rows.push(Row { key: key.to_owned(), value, is_default, outcome });
    }

    /// Refuses keys that no rule consumed; rows are in the order of the file.
    pub(super) fn finish(mut self) -> (Draft, Vec<Row>) {
        for key in self.keys.keys().cloned().collect::<Vec<_>>() {
            let is_referenced = self.referenced.contains(key.split('.').next().unwrap_or(&key));
            match values::is_empty(&self.keys[&key]) {
                true => self.idle(&key, "not set"),
                false if is_referenced => self.idle(&key, "only other keys use it, by `${...}`"),
                false => self.refuse(&key, "the importer does not know this key"),
            }
        }
        let mut places = HashMap::new();
        for (place, key) in self.order.iter().enumerate() {
            places.entry(key.as_str()).or_insert(place);
        }
        self.rows.sort_by_key(|row| places.get(row.key.as_str()).copied());
        (self.draft, self.rows)
    }
}

fn written(field: &str, value: &Value) -> String {
    format!("{field}: {}", values::text(value))
}

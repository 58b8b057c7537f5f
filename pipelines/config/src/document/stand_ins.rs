//! Stand-ins for wrong or missing values, so that reading continues and finds further errors.

use std::collections::BTreeMap;

use super::problem::{is_at_or_below, join};
use super::tree::Node;

/// Kind of a field's error.
#[derive(Clone, Copy, Debug)]
pub(super) enum Kind {
    /// A value of a wrong type.
    Wrong,
    /// A key without a field, and the field that the key resembles.
    Unknown { nearest: Option<&'static str> },
    /// A missing field below the innermost value that the error passes.
    Missing(&'static str),
}

/// Form of a stand-in.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(super) enum Form {
    /// No value: the field has its default.
    Absent,
    /// A number; for a mapping, a mapping of numbers.
    Number,
    Text,
    List,
    Map,
    /// A mapping with its first field alone.
    First,
    /// A value where an absent one would be valid.
    Some,
}

impl Form {
    /// Returns the next form to try.
    fn next(self) -> Option<Self> {
        let order = [Self::Absent, Self::Number, Self::Text, Self::List, Self::Map, Self::First];
        order.into_iter().find(|form| *form > self)
    }
}

/// Stand-ins for wrong or missing values.
#[derive(Debug, Default)]
pub(super) struct StandIns {
    forms: BTreeMap<String, Form>,
    /// Keys without a field.
    unknown: Vec<Unknown>,
}

/// A key without a field.
#[derive(Debug)]
struct Unknown {
    /// The key with the path to it.
    path: String,
    /// The field that the key resembles.
    nearest: Option<&'static str>,
    /// True if a missing field was matched to this key.
    is_spent: bool,
}

impl StandIns {
    /// Returns the fields that have a stand-in.
    pub(super) fn into_fields(self) -> Vec<String> {
        self.forms.into_keys().collect()
    }

    /// Returns true if an error about `field` does not follow from earlier errors.
    pub(super) fn is_news(&mut self, field: &str, kind: Kind) -> bool {
        if self.forms.keys().any(|path| is_at_or_below(field, path) || is_at_or_below(path, field)) {
            return false;
        }
        match kind {
            Kind::Unknown { .. } => true,
            Kind::Missing(name) => !self.is_misspelt(field, name),
            // An error of a section may follow from a part with a wrong name.
            Kind::Wrong => !self.unknown.iter().any(|key| is_at_or_below(&key.path, field)),
        }
    }

    /// Returns true if an unknown key in the same section is meant for the missing field `name`. Each key is meant for
    /// one field.
    fn is_misspelt(&mut self, field: &str, name: &'static str) -> bool {
        let mut beside = self.unknown.iter_mut().filter(|key| join(parent(&key.path), name) == field);
        let meant = beside.find(|key| !key.is_spent && key.nearest.is_none_or(|nearest| nearest == name));
        meant.map(|key| key.is_spent = true).is_some()
    }

    /// Finds the next stand-in for `field`, or for the section that has the field. Returns false if there is none.
    pub(super) fn add(&mut self, field: &str, kind: Kind) -> bool {
        let mut field = field.to_owned();
        if let Kind::Unknown { nearest } = kind {
            self.unknown.push(Unknown { path: field, nearest, is_spent: false });
            return true;
        }
        let mut first = if let Kind::Missing(_) = kind { Form::Number } else { Form::Absent };
        while !field.is_empty() {
            let form = self.forms.get(&field).map_or(Some(first), |form| form.next());
            // A stand-in for a section replaces those of its parts.
            self.forms.retain(|path, _| !is_at_or_below(path, &field));
            if let Some(form) = form {
                self.forms.insert(field, form);
                return true;
            }
            field = parent(&field).to_owned();
            first = Form::Absent;
        }
        false
    }

    /// Returns the value to read at `path`, where the tree has `node`; `None` for an absent value.
    pub(super) fn read<'a>(&self, path: &str, node: &'a Node) -> Option<Read<'a>> {
        match self.forms.get(path) {
            Some(Form::Absent) => None,
            Some(form) => Some(Read::StandIn(*form)),
            None => Some(Read::Node(node)),
        }
    }

    /// Returns the stand-in for a part of a stand-in.
    pub(super) fn part(&self, path: &str) -> Read<'static> {
        Read::StandIn(self.forms.get(path).copied().unwrap_or(Form::Number))
    }

    pub(super) fn is_unknown(&self, path: &str) -> bool {
        self.unknown.iter().any(|key| key.path == path)
    }

    /// Returns the names of fields directly below `path` that have stand-ins.
    pub(super) fn below<'a>(&'a self, path: &'a str) -> impl Iterator<Item = &'a str> {
        let present = self.forms.iter().filter(|(_, form)| **form != Form::Absent);
        present.filter_map(move |(full, _)| {
            let name = if path.is_empty() { full } else { full.strip_prefix(path)?.strip_prefix('.')? };
            (parent(full) == path).then_some(name)
        })
    }
}

/// Returns the path of the section or list that has a field.
fn parent(path: &str) -> &str {
    path.rfind(['.', '[']).map_or("", |at| &path[..at])
}

/// A value to read: a node, or a stand-in for a node.
#[derive(Clone, Copy)]
pub(super) enum Read<'a> {
    Node(&'a Node),
    StandIn(Form),
}

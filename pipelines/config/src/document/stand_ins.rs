//! What is read in place of values that are wrong or missing, so that reading goes on and finds what else is wrong.

use std::collections::BTreeMap;

use super::problem::{is_at_or_below, join};
use super::tree::Node;

/// What is wrong with a field.
#[derive(Clone, Copy, Debug)]
pub(super) enum Kind {
    /// A value that is not of its type.
    Wrong,
    /// A key that there is no field for, and the field that it resembles.
    Unknown { nearest: Option<&'static str> },
    /// A field that is missing below the value that the error passes first.
    Missing(&'static str),
}

/// What stands in for a value.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(super) enum Form {
    /// Nothing: a default.
    Absent,
    /// A number, and as a mapping one of numbers.
    Number,
    Text,
    List,
    Map,
    /// A mapping with its first field alone.
    First,
    /// Something where nothing would do.
    Some,
}

impl Form {
    /// The form to try next.
    fn next(self) -> Option<Self> {
        let order = [Self::Absent, Self::Number, Self::Text, Self::List, Self::Map, Self::First];
        order.into_iter().find(|form| *form > self)
    }
}

/// What is read in place of values that are wrong or missing.
#[derive(Debug, Default)]
pub(super) struct StandIns {
    forms: BTreeMap<String, Form>,
    /// Keys that there are no fields for.
    unknown: Vec<Unknown>,
}

/// A key that there is no field for.
#[derive(Debug)]
struct Unknown {
    /// The key with the path to it.
    path: String,
    /// The field that it resembles.
    nearest: Option<&'static str>,
    /// Whether a missing field was taken for the one that is meant.
    is_spent: bool,
}

impl StandIns {
    /// The fields that have one.
    pub(super) fn into_fields(self) -> Vec<String> {
        self.forms.into_keys().collect()
    }

    /// Whether an error about `field` does not follow from those before it.
    pub(super) fn is_news(&mut self, field: &str, kind: Kind) -> bool {
        if self.forms.keys().any(|path| is_at_or_below(field, path) || is_at_or_below(path, field)) {
            return false;
        }
        match kind {
            Kind::Unknown { .. } => true,
            Kind::Missing(name) => !self.is_misspelt(field, name),
            // What is wrong with a whole may be that a part of it has another name.
            Kind::Wrong => !self.unknown.iter().any(|key| is_at_or_below(&key.path, field)),
        }
    }

    /// Whether an unknown key beside the missing field `name` is meant for it. Each is meant for one.
    fn is_misspelt(&mut self, field: &str, name: &'static str) -> bool {
        let mut beside = self.unknown.iter_mut().filter(|key| join(parent(&key.path), name) == field);
        let meant = beside.find(|key| !key.is_spent && key.nearest.is_none_or(|nearest| nearest == name));
        meant.map(|key| key.is_spent = true).is_some()
    }

    /// Finds the next stand-in for `field`, or for what that is a part of; `false` if there is none.
    pub(super) fn add(&mut self, field: &str, kind: Kind) -> bool {
        let mut field = field.to_owned();
        if let Kind::Unknown { nearest } = kind {
            self.unknown.push(Unknown { path: field, nearest, is_spent: false });
            return true;
        }
        let mut first = if let Kind::Missing(_) = kind { Form::Number } else { Form::Absent };
        while !field.is_empty() {
            let form = self.forms.get(&field).map_or(Some(first), |form| form.next());
            // What stands in for a whole does so for its parts.
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

    /// What is read at `path`, where the tree has `node`; `None` for nothing.
    pub(super) fn read<'a>(&self, path: &str, node: &'a Node) -> Option<Read<'a>> {
        match self.forms.get(path) {
            Some(Form::Absent) => None,
            Some(form) => Some(Read::StandIn(*form)),
            None => Some(Read::Node(node)),
        }
    }

    /// The stand-in for a part of a stand-in.
    pub(super) fn part(&self, path: &str) -> Read<'static> {
        Read::StandIn(self.forms.get(path).copied().unwrap_or(Form::Number))
    }

    pub(super) fn is_unknown(&self, path: &str) -> bool {
        self.unknown.iter().any(|key| key.path == path)
    }

    /// The names of fields right below `path` that have stand-ins.
    pub(super) fn below<'a>(&'a self, path: &'a str) -> impl Iterator<Item = &'a str> {
        let present = self.forms.iter().filter(|(_, form)| **form != Form::Absent);
        present.filter_map(move |(full, _)| {
            let name = if path.is_empty() { full } else { full.strip_prefix(path)?.strip_prefix('.')? };
            (parent(full) == path).then_some(name)
        })
    }
}

/// The path of what a field is a part of.
fn parent(path: &str) -> &str {
    path.rfind(['.', '[']).map_or("", |at| &path[..at])
}

/// What is read: a node, or a stand-in for one.
#[derive(Clone, Copy)]
pub(super) enum Read<'a> {
    Node(&'a Node),
    StandIn(Form),
}

//! Other systems' configs as ours, with an account of every key.
//!
//! A source is a table of rules, a key each ([`Rule`]), and a function for what follows from several keys together. What
//! comes out are settings of our fields, as `--set` would make them, and a [`Note`] a key. A key without a rule is
//! refused: nobody should believe that it was taken over.

mod accelerate;
mod command_line;
mod deepspeed;
mod openrlhf;
mod read;
mod roll;
mod trl;
mod trlx;
mod value;

#[cfg(test)]
mod tests;

use std::path::{Path, PathBuf};

use clap::ValueEnum;
use indexmap::IndexMap;
use serde_json::{Map, Value};

use value::leaves;

/// A system whose configs can be read.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum System {
    /// ROLL's RLVR YAML, with its hydra defaults.
    Roll,
    /// The YAML of `accelerate config`.
    Accelerate,
    /// A DeepSpeed JSON.
    Deepspeed,
    /// The YAML that TRL's `grpo` and `rloo` take as `--config`.
    Trl,
    /// A shell script or text with OpenRLHF's command line.
    Openrlhf,
    /// trlx's YAML.
    Trlx,
}

/// What became of a config.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Import {
    /// Our fields by their paths.
    pub settings: IndexMap<String, Value>,
    /// One a key of theirs, in their order.
    pub notes: Vec<Note>,
}

/// What became of a key.
#[derive(Clone, Debug, PartialEq)]
pub struct Note {
    /// Their key's path.
    pub key: String,
    /// Its value, as JSON.
    pub value: Value,
    /// What it is here.
    pub became: Became,
}

/// See [`Note`].
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Became {
    /// The same, in a field of ours.
    Mapped(String),
    /// Something else than it was, and why.
    Changed(String, String),
    /// Nothing, and why nothing is lost.
    NoEffect(String),
    /// Nothing, and why that matters.
    Refused(String),
}

/// A config that cannot be read at all.
#[derive(Debug, thiserror::Error)]
#[error("cannot import {}: {problem}", path.display())]
pub struct Error {
    /// The file.
    pub path: PathBuf,
    /// Why.
    pub problem: String,
}

/// What a key of theirs is.
enum Rule {
    /// This field of ours, as it is.
    Same(&'static str),
    /// What the function makes of it.
    With(fn(&Value, &mut Import) -> Became),
    /// Part of what [`Source::whole`] makes of several keys, and that says so.
    Together,
    /// Nothing here.
    Ignored(&'static str),
    /// Nothing here if it has one of these values, as JSON; else it is refused.
    Unless(&'static [&'static str], &'static str),
    /// Nothing that we have.
    Refused(&'static str),
}

/// What is known of a system.
struct Source {
    /// By key; `a.*` is for all keys below `a` that have no rule of their own.
    rules: &'static [(&'static str, Rule)],
    /// What follows from several keys; it notes those whose rule is [`Rule::Together`].
    whole: fn(&Keys, &mut Import),
}

/// A config's keys.
struct Keys(IndexMap<String, Value>);

impl Keys {
    fn get(&self, key: &str) -> Option<&Value> {
        self.0.get(key).filter(|value| !value.is_null() && *value != "auto")
    }

    fn number(&self, key: &str) -> Option<f64> {
        self.get(key).and_then(value::number)
    }

    fn is_on(&self, key: &str) -> bool {
        self.get(key).is_some_and(|it| value::boolean(it) == Some(true))
    }
}

/// Reads the file at `path`, of `system` or of the one that it looks like.
///
/// # Errors
/// If it cannot be read, or looks like nothing that is known.
pub fn import(path: &Path, system: Option<System>) -> Result<Import, Error> {
    let failed = |problem: String| Error { path: path.to_owned(), problem };
    let text = std::fs::read_to_string(path).map_err(|error| failed(error.to_string()))?;
    let system = match system {
        Some(system) => system,
        None => read::system_of(&text)
            .ok_or_else(|| failed("it looks like no system's; name it with `--from`".into()))?,
    };
    let tree = read::tree(system, path, &text).map_err(failed)?;
    Ok(take_over(system, &tree))
}

/// The settings and notes of a config that was read.
fn take_over(system: System, tree: &Map<String, Value>) -> Import {
    let source = match system {
        System::Roll => roll::SOURCE,
        System::Accelerate => accelerate::SOURCE,
        System::Deepspeed => deepspeed::SOURCE,
        System::Trl => trl::SOURCE,
        System::Openrlhf => openrlhf::SOURCE,
        System::Trlx => trlx::SOURCE,
    };
    source.take_over(&Keys(leaves(tree)))
}

impl Source {
    fn take_over(&self, keys: &Keys) -> Import {
        let mut import = Import::default();
        for (key, value) in &keys.0 {
            if let Some(became) = self.apply(key, value, &mut import) {
                import.notes.push(Note { key: key.clone(), value: value.clone(), became });
            }
        }
        (self.whole)(keys, &mut import);
        import.notes.sort_by_key(|note| keys.0.get_index_of(&note.key));
        import
    }

    /// Takes over the keys below `prefix`, which are a config of this system inside another's.
    fn take_over_below(&self, prefix: &str, keys: &Keys, import: &mut Import) {
        let prefix = format!("{prefix}.");
        let below = keys.0.iter().filter_map(|(key, value)| Some((key.strip_prefix(&prefix)?, value)));
        let below = Keys(below.map(|(key, value)| (key.to_owned(), value.clone())).collect());
        let mut inner = self.take_over(&below);
        inner.notes.iter_mut().for_each(|note| note.key.insert_str(0, &prefix));
        import.merge(inner);
    }

    fn apply(&self, key: &str, value: &Value, import: &mut Import) -> Option<Became> {
        let Some(rule) = self.rule(key) else {
            return Some(Became::Refused("there is no such key in what is known of this system".into()));
        };
        if matches!(rule, (name, Rule::Together) if name.ends_with(".*")) {
            // A section that is taken over whole, with all that it does not set.
            return None;
        }
        if value.is_null() {
            return Some(Became::NoEffect("it is not set".into()));
        }
        if value == "auto" {
            return Some(Became::NoEffect("it is decided elsewhere".into()));
        }
        Some(match &rule.1 {
            Rule::Together => return None,
            Rule::Same(field) => {
                import.set(field, value.clone());
                Became::Mapped((*field).to_owned())
            }
            Rule::With(make) => make(value, import),
            Rule::Ignored(why) => Became::NoEffect((*why).to_owned()),
            Rule::Unless(values, why) => match values.contains(&value.to_string().as_str()) {
                true => Became::NoEffect("it is off".into()),
                false => Became::Refused((*why).to_owned()),
            },
            Rule::Refused(why) => Became::Refused((*why).to_owned()),
        })
    }

    /// The rule of the key itself, or else of the nearest `a.*` above it.
    fn rule(&self, key: &str) -> Option<&(&'static str, Rule)> {
        let named = |name: &str| self.rules.iter().find(|(it, _)| *it == name);
        named(key).or_else(|| {
            let above = key.match_indices('.').rev().map(|(at, _)| format!("{}.*", &key[..at]));
            above.into_iter().find_map(|name| named(&name))
        })
    }
}

impl Import {
    fn set(&mut self, field: &str, value: impl Into<Value>) {
        self.settings.insert(field.to_owned(), value.into());
    }

    fn note(&mut self, keys: &Keys, key: &str, became: Became) {
        if let Some(value) = keys.0.get(key) {
            self.notes.push(Note { key: key.to_owned(), value: value.clone(), became });
        }
    }

    /// Adds what another config of the same run says; it has the last word.
    pub fn merge(&mut self, other: Import) {
        self.settings.extend(other.settings);
        self.notes.extend(other.notes);
    }

    /// As arguments of `--set`: JSON is YAML.
    pub fn sets(&self) -> Vec<String> {
        self.settings.iter().map(|(field, value)| format!("{field}={value}")).collect()
    }

    /// As a file of ours.
    pub fn to_yaml(&self) -> String {
        let mut root = Value::Object(Map::new());
        for (field, value) in &self.settings {
            let mut node = &mut root;
            for name in field.split('.') {
                if !node.is_object() {
                    *node = Value::Object(Map::new());
                }
                node = node.as_object_mut().expect("just made").entry(name).or_insert(Value::Null);
            }
            *node = value.clone();
        }
        serde_saphyr::to_string(&root).expect("plain data can be written as YAML")
    }

    /// The account of every key, a line each.
    pub fn report(&self) -> String {
        let line = |Note { key, value, became }: &Note| {
            let (word, rest) = match became {
                Became::Mapped(field) => ("mapped", field.clone()),
                Became::Changed(field, why) => ("changed", format!("{field}: {why}")),
                Became::NoEffect(why) => ("no effect", why.clone()),
                Became::Refused(why) => ("refused", why.clone()),
            };
            format!("{word:<10} {key} = {value} -> {rest}\n")
        };
        self.notes.iter().map(line).collect()
    }

    /// The keys that are nothing here although they matter.
    pub fn refused(&self) -> usize {
        self.notes.iter().filter(|note| matches!(note.became, Became::Refused(_))).count()
    }
}

//! Turns a YAML file into a [`Run`]: reads it, opens what it names, checks all of it, and resolves it on a machine.
//!
//! ```text
//! file -> tree with positions -> Config -> validated, opened, resolved -> Run, Opened
//!         and `--set`s
//! ```
//!
//! All of it happens before a device is opened. Each part reports to one list of problems and goes on, so that a user sees all
//! of them at once.

mod adapters;
mod answers;
mod data;
mod environment;
mod image_rewards;
mod images;
mod open;
mod pair;
mod reference;
mod resolve;
mod reward_models;
mod rewards;
mod stage;
mod steps;
mod texts;

use std::path::Path;

use anyroll_config::{
    Config, Error, Node, Problem, Problems, Reading, RewardKind, RewardTerm, Section, Source, from_node,
    include_strategies,
};

use crate::opened::Opened;
use crate::run::{Machine, Run};

/// A config file as it was read, whatever is wrong with it.
#[derive(Debug)]
pub struct Draft {
    source: Source,
    tree: Node,
    config: Option<Config>,
    problems: Vec<Problem>,
    stand_ins: Vec<String>,
}

/// What a config is prepared for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Purpose {
    /// To run it here.
    Run,
    /// To see whether it would run here: also starts what the rewards start, the user's functions and the sandbox of programs,
    /// and ends it again.
    Check,
    /// To plan its memory, with `zero_stage: auto` left as it is, for a machine that need not be this one.
    Plan,
}

/// A run that can start, and what its config names.
pub struct Prepared {
    /// The config on a machine.
    pub run: Run,
    /// Data, folders and tokenizers, each opened once.
    pub opened: Opened,
}

impl Draft {
    /// Reads the file at `path` and applies `sets` (`pipeline.rlvr.steps=10`, the value in YAML) in their order.
    ///
    /// # Errors
    /// For a file that cannot be read or is no YAML. What else is wrong is an error of what is made of the draft.
    pub fn read(path: &Path, sets: &[String]) -> Result<Self, Error> {
        Self::parse(path, text_of(path)?, sets)
    }

    /// As [`Self::read`], of the `text` that was read at `path` already.
    ///
    /// # Errors
    /// For a text that is no YAML.
    pub fn parse(path: &Path, text: String, sets: &[String]) -> Result<Self, Error> {
        let source = Source { path: path.to_owned(), text, sets: sets.to_vec() };
        let invalid = |problem| Error::Invalid(vec![source.render(problem)]);
        let mut tree = Node::parse(&source.text).map_err(invalid)?;
        let mut problems = Vec::new();
        for (index, set) in sets.iter().enumerate() {
            problems.extend(tree.set(index, set).err());
        }
        problems.extend(include_strategies(&mut tree));
        let Reading { value: config, problems: found, stand_ins } = from_node(&tree);
        problems.extend(found);
        Ok(Self { source, tree, config, problems, stand_ins })
    }

    /// What the file says, `--set`s applied and defaults filled in, with stand-ins where it cannot be read; `None` if there are
    /// none for what is wrong.
    pub fn config(&self) -> Option<&Config> {
        self.config.as_ref()
    }

    /// The file's text, as the user wrote it.
    pub fn as_written(&self) -> &str {
        &self.source.text
    }

    /// The config and what it names, checked as far as that does not depend on a machine.
    ///
    /// # Errors
    /// All that is wrong.
    pub fn open(&self) -> Result<(Config, Opened), Error> {
        self.checked(|config, at| {
            self.validate(config, at);
            let opened = open::open(config, at)?;
            Some((config.clone(), opened))
        })
    }

    /// The config on `machine`.
    ///
    /// # Errors
    /// All that is wrong.
    pub fn prepare(&self, machine: &Machine, purpose: Purpose) -> Result<Prepared, Error> {
        self.checked(|config, at| {
            self.validate(config, at);
            let opened = open::open(config, at);
            let run = resolve::resolve(config, at, machine, opened.as_ref());
            if purpose != Purpose::Plan {
                rewards::have_keys(config, at);
            }
            if purpose == Purpose::Check {
                rewards::start(config, opened.as_ref().and_then(Opened::dataset), at);
            }
            let (mut run, opened) = run.zip(opened).filter(|_| at.is_config_sound())?;
            if purpose != Purpose::Plan {
                stage::settle(&mut run, &opened, at);
            }
            Some(Prepared { run, opened })
        })
    }

    fn validate(&self, config: &Config, at: &Section) {
        config.validate(at);
        let strategies =
            ["strategy", "roles.policy.strategy", "roles.reference.strategy", "roles.critic.strategy"];
        let is_sound = ["name", "threads", "model"].iter().chain(&strategies).all(|name| at.is_sound(name));
        if self.problems.is_empty() && is_sound {
            config.roles.warn_of_idle(&config.pipeline);
        }
    }

    /// What `make` makes of the config, or all that is wrong, what it reports included.
    fn checked<T>(&self, make: impl FnOnce(&Config, &Section) -> Option<T>) -> Result<T, Error> {
        let problems = Problems::new(&self.tree, self.problems.clone(), self.stand_ins.clone());
        let made = self.config.as_ref().and_then(|config| make(config, &problems.root()));
        match made {
            Some(made) if problems.is_empty() => Ok(made),
            _ => Err(Error::Invalid(problems.rendered(&self.source))),
        }
    }
}

/// The text of the config at `path`.
///
/// # Errors
/// For a file that cannot be read, or is not UTF-8.
pub fn text_of(path: &Path) -> Result<String, Error> {
    std::fs::read_to_string(path).map_err(|source| Error::Read { path: path.to_owned(), source })
}

/// The reward `name` with the fields that `sets` give it, such as `tolerance=1e-3`, checked.
///
/// # Errors
/// All that is wrong.
pub fn read_reward(name: &str, sets: &[String]) -> Result<RewardKind, Error> {
    let source = Source { path: "reward".into(), text: format!("{name}: {{}}"), sets: sets.to_vec() };
    let mut tree =
        Node::parse(&source.text).map_err(|problem| Error::Invalid(vec![source.render(problem)]))?;
    let mut problems = Vec::new();
    for (index, set) in sets.iter().enumerate() {
        problems.extend(tree.set(index, &format!("{name}.{set}")).err());
    }
    let Reading::<RewardTerm> { value: term, problems: found, stand_ins } = from_node(&tree);
    problems.extend(found);
    let problems = Problems::new(&tree, problems, stand_ins);
    if let Some(term) = &term {
        rewards::check_alone(&term.kind, &problems.root());
    }
    match term {
        Some(term) if problems.is_empty() => Ok(term.kind),
        _ => Err(Error::Invalid(problems.rendered(&source))),
    }
}

#[cfg(test)]
mod tests;

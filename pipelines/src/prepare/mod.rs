//! Turns a YAML file into a [`Run`]: reads it, opens what it names, checks all of it, and resolves it on a machine.
//!
//! ```text
//! file -> tree with positions -> Config -> checks, which open files -> Run
//!         and `--set`s
//! ```
//!
//! All of it happens before a device is opened.

mod check;
mod check_algorithm;
mod check_data;
mod check_diffusers;
mod check_diffusion;
mod check_environment;
mod check_image_reward;
mod check_offline;
mod check_pair;
mod check_reward;
mod reference;
mod resolve;
mod reward_models;
mod stage;
mod steps;

use std::path::Path;

use crate::config::{
    Config, Error, Node, Problem, RewardKind, RewardTerm, Source, from_node, include_strategies,
};
use crate::data::Dataset;
use crate::run::{Machine, Run};

/// A config file as it was read.
#[derive(Debug)]
pub struct Loaded {
    /// What the file says, `--set`s applied and defaults filled in.
    pub config: Config,
    /// Its prompts and answers, if it has any: read to check that they fit the other fields.
    pub dataset: Option<Dataset>,
    source: Source,
    tree: Node,
}

impl Loaded {
    /// Reads the file at `path`, applies `sets` (`pipeline.rlvr.steps=10`, the value in YAML) in their
    /// order, and checks all that does not depend on the machine.
    pub fn read(path: &Path, sets: &[String]) -> Result<Self, Error> {
        Self::parse(path, text_of(path)?, sets)
    }

    /// As [`Self::read`], of the `text` that was read at `path` already.
    pub fn parse(path: &Path, text: String, sets: &[String]) -> Result<Self, Error> {
        let source = Source { path: path.to_owned(), text, sets: sets.to_vec() };
        let parsed = || {
            let mut tree = Node::parse(&source.text)?;
            for (index, set) in sets.iter().enumerate() {
                tree.set(index, set)?;
            }
            include_strategies(&mut tree)?;
            let config = from_node(&tree)?;
            let dataset = check::check(&config, &tree)?;
            Ok((config, dataset, tree))
        };
        let (config, dataset, tree) = parsed().map_err(|problem| source.render(problem))?;
        Ok(Self { config, dataset, source, tree })
    }

    /// The file's text, as the user wrote it.
    pub fn as_written(&self) -> &str {
        &self.source.text
    }

    /// What it comes to on `machine`, checked.
    pub fn resolve(&self, machine: &Machine) -> Result<Run, Error> {
        let resolved = || {
            let check = check::Check { tree: &self.tree };
            let mut run = self.resolve_on(machine, &check)?;
            check.keys(&self.config)?;
            stage::settle(&mut run, self.dataset.as_ref(), &check)?;
            Ok(run)
        };
        resolved().map_err(|problem| self.source.render(problem))
    }

    /// Starts what the rewards start on this machine, the user's functions and the sandbox of programs, and ends it again.
    pub fn try_rewards(&self) -> Result<(), Error> {
        let check = check::Check { tree: &self.tree };
        check.rewards_start(&self.config).map_err(|problem| self.source.render(problem))
    }

    /// As [`Self::resolve`], with `zero_stage: auto` left as it is, and for a machine that need not be this one.
    pub fn resolve_but_stage(&self, machine: &Machine) -> Result<Run, Error> {
        let check = check::Check { tree: &self.tree };
        self.resolve_on(machine, &check).map_err(|problem| self.source.render(problem))
    }

    fn resolve_on(&self, machine: &Machine, check: &check::Check) -> Result<Run, Problem> {
        let mut run = resolve::resolve(&self.config, &self.tree, machine)?;
        if let Some(dataset) = &self.dataset {
            steps::settle(&mut run, dataset, check)?;
            check_data::settle(&mut run.config, dataset);
            check_offline::settle(&mut run.config, dataset);
        }
        Ok(run)
    }
}

/// The text of the config at `path`.
pub fn text_of(path: &Path) -> Result<String, Error> {
    std::fs::read_to_string(path).map_err(|source| Error::Read { path: path.to_owned(), source })
}

/// The reward `name` with the fields that `sets` give it, such as `tolerance=1e-3`, checked.
pub fn read_reward(name: &str, sets: &[String]) -> Result<RewardKind, Error> {
    let source = Source { path: "reward".into(), text: format!("{name}: {{}}"), sets: sets.to_vec() };
    let parsed = || {
        let mut tree = Node::parse(&source.text)?;
        for (index, set) in sets.iter().enumerate() {
            tree.set(index, &format!("{name}.{set}"))?;
        }
        let term: RewardTerm = from_node(&tree)?;
        check_reward::check_reward(&term.kind, &tree)?;
        Ok(term.kind)
    };
    parsed().map_err(|problem| source.render(problem))
}

#[cfg(test)]
pub(crate) mod tests;

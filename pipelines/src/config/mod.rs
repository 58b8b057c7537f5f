//! What a YAML file says ([`Config`]) and what it comes to on a machine ([`Run`]).
//!
//! ```text
//! file -> tree with positions -> Config      -> Run
//!         and `--set`s           and checks     and checks that need the machine
//! ```
//!
//! All of it happens before any device is opened, and every error names the field, points at the line or
//! the `--set` that is to blame, and says what would be right. Read `schema` for the fields, `algorithm`, `data`,
//! `environment`, `metrics` and `optimizer` for those of their sections, `offline` and `diffusion` for those of their
//! pipelines.

mod algorithm;
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
mod data;
mod de;
mod diffusion;
mod environment;
mod error;
mod image_reward;
mod include;
mod metrics;
mod model;
mod offline;
mod optimizer;
mod reference;
mod resolve;
mod reward;
mod reward_model;
mod schema;
mod stage;
mod steps;
mod tree;

use std::path::Path;

pub use algorithm::*;
pub use data::*;
pub use diffusion::*;
pub use environment::{EnvironmentConfig, Speaker};
pub use error::{Error, Invalid};
pub use image_reward::*;
pub use metrics::{Listen, MetricsConfig};
pub use model::{DiffusersConfig, FolderConfig, LoraConfig};
pub use offline::*;
pub use optimizer::*;
pub use resolve::{BackendFacts, Batches, Machine, Role, RolloutRole, Run};
pub use reward::*;
pub use reward_model::*;
pub use schema::*;
pub use stage::ZeroStage;
pub use steps::{DataEpochs, Measure, Steps};

use crate::data::Dataset;
use error::{Problem, Source};
use tree::Node;

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
            include::include_strategies(&mut tree)?;
            let config = de::from_node(&tree)?;
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
        check
            .rewards_start(&self.config, self.dataset.as_ref())
            .map_err(|problem| self.source.render(problem))
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
        let term: RewardTerm = de::from_node(&tree)?;
        check_reward::check_reward(&term.kind, &tree)?;
        Ok(term.kind)
    };
    parsed().map_err(|problem| source.render(problem))
}

impl Config {
    /// The config as YAML with every field, defaults included: reading it gives the same config again.
    pub fn to_yaml(&self) -> String {
        serde_saphyr::to_string(self).expect("plain data can be written as YAML")
    }
}

#[cfg(test)]
mod tests;

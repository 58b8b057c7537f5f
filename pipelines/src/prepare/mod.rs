//! Turns a YAML file into a [`Run`]: reads it, opens the files that it names, checks everything, and resolves the
//! config on a machine.
//!
//! ```text
//! file -> tree with positions -> Config -> validated, opened, resolved -> Run, Opened
//!         and `--set`s
//! ```
//!
//! Everything happens before a device is opened. Each part reports to one list of problems and continues, so that a
//! user sees all problems at once.

mod adapters;
mod answers;
mod data;
mod environment;
mod experts;
mod expressed;
mod frozen;
mod image_rewards;
mod images;
mod layers;
mod locate;
mod open;
mod pair;
mod reference;
mod resolve;
mod reward_models;
mod rewards;
mod routing;
mod sequence;
mod shards;
mod stage;
mod steps;
mod tensor;
mod texts;
mod trackers;
mod weights;

use std::path::Path;

use anyroll_config::{
    Config, Error, EvaluateConfig, Node, Problem, Problems, Reading, RewardKind, RewardTerm, Section, Source,
    ZeroStage, from_node, include_strategies, write_out,
};

use anyroll_reward::OpenModel;

use crate::hub::Hub;
use crate::opened::Opened;
use crate::run::{Machine, Run};

/// A config file as it was read, valid or not.
#[derive(Debug)]
pub struct Draft {
    source: Source,
    tree: Node,
    config: Option<Config>,
    problems: Vec<Problem>,
    stand_ins: Vec<String>,
    hub: Hub,
}

/// Purpose of preparing a config.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Purpose {
    /// Run on this machine.
    Run,
    /// Check on this machine, or for another one: a backend that is not here is assumed to have every device asked for,
    /// and `zero_stage: auto` stays unresolved on it. Also starts and stops the processes of rewards: the user's
    /// functions and the sandbox of programs.
    Check,
    /// The same check, which runs no code that the config or its data name.
    CheckWithoutCode,
    /// Plan the memory, for any machine; `zero_stage: auto` stays unresolved.
    Plan,
    /// Sample on this machine for a run on other hosts, whose backends and devices are assumed. Weights are not read.
    Rollout,
}

/// A run that can start, with the opened files of its config.
pub struct Prepared {
    /// The resolved run.
    pub run: Run,
    /// Data, folders and tokenizers, each opened once.
    pub opened: Opened,
}

impl Draft {
    /// Reads the file at `path` and applies `sets` in order, such as `pipeline.rlvr.steps=10`, with values in YAML.
    ///
    /// # Errors
    /// A file that cannot be read or is not YAML. Methods of the draft return all other errors.
    pub fn read(path: &Path, sets: &[String]) -> Result<Self, Error> {
        Self::parse(path, text_of(path)?, sets)
    }

    /// Same as [`Self::read`], for the `text` that was already read from `path`.
    ///
    /// # Errors
    /// A text that is not YAML.
    pub fn parse(path: &Path, text: String, sets: &[String]) -> Result<Self, Error> {
        let source = Source { path: path.to_owned(), text, sets: sets.to_vec() };
        let invalid = |problem| Error::Invalid(vec![source.render(problem)]);
        let mut tree = Node::parse(&source.text).map_err(invalid)?;
        let mut problems = Vec::new();
        for (index, set) in sets.iter().enumerate() {
            problems.extend(tree.set(index, set).err());
        }
        if tree.is_nothing() && problems.is_empty() {
            return Err(invalid(no_field(&tree)));
        }
        problems.extend(include_strategies(&mut tree));
        write_out(&mut tree);
        let Reading { value: mut config, problems: found, stand_ins } = from_node::<Config>(&tree);
        problems.extend(found);
        if tree.get_mut("strategy").is_none()
            && let Some(config) = &mut config
            && (config.trains_a_reward_model() || config.trains_values())
        {
            // The memory of these runs is not planned, so that `auto` would be an error that nobody wrote.
            config.strategy.zero_stage = ZeroStage::Stage(0);
        }
        let hub = Hub::of_environment(false);
        Ok(Self { source, tree, config, problems, stand_ins, hub })
    }

    /// The same draft with models and data sets in the cache of `hub`.
    pub fn with_hub(self, hub: Hub) -> Self {
        Self { hub, ..self }
    }

    /// The config with `--set`s and defaults applied, and with placeholders for invalid values; `None` if a value has
    /// no placeholder.
    pub fn config(&self) -> Option<&Config> {
        self.config.as_ref()
    }

    /// Text of the file.
    pub fn as_written(&self) -> &str {
        &self.source.text
    }

    /// The config and its opened files, checked as far as possible without a machine.
    ///
    /// # Errors
    /// All problems.
    pub fn open(&self) -> Result<(Config, Opened), Error> {
        self.checked(|config, at| {
            let opened = open::open(config, at, true)?;
            Some((config.clone(), opened))
        })
    }

    /// Resolves the config on `machine`.
    ///
    /// # Errors
    /// All problems.
    pub fn prepare(&self, machine: &Machine, purpose: Purpose) -> Result<Prepared, Error> {
        self.checked(|config, at| {
            let trains = !matches!(purpose, Purpose::Plan | Purpose::Rollout);
            let opened = open::open(config, at, trains);
            let run = resolve::resolve(config, at, machine, opened.as_ref(), purpose);
            if trains {
                rewards::have_keys(config, at);
            }
            // Rank 0 starts the trackers.
            let is_first = machine.rank.as_ref().is_none_or(|rank| rank.rank == 0);
            if matches!(purpose, Purpose::Run | Purpose::Check) && is_first {
                trackers::check(&config.metrics, &at.below("metrics"));
            }
            let dataset = opened.as_ref().and_then(Opened::dataset);
            match purpose {
                Purpose::Check => rewards::start(config, dataset, true, at),
                Purpose::CheckWithoutCode => rewards::start(config, dataset, false, at),
                Purpose::Run | Purpose::Plan | Purpose::Rollout => {}
            }
            let (mut run, opened) = run.zip(opened).filter(|_| at.is_config_sound())?;
            // The memory of a device that is not here is unknown.
            let has_memory =
                machine.missing(&run).next().is_none() || run.roles().all(|role| !role.has_open_stage);
            if trains && has_memory {
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

    /// Returns the result of `make` on the validated config with whole paths, or all problems, including those that
    /// `make` reports.
    fn checked<T>(&self, make: impl FnOnce(&Config, &Section) -> Option<T>) -> Result<T, Error> {
        let problems = Problems::new(&self.tree, self.problems.clone(), self.stand_ins.clone());
        let at = problems.root();
        let located = self.config.clone().map(|mut config| {
            self.validate(&config, &at);
            let folder = self.source.path.parent().unwrap_or(Path::new(""));
            locate::locate(&mut config, folder, &self.hub, &at);
            config
        });
        let made = located.as_ref().and_then(|config| make(config, &at));
        match made {
            Some(made) if problems.is_empty() => Ok(made),
            _ => Err(Error::Invalid(problems.rendered(&self.source))),
        }
    }
}

/// Reads the text of the config at `path`.
///
/// # Errors
/// A file that cannot be read, or is not UTF-8.
pub fn text_of(path: &Path) -> Result<String, Error> {
    std::fs::read_to_string(path).map_err(|source| Error::Read { path: path.to_owned(), source })
}

/// Problem of a file that is empty, or has comments only.
fn no_field(tree: &Node) -> Problem {
    Problem {
        field: String::new(),
        origin: tree.origin,
        message: "the file has no field".to_owned(),
        help: "write a config: `anyroll quickstart` writes one that trains, and configs/ has others"
            .to_owned(),
    }
}

/// Reads and checks the reward `name` with the fields in `sets`, such as `tolerance=1e-3`.
///
/// # Errors
/// All problems.
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

/// Reads and checks the inputs of an evaluation without a run, in YAML. Also returns the opened reward models, in the
/// order of the reward's terms.
///
/// # Errors
/// All problems.
pub fn read_evaluate(text: &str) -> Result<(EvaluateConfig, Vec<OpenModel>), Error> {
    let source = Source { path: "arguments".into(), text: text.to_owned(), sets: Vec::new() };
    let tree = Node::parse(&source.text).map_err(|problem| Error::Invalid(vec![source.render(problem)]))?;
    let Reading::<EvaluateConfig> { value, problems, stand_ins } = from_node(&tree);
    let problems = Problems::new(&tree, problems, stand_ins);
    let at = problems.root();
    let opened = value.as_ref().and_then(|inputs| {
        inputs.validate(&at);
        let reward = inputs.reward.as_ref();
        reward.map_or_else(|| Some(Vec::new()), |reward| rewards::open(reward, &at.below("reward")))
    });
    match value.zip(opened) {
        Some(read) if problems.is_empty() => Ok(read),
        _ => Err(Error::Invalid(problems.rendered(&source))),
    }
}

#[cfg(test)]
mod tests;

//! `ci/same.yaml`: the runs that are compared, the models that they need, and mistakes whose messages are
//! compared.

use std::collections::BTreeMap;
use std::fs;
use std::path::{Path, PathBuf};

use serde::Deserialize;

use crate::Result;

/// The whole file.
#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Listed {
    /// Changes that runs have in common, by name, in the syntax of `--set`.
    #[serde(default)]
    changes: BTreeMap<String, Vec<String>>,
    /// Models for `{models}/NAME` in the `set` of a run, by name.
    models: BTreeMap<String, Model>,
    runs: Vec<Entry>,
    /// Configs with a mistake.
    pub mistakes: Vec<Mistake>,
}

/// A model that the older programs train and export, for the runs of both sides.
#[derive(Clone, Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Model {
    /// The config that trains it.
    pub config: PathBuf,
    /// Names of `changes`.
    #[serde(default, rename = "use")]
    uses: Vec<String>,
    /// Further changes.
    #[serde(default)]
    pub set: Vec<String>,
}

#[derive(Clone, Debug, Deserialize)]
#[serde(deny_unknown_fields)]
struct Entry {
    name: String,
    config: PathBuf,
    #[serde(default, rename = "use")]
    uses: Vec<String>,
    #[serde(default)]
    set: Vec<String>,
    /// World sizes, one run for each.
    #[serde(default = "one")]
    ranks: Vec<usize>,
    #[serde(default)]
    resumed: bool,
}

/// A run that is made on both sides.
#[derive(Clone, Debug, PartialEq)]
pub struct Run {
    /// Unique, and the name of its folder.
    pub name: String,
    /// Relative to the root of the checkout.
    pub config: PathBuf,
    /// All changes to the config.
    pub set: Vec<String>,
    /// Interrupt it once more, resume it, and compare the result.
    pub resumed: bool,
}

/// A config with a mistake: a listed one, changed.
#[derive(Clone, Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Mistake {
    /// The config to change.
    pub config: PathBuf,
    /// Changes in the syntax of `--set`.
    #[serde(default)]
    pub set: Vec<String>,
    /// A text of the file, which must be there, and its replacement.
    #[serde(default)]
    pub replace: Vec<(String, String)>,
}

fn one() -> Vec<usize> {
    vec![1]
}

impl Listed {
    /// Reads the file at `path`.
    pub fn read(path: &Path) -> Result<Self> {
        let text =
            fs::read_to_string(path).map_err(|error| format!("cannot read {}: {error}", path.display()))?;
        let listed: Self =
            serde_saphyr::from_str(&text).map_err(|error| format!("{}: {error}", path.display()))?;
        let uses = listed.runs.iter().map(|it| &it.uses).chain(listed.models.values().map(|it| &it.uses));
        match uses.flatten().find(|name| !listed.changes.contains_key(*name)) {
            Some(name) => Err(format!("{}: no `changes` are named `{name}`", path.display())),
            None => Ok(listed),
        }
    }

    /// Returns the runs of these configs, or all runs if `configs` is empty. A config that is not listed is
    /// one run, unchanged.
    pub fn runs_of(&self, configs: &[PathBuf]) -> Vec<Run> {
        let listed: Vec<Run> = self.runs.iter().flat_map(|entry| self.expanded(entry)).collect();
        if configs.is_empty() {
            return listed;
        }
        let of_config = |config: &PathBuf| {
            let runs: Vec<Run> = listed.iter().filter(|run| run.config == *config).cloned().collect();
            if runs.is_empty() { vec![unlisted(config)] } else { runs }
        };
        configs.iter().flat_map(of_config).collect()
    }

    /// Returns the models that `runs` name.
    pub fn models_of(&self, runs: &[Run]) -> Vec<(&str, Model)> {
        let is_needed = |name: &str| {
            let path = format!("{{models}}/{name}");
            runs.iter().flat_map(|run| &run.set).any(|set| set.contains(&path))
        };
        let needed = self.models.iter().filter(|(name, _)| is_needed(name));
        let whole = |model: &Model| Model { set: self.all_changes(&model.uses, &model.set), ..model.clone() };
        needed.map(|(name, model)| (name.as_str(), whole(model))).collect()
    }

    fn expanded(&self, entry: &Entry) -> Vec<Run> {
        let of_ranks = |&ranks: &usize| Run {
            name: if entry.ranks.len() > 1 { format!("{}_x{ranks}", entry.name) } else { entry.name.clone() },
            config: entry.config.clone(),
            set: [self.all_changes(&entry.uses, &entry.set), vec![format!("devices={ranks}")]].concat(),
            resumed: entry.resumed,
        };
        entry.ranks.iter().map(of_ranks).collect()
    }

    /// Returns all changes, the common ones first, so that a run may override them.
    fn all_changes(&self, uses: &[String], set: &[String]) -> Vec<String> {
        let common = uses.iter().flat_map(|name| &self.changes[name]);
        common.chain(set).cloned().collect()
    }
}

fn unlisted(config: &Path) -> Run {
    let name = config.file_stem().unwrap_or_default().to_string_lossy().into_owned();
    Run { name, config: config.to_owned(), set: Vec::new(), resumed: false }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn listed() -> Listed {
        let text = "
            changes: {short: [steps=1]}
            models: {teacher: {config: t.yaml}, judge: {config: j.yaml}}
            runs:
              - {name: sync, config: a.yaml, use: [short], ranks: [1, 2], resumed: true}
              - {name: distill, config: b.yaml, set: ['roles.reference.path={models}/teacher']}
            mistakes: []";
        serde_saphyr::from_str(text).unwrap()
    }

    #[test]
    fn each_world_size_is_a_run() {
        let runs = listed().runs_of(&[]);
        let names: Vec<&str> = runs.iter().map(|run| run.name.as_str()).collect();
        assert_eq!(names, ["sync_x1", "sync_x2", "distill"]);
        assert_eq!(runs[1].set, ["steps=1", "devices=2"]);
        assert!(runs[1].resumed && !runs[2].resumed);
    }

    #[test]
    fn configs_choose_runs_and_an_unlisted_one_runs_as_it_is() {
        let runs = listed().runs_of(&["b.yaml".into(), "c/other.yaml".into()]);
        assert_eq!(runs[0].name, "distill");
        assert_eq!(
            runs[1],
            Run { name: "other".into(), config: "c/other.yaml".into(), set: vec![], resumed: false }
        );
    }

    #[test]
    fn only_models_that_are_needed_are_made() {
        let listed = listed();
        let of = |configs: &[PathBuf]| listed.models_of(&listed.runs_of(configs)).len();
        assert_eq!((of(&[]), of(&["a.yaml".into()])), (1, 0));
    }

    #[test]
    fn the_shipped_list_is_read_and_its_configs_exist() {
        let root = Path::new(env!("CARGO_MANIFEST_DIR")).join("../..");
        let listed = Listed::read(&root.join("ci/same.yaml")).unwrap();
        let runs = listed.runs_of(&[]);
        let configs = runs.iter().map(|run| &run.config).chain(listed.models.values().map(|it| &it.config));
        for config in configs.chain(listed.mistakes.iter().map(|it| &it.config)) {
            assert!(root.join(config).exists(), "{} is not there", config.display());
        }
        let mut names: Vec<&str> = runs.iter().map(|run| run.name.as_str()).collect();
        names.sort_unstable();
        names.dedup();
        assert_eq!(names.len(), runs.len(), "two runs of one name");
    }
}

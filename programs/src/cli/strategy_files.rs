//! Files of other systems that set a run's strategy, without an import.

use std::path::PathBuf;

use anyroll_import::{Machines, Origin};
use anyroll_pipelines::{Error, Result};
use clap::Args;

/// At most one file of another system.
#[derive(Debug, Args)]
pub(super) struct StrategyFiles {
    /// Take the strategy from a file of `accelerate config`; `--set` overrides it
    #[arg(long, value_name = "FILE")]
    accelerate_config: Option<PathBuf>,
    /// Take the strategy from a DeepSpeed JSON; `--set` overrides it
    #[arg(long, value_name = "FILE", conflicts_with = "accelerate_config")]
    deepspeed_config: Option<PathBuf>,
}

impl StrategyFiles {
    /// Overrides of the config with the text `config`: first those of a file, then the user's `sets`.
    pub(super) fn changes(&self, config: &str, sets: &[String]) -> Result<Changes> {
        let files =
            [(&self.accelerate_config, Origin::Accelerate), (&self.deepspeed_config, Origin::Deepspeed)];
        let mut all = Changes { sets: Vec::new(), machines: None, told: Vec::new() };
        for (file, origin) in files {
            if let Some(file) = file {
                let changes = anyroll_import::changes(file, origin, config)
                    .map_err(|error| Error::Import(error.into()))?;
                all.told.extend(changes.told.iter().map(|row| format!("{}: {row}", file.display())));
                all.sets.extend(changes.sets);
                all.machines = changes.machines;
            }
        }
        all.sets.extend_from_slice(sets);
        Ok(all)
    }
}

/// Overrides of a config.
pub(super) struct Changes {
    sets: Vec<String>,
    /// The machines among which a file places this one.
    pub(super) machines: Option<Machines>,
    /// Differences between what a file says and what it becomes.
    told: Vec<String>,
}

impl Changes {
    /// Logs the differences, and returns the overrides.
    pub(super) fn tell(self) -> Vec<String> {
        self.told.iter().for_each(|told| tracing::warn!("{told}"));
        self.sets
    }
}

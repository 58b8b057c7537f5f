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
    /// Overrides of the config with the text `config`: first those of a file, whose differences are logged,
    /// then the user's `sets`. Also the machines among which the file places this one.
    pub(super) fn changes(&self, config: &str, sets: &[String]) -> Result<(Vec<String>, Option<Machines>)> {
        let files =
            [(&self.accelerate_config, Origin::Accelerate), (&self.deepspeed_config, Origin::Deepspeed)];
        let (mut all, mut machines) = (Vec::new(), None);
        for (file, origin) in files {
            if let Some(file) = file {
                let changes = anyroll_import::changes(file, origin, config)
                    .map_err(|error| Error::Import(error.into()))?;
                for row in changes.told {
                    tracing::warn!("{}: {row}", file.display());
                }
                all.extend(changes.sets);
                machines = changes.machines;
            }
        }
        all.extend_from_slice(sets);
        Ok((all, machines))
    }
}

//! Other systems' configs, turned into ours.
//!
//! ```text
//! file -> flat keys -> Ledger: each key is mapped, changed, idle or refused -> Import { yaml, rows }
//! ```
//!
//! A key is told of exactly once: what an importer's rules do not take is refused by name. So a setting is never
//! lost in silence, which is what a user who moves has to be able to rely on.

mod accelerate;
mod command;
mod deepspeed;
mod document;
mod ledger;
mod megatron;
mod openrlhf;
mod openrlhf_offline;
mod roll;
mod roll_agents;
mod roll_data;
mod roll_loss;
mod roll_rewards;
mod roll_strategy;
mod roll_teacher;
mod rules;
mod schedule;
mod shared;
mod shell;
#[cfg(test)]
mod tests;
mod trl;
mod trl_offline;
mod trlx;
mod values;
mod verl;

use std::path::{Path, PathBuf};

use clap::ValueEnum;
use serde_json::Value;

pub use ledger::{Fate, Row};

use document::Document;
use ledger::Ledger;

/// Whose config a file is.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum Origin {
    /// ROLL's RLVR YAML, with its `defaults:` and `${...}`.
    Roll,
    /// `accelerate config`'s YAML, with a deepspeed or an fsdp section.
    Accelerate,
    /// DeepSpeed's JSON.
    Deepspeed,
    /// What `trl grpo --config` or `trl rloo --config` reads.
    Trl,
    /// What `trl sft --config` reads.
    TrlSft,
    /// What `trl dpo --config` reads.
    TrlDpo,
    /// What `trl reward --config` reads.
    TrlReward,
    /// What `trl kto --config` reads.
    TrlKto,
    /// The same of TRL's GKD script.
    TrlGkd,
    /// A script or a line that calls `openrlhf.cli.train_ppo_ray`, with flat or dotted flags.
    Openrlhf,
    /// One that calls `openrlhf.cli.train_sft`.
    OpenrlhfSft,
    /// One that calls `openrlhf.cli.train_dpo`.
    OpenrlhfDpo,
    /// One that calls `openrlhf.cli.train_rm`.
    OpenrlhfRm,
    /// One that calls `openrlhf.cli.train_kto`.
    OpenrlhfKto,
    /// A script or a line that calls `verl.trainer.main_ppo`, or its YAML.
    Verl,
    /// trlx's TRLConfig YAML.
    Trlx,
}

/// Why a file could not be imported.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// The file could not be read.
    #[error("cannot read {}", path.display())]
    Read {
        /// The file.
        path: PathBuf,
        /// Why.
        source: std::io::Error,
    },
    /// The file is not what it should be.
    #[error("{}: {problem}", path.display())]
    Syntax {
        /// The file.
        path: PathBuf,
        /// What is wrong, and where.
        problem: String,
    },
    /// No system that we know has such a config.
    #[error(
        "{}: whose config this is cannot be told from its keys; say it with --from roll, accelerate, deepspeed, trl, \
         trl-sft, trl-dpo, trl-reward, trl-kto, trl-gkd, openrlhf, openrlhf-sft, openrlhf-dpo, openrlhf-rm, openrlhf-kto, verl or \
         trlx",
        path.display()
    )]
    Unknown {
        /// The file.
        path: PathBuf,
    },
    /// `--accelerate-config` and `--deepspeed-config` change a run only where nothing is refused.
    #[error("{}: {count} of its settings have no counterpart here, the first: {first}", path.display())]
    Refused {
        /// The file.
        path: PathBuf,
        /// How many.
        count: usize,
        /// The first one and why.
        first: String,
    },
}

/// What became of a foreign config.
#[derive(Debug)]
pub struct Import {
    /// Whose it was.
    pub origin: Origin,
    /// One row a key, in the file's order.
    pub rows: Vec<Row>,
    draft: ledger::Draft,
}

/// Reads `path` as `origin`'s config, or as that of the system whose keys it has.
///
/// # Errors
/// The file cannot be read or parsed, or it cannot be told whose it is.
pub fn import(path: &Path, origin: Option<Origin>) -> Result<Import, Error> {
    import_for(path, origin, shared::R)
}

/// What another system's file changes in a run of ours.
#[derive(Debug)]
pub struct Changes {
    /// As `--set` arguments.
    pub sets: Vec<String>,
    /// What the file does not say as it comes out: what means something else here, and its system's defaults.
    pub told: Vec<Row>,
}

/// What `origin`'s file at `path` changes in a run of our config, whose text is `config`.
///
/// # Errors
/// As [`import`], and [`Error::Refused`] if a setting has no counterpart here: a run must not start without it.
pub fn changes(path: &Path, origin: Origin, config: &str) -> Result<Changes, Error> {
    import_for(path, Some(origin), &pipeline_of(config))?.changes(path)
}

/// The pipeline that our config is for. Where it says none, reading it as a config tells what is wrong.
fn pipeline_of(config: &str) -> String {
    let config = serde_saphyr::from_str::<Value>(config).unwrap_or_default();
    let name = config["pipeline"].as_object().and_then(|pipeline| pipeline.keys().next());
    name.map_or_else(|| shared::R.to_owned(), |name| format!("pipeline.{name}"))
}

/// As [`import`]; what accelerate and DeepSpeed say of the optimizer is for that of `pipeline`.
fn import_for(path: &Path, origin: Option<Origin>, pipeline: &str) -> Result<Import, Error> {
    let document = Document::read(path, origin)?;
    let origin = match origin {
        Some(origin) => origin,
        None => document.origin().ok_or_else(|| Error::Unknown { path: path.to_owned() })?,
    };
    let mut ledger = Ledger::new(document);
    match origin {
        Origin::Roll => roll::apply(&mut ledger),
        Origin::Accelerate => accelerate::apply(&mut ledger, path, pipeline)?,
        Origin::Deepspeed => deepspeed::apply(&mut ledger, "", pipeline),
        Origin::Trl => trl::apply(&mut ledger),
        Origin::TrlSft => trl_offline::apply(&mut ledger, trl_offline::Trainer::Sft),
        Origin::TrlDpo => trl_offline::apply(&mut ledger, trl_offline::Trainer::Dpo),
        Origin::TrlReward => trl_offline::apply(&mut ledger, trl_offline::Trainer::Reward),
        Origin::TrlKto => trl_offline::apply(&mut ledger, trl_offline::Trainer::Kto),
        Origin::TrlGkd => trl_offline::apply(&mut ledger, trl_offline::Trainer::Gkd),
        Origin::Openrlhf => openrlhf::apply(&mut ledger),
        Origin::OpenrlhfSft => openrlhf_offline::apply(&mut ledger, openrlhf_offline::Trainer::Sft),
        Origin::OpenrlhfDpo => openrlhf_offline::apply(&mut ledger, openrlhf_offline::Trainer::Dpo),
        Origin::OpenrlhfRm => openrlhf_offline::apply(&mut ledger, openrlhf_offline::Trainer::Rm),
        Origin::OpenrlhfKto => openrlhf_offline::apply(&mut ledger, openrlhf_offline::Trainer::Kto),
        Origin::Verl => verl::apply(&mut ledger),
        Origin::Trlx => trlx::apply(&mut ledger),
    }
    let (draft, rows) = ledger.finish();
    Ok(Import { origin, rows, draft })
}

impl Import {
    /// Our YAML: a whole run from a pipeline's config, its `strategy` from accelerate's and DeepSpeed's.
    pub fn yaml(&self) -> String {
        self.draft.yaml()
    }

    /// The same for `anyroll run --accelerate-config FILE`.
    fn changes(self, path: &Path) -> Result<Changes, Error> {
        let refused = self.rows.iter().find(|row| matches!(row.fate, Fate::Refused { .. }));
        if let Some(row) = refused {
            let first = row.to_string().trim().to_owned();
            return Err(Error::Refused { path: path.to_owned(), count: self.refused(), first });
        }
        let is_plain = |row: &Row| match row.fate {
            Fate::Mapped { .. } => !row.is_default,
            Fate::Changed { .. } => false,
            Fate::Idle { .. } | Fate::Refused { .. } => true,
        };
        let sets = self.draft.sets();
        Ok(Changes { sets, told: self.rows.into_iter().filter(|row| !is_plain(row)).collect() })
    }

    /// How many settings have no counterpart here.
    pub fn refused(&self) -> usize {
        self.rows.iter().filter(|row| matches!(row.fate, Fate::Refused { .. })).count()
    }
}

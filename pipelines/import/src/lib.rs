//! Importer of other systems' configs.
//!
//! ```text
//! file -> flat keys -> Ledger: each key is mapped, changed, idle or refused -> Import { yaml, rows }
//! ```
//!
//! Every key is reported exactly once, and keys that no rule consumes are refused by name. So no setting is
//! lost silently, on which a user who switches must rely.

#![forbid(unsafe_code)]

mod accelerate;
mod command;
mod deepspeed;
mod document;
mod ledger;
mod machines;
mod megatron;
mod openrlhf;
mod openrlhf_offline;
mod openrlhf_rewards;
mod roll;
mod rules;
mod schedule;
mod shared;
mod shell;
mod speculation;
#[cfg(test)]
mod tests;
mod trl;
mod trl_offline;
mod trlx;
mod trlx_ilql;
mod values;
mod verl;

use std::path::{Path, PathBuf};

use clap::ValueEnum;
use serde_json::Value;

pub use ledger::{Outcome, Row};
pub use machines::Machines;

use document::Document;
use ledger::Ledger;

/// System that a config is for.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum Origin {
    /// ROLL's RLVR YAML, with `defaults:` and `${...}`.
    Roll,
    /// YAML of `accelerate config`, with a deepspeed or fsdp section.
    Accelerate,
    /// DeepSpeed's JSON.
    Deepspeed,
    /// Config of `trl grpo` or `trl rloo`.
    Trl,
    /// Config of `trl sft`.
    TrlSft,
    /// Config of `trl dpo`.
    TrlDpo,
    /// Config of `trl reward`.
    TrlReward,
    /// Config of TRL's PRM script.
    TrlPrm,
    /// Config of `trl kto`.
    TrlKto,
    /// Config of TRL's GKD script.
    TrlGkd,
    /// A script or a line that calls `openrlhf.cli.train_ppo_ray`, with flat or dotted flags.
    Openrlhf,
    /// One that calls `openrlhf.cli.train_sft`.
    OpenrlhfSft,
    /// One that calls `openrlhf.cli.train_dpo`.
    OpenrlhfDpo,
    /// One that calls `openrlhf.cli.train_rm`.
    OpenrlhfRm,
    /// One that calls `openrlhf.cli.train_prm`.
    OpenrlhfPrm,
    /// One that calls `openrlhf.cli.train_kto`.
    OpenrlhfKto,
    /// A script or a line that calls `verl.trainer.main_ppo`, or its YAML.
    Verl,
    /// A script or a line that calls `verl.trainer.sft_trainer`, or its predecessor `verl.trainer.fsdp_sft_trainer`.
    VerlSft,
    /// trlx's TRLConfig YAML.
    Trlx,
}

/// Errors of importing a file.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// The file could not be read.
    #[error("cannot read {}", path.display())]
    Read {
        /// The file.
        path: PathBuf,
        /// Cause.
        source: std::io::Error,
    },
    /// The file is invalid.
    #[error("{}: {problem}", path.display())]
    Syntax {
        /// The file.
        path: PathBuf,
        /// The problem, with its place.
        problem: String,
    },
    /// The keys match no known system.
    #[error(
        "{}: unrecognized config format{hint}; pass --from roll, accelerate, deepspeed, trl, trl-sft, \
         trl-dpo, trl-reward, trl-prm, trl-kto, trl-gkd, openrlhf, openrlhf-sft, openrlhf-dpo, openrlhf-rm, \
         openrlhf-prm, openrlhf-kto, verl, verl-sft or trlx",
        path.display()
    )]
    Unknown {
        /// The file.
        path: PathBuf,
        /// Advice in brackets, or empty.
        hint: String,
    },
    /// `--accelerate-config` and `--deepspeed-config` must not contain unsupported settings.
    #[error("{}: {count} of its settings have no counterpart here; the first is {first}", path.display())]
    Refused {
        /// The file.
        path: PathBuf,
        /// Number of unsupported settings.
        count: usize,
        /// The first one with its reason.
        first: String,
    },
}

/// Result of an import.
#[derive(Debug)]
pub struct Import {
    /// System of the config.
    pub origin: Origin,
    /// One row per key, in the order of the file.
    pub rows: Vec<Row>,
    /// Machines among which accelerate's file places this one.
    pub machines: Option<Machines>,
    draft: ledger::Draft,
}

/// Reads `path` as a config of `origin`, or of the system that its keys match.
///
/// # Errors
/// If the file cannot be read or parsed, or matches no system.
pub fn import(path: &Path, origin: Option<Origin>) -> Result<Import, Error> {
    import_for(path, origin, shared::R)
}

/// Changes that another system's file makes to a run.
#[derive(Debug)]
pub struct Changes {
    /// Changes as `--set` arguments.
    pub sets: Vec<String>,
    /// Rows to report: settings with a different meaning here, and defaults of the other system.
    pub told: Vec<Row>,
    /// Machines among which accelerate's file places this one.
    pub machines: Option<Machines>,
}

/// Changes that `origin`'s file at `path` makes to a run with our config `config`, given as text.
///
/// # Errors
/// Those of [`import`], and [`Error::Refused`] for an unsupported setting, without which a run must not
/// start.
pub fn changes(path: &Path, origin: Origin, config: &str) -> Result<Changes, Error> {
    import_for(path, Some(origin), &pipeline_of(config))?.changes(path)
}

/// Pipeline of our config. If it has none, parsing the config reports the error.
fn pipeline_of(config: &str) -> String {
    let config = serde_saphyr::from_str::<Value>(config).unwrap_or_default();
    let name = config["pipeline"].as_object().and_then(|pipeline| pipeline.keys().next());
    name.map_or_else(|| shared::R.to_owned(), |name| format!("pipeline.{name}"))
}

/// [`import`] with accelerate's and DeepSpeed's optimizer settings applied to `pipeline`.
fn import_for(path: &Path, origin: Option<Origin>, pipeline: &str) -> Result<Import, Error> {
    let document = Document::read(path, origin)?;
    let origin = match origin {
        Some(origin) => origin,
        None => document
            .origin()
            .ok_or_else(|| Error::Unknown { path: path.to_owned(), hint: document.hint.clone() })?,
    };
    let mut ledger = Ledger::new(document);
    let mut machines = None;
    match origin {
        Origin::Roll => roll::apply(&mut ledger),
        Origin::Accelerate => machines = accelerate::apply(&mut ledger, path, pipeline)?,
        Origin::Deepspeed => deepspeed::apply(&mut ledger, "", pipeline),
        Origin::Trl => trl::apply(&mut ledger),
        Origin::TrlSft => trl_offline::apply(&mut ledger, trl_offline::Trainer::Sft),
        Origin::TrlDpo => trl_offline::apply(&mut ledger, trl_offline::Trainer::Dpo),
        Origin::TrlReward => trl_offline::apply(&mut ledger, trl_offline::Trainer::Reward),
        Origin::TrlPrm => trl_offline::apply(&mut ledger, trl_offline::Trainer::Prm),
        Origin::TrlKto => trl_offline::apply(&mut ledger, trl_offline::Trainer::Kto),
        Origin::TrlGkd => trl_offline::apply(&mut ledger, trl_offline::Trainer::Gkd),
        Origin::Openrlhf => openrlhf::apply(&mut ledger),
        Origin::OpenrlhfSft => openrlhf_offline::apply(&mut ledger, openrlhf_offline::Trainer::Sft),
        Origin::OpenrlhfDpo => openrlhf_offline::apply(&mut ledger, openrlhf_offline::Trainer::Dpo),
        Origin::OpenrlhfRm => openrlhf_offline::apply(&mut ledger, openrlhf_offline::Trainer::Rm),
        Origin::OpenrlhfPrm => openrlhf_offline::apply(&mut ledger, openrlhf_offline::Trainer::Prm),
        Origin::OpenrlhfKto => openrlhf_offline::apply(&mut ledger, openrlhf_offline::Trainer::Kto),
        Origin::Verl => verl::apply(&mut ledger),
        Origin::VerlSft => verl::sft::apply(&mut ledger),
        Origin::Trlx if trlx_ilql::is_ilql(&ledger) => trlx_ilql::apply(&mut ledger),
        Origin::Trlx => trlx::apply(&mut ledger),
    }
    rules::settings_of_the_shell(&mut ledger);
    let (draft, rows) = ledger.finish();
    Ok(Import { origin, rows, machines, draft })
}

impl Import {
    /// Our YAML: a complete run from a pipeline's config, a `strategy` from accelerate's and DeepSpeed's.
    pub fn yaml(&self) -> String {
        self.draft.yaml()
    }

    /// The changes for `anyroll run --accelerate-config FILE`.
    fn changes(self, path: &Path) -> Result<Changes, Error> {
        let refused = self.rows.iter().find(|row| matches!(row.outcome, Outcome::Refused { .. }));
        if let Some(row) = refused {
            let first = row.to_string().trim().to_owned();
            return Err(Error::Refused { path: path.to_owned(), count: self.refused(), first });
        }
        let is_plain = |row: &Row| match row.outcome {
            Outcome::Mapped { .. } => !row.is_default,
            Outcome::Changed { .. } => false,
            Outcome::Idle { .. } | Outcome::Refused { .. } => true,
        };
        let (sets, machines) = (self.draft.sets(), self.machines);
        Ok(Changes { sets, machines, told: self.rows.into_iter().filter(|row| !is_plain(row)).collect() })
    }

    /// Number of unsupported settings.
    pub fn refused(&self) -> usize {
        self.rows.iter().filter(|row| matches!(row.outcome, Outcome::Refused { .. })).count()
    }
}

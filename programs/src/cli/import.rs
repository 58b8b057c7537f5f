//! `anyroll import`: translates another system's config, and reports the outcome of each of its keys.

use std::path::PathBuf;

use anyroll_import::{Origin, Outcome, import};
use anyroll_pipelines::{Error, Result, atomic_file::write_atomic};
use clap::Args;

use super::stdout::print;

#[derive(Debug, Args)]
pub(super) struct ImportArgs {
    /// The YAML of ROLL, verl, accelerate, TRL or trlx, the JSON of DeepSpeed, or a script that calls OpenRLHF
    /// or verl
    file: PathBuf,
    /// The system that the file is for [default: recognized by its keys]
    #[arg(long, value_enum)]
    from: Option<Origin>,
    /// Write the YAML to this file instead of standard output
    #[arg(long, value_name = "FILE")]
    output: Option<PathBuf>,
}

/// Returns exit code 0 only if every key has a counterpart here or needs none.
pub(super) fn run(args: &ImportArgs) -> Result<u8> {
    let imported = import(&args.file, args.from).map_err(|error| Error::Import(error.into()))?;
    for row in &imported.rows {
        eprintln!("{row}");
    }
    match &args.output {
        None => drop(print(imported.yaml())?),
        Some(path) => write_atomic(path, imported.yaml().as_bytes())?,
    }
    let refused = imported.refused();
    if refused > 0 {
        let keys: Vec<&str> = imported
            .rows
            .iter()
            .filter(|row| matches!(row.outcome, Outcome::Refused { .. }))
            .map(|row| row.key.as_str())
            .collect();
        eprintln!(
            "{refused} of {} keys are refused: decide about them before you run this: {}",
            imported.rows.len(),
            keys.join(", ")
        );
    }
    Ok(u8::from(refused > 0))
}

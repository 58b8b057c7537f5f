//! `anyroll import`: another system's config as ours, and what became of each of its keys.

use std::path::PathBuf;

use clap::Args;

use super::stdout::print;
use crate::{
    Result,
    atomic_file::write_atomic,
    import::{Origin, import},
};

#[derive(Debug, Args)]
pub(super) struct ImportArgs {
    /// ROLL's, accelerate's, TRL's or trlx's YAML, DeepSpeed's JSON, or a script that calls OpenRLHF or verl
    file: PathBuf,
    /// Whose it is [default: told by its keys]
    #[arg(long, value_enum)]
    from: Option<Origin>,
    /// Write the YAML to this file instead of the standard output
    #[arg(long, value_name = "FILE")]
    output: Option<PathBuf>,
}

/// Exit code 0 only if every key has a counterpart here or needs none.
pub(super) fn run(args: &ImportArgs) -> Result<u8> {
    let imported = import(&args.file, args.from)?;
    for row in &imported.rows {
        eprintln!("{row}");
    }
    match &args.output {
        None => drop(print(imported.yaml())?),
        Some(path) => write_atomic(path, imported.yaml().as_bytes())?,
    }
    let refused = imported.refused();
    if refused > 0 {
        eprintln!(
            "{refused} of {} keys are refused: decide about them before you run this",
            imported.rows.len()
        );
    }
    Ok(u8::from(refused > 0))
}

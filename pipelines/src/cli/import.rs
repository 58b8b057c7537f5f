//! `anyroll import`: another system's config as ours.

use std::path::PathBuf;

use clap::Args;

use crate::{
    Result,
    import::{System, import},
};

#[derive(Debug, Args)]
pub(super) struct ImportArgs {
    /// The config, or a script with the command line
    file: PathBuf,
    /// Whose it is [default: the system that it looks like]
    #[arg(long, value_name = "SYSTEM")]
    from: Option<System>,
}

/// Our fields go to standard output, the account of every key to standard error. Exit code 0 only if none was refused.
pub(super) fn run(args: &ImportArgs) -> Result<u8> {
    let import = import(&args.file, args.from)?;
    print!("{}", import.to_yaml());
    eprint!("{}", import.report());
    let refused = import.refused();
    eprintln!("{} keys, {refused} refused; `anyroll check` says what is still missing", import.notes.len());
    Ok(u8::from(refused > 0))
}

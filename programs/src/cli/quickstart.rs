//! `anyroll quickstart`: the config of the quickstart, written to the current folder and trained with.

use std::{
    env, fs, io,
    os::unix::process::CommandExt,
    path::{Path, PathBuf},
    process::Command,
};

use anyroll_pipelines::{Error, Result, atomic_file::write_atomic};
use clap::Args;

/// The config, which needs no other file.
pub(super) const CONFIG: &str = include_str!("../../../configs/rlvr_sort_cpu.yaml");
/// Its file in the current folder.
const FILE: &str = "quickstart.yaml";

#[derive(Debug, Args)]
pub(super) struct QuickstartArgs {
    /// Change a field, as in `--set seed=1`; repeatable
    #[arg(long = "set", value_name = "FIELD=VALUE")]
    sets: Vec<String>,
    /// The run folder itself [default: runs/NAME-TIME]
    #[arg(long, value_name = "DIR")]
    output: Option<PathBuf>,
}

/// Becomes `anyroll run quickstart.yaml`; returns only on failure.
pub(super) fn quickstart(args: &QuickstartArgs) -> Result<u8> {
    write()?;
    eprintln!("the config is in {FILE}: change it, and train again with `anyroll run {FILE}`");
    let program = engine()?;
    let mut command = Command::new(&program);
    command.args(["run", FILE]).args(args.sets.iter().flat_map(|set| ["--set", set]));
    if let Some(output) = &args.output {
        command.arg("--output").arg(output);
    }
    Err(Error::Program { source: command.exec(), program })
}

/// Writes the config, unless it is there. A changed one is the user's.
fn write() -> Result<()> {
    let path = Path::new(FILE);
    match fs::read_to_string(path) {
        Ok(text) if text == CONFIG => Ok(()),
        Ok(_) => Err(Error::Quickstart { path: path.to_owned() }),
        Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(write_atomic(path, CONFIG.as_bytes())?),
        Err(source) => Err(anyroll_config::Error::Read { path: path.to_owned(), source }.into()),
    }
}

/// Returns the path of this program, which has found its libraries.
pub(super) fn engine() -> Result<PathBuf> {
    env::current_exe().map_err(|source| Error::Program { program: "anyroll-engine".into(), source })
}

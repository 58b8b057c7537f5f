//! `cargo xtask same REV`: proves that a refactor changes no bit, by the programs of two revisions on the
//! same configs.
//!
//! Read in this order: [`list`] is `ci/same.yaml`, [`programs`] builds a revision, [`run`] makes a run with
//! its programs, [`compare`] finds the first difference between two run folders, [`messages`] compares what
//! `check` says.

#![forbid(unsafe_code)]

mod compare;
mod list;
mod messages;
mod programs;
mod run;

use std::path::{Path, PathBuf};
use std::process::ExitCode;
use std::{env, fs};

use clap::Parser;

use list::{Listed, Run};
use programs::Programs;
use run::{Made, Runner};

/// A result whose error is one text for the terminal.
type Result<T, E = String> = std::result::Result<T, E>;

const EXAMPLES: &str = "\
Examples:
  cargo xtask same main                                all runs of ci/same.yaml
  cargo xtask same HEAD~3 configs/ppo_critic_cpu.yaml  those of one config; a config that is not listed runs as it is
  cargo xtask same main --messages                     the messages of `anyroll check` for the listed mistakes

REV and the working tree run the working tree's configs. These must be bitwise equal: `resolved.yaml`, every metric
except `time/*` and `perf/*`, `samples.jsonl`, and all files of the checkpoints. If the checkpoint format has changed,
the exported weights are compared instead. The run folders are kept in target/same. The exit code is 0 if all are equal, else 1.";

/// Compares the working tree with the revision REV, bitwise.
#[derive(Parser)]
#[command(name = "cargo xtask same", bin_name = "cargo xtask same", after_help = EXAMPLES)]
struct Cli {
    /// A commit, branch or tag
    rev: String,
    /// Compare only the runs of these configs
    configs: Vec<PathBuf>,
    /// Compare the messages of `anyroll check` instead
    #[arg(long, conflicts_with = "configs")]
    messages: bool,
    /// Compare the programs in these two folders instead of building any: of REV, then of the working tree
    #[arg(long, num_args = 2, value_names = ["OLD", "NEW"])]
    programs: Vec<PathBuf>,
}

fn main() -> ExitCode {
    let root = env::current_dir().map_err(|error| format!("no current folder: {error}"));
    match root.and_then(|root| same(&Cli::parse(), &root)) {
        Ok(true) => ExitCode::SUCCESS,
        Ok(false) => ExitCode::FAILURE,
        Err(message) => {
            eprintln!("error: {message}");
            ExitCode::FAILURE
        }
    }
}

/// Returns true if everything is equal.
fn same(cli: &Cli, root: &Path) -> Result<bool> {
    let listed = Listed::read(&root.join("ci/same.yaml"))?;
    let folder = root.join("target/same");
    let (old, new) = match &cli.programs[..] {
        [old, new] => (Programs::new(old), Programs::new(new)),
        _ => programs::build(root, &folder, &cli.rev)?,
    };
    if cli.messages {
        return messages::compare(&old, &new, &listed.mistakes, &folder);
    }
    let runs = listed.runs_of(&cli.configs);
    let work = folder.join("runs");
    if work.exists() {
        fs::remove_dir_all(&work).map_err(|error| format!("cannot remove {}: {error}", work.display()))?;
    }
    let runner = Runner { root, old: &old, new: &new, folder: work };
    runner.make_models(&listed.models_of(&runs))?;
    let width = runs.iter().map(|run| run.name.len()).max().unwrap_or(0);
    let mut differ = 0;
    for run in &runs {
        for (what, differences) in compared(&runner, run) {
            let verdict = if differences.is_empty() { "the same" } else { "DIFFERS" };
            println!("{:width$}  {what:12}  {verdict}", run.name);
            differences.iter().for_each(|difference| println!("    {difference}"));
            differ += usize::from(!differences.is_empty());
        }
    }
    println!("{} runs, {differ} comparisons that differ", runs.len());
    Ok(differ == 0)
}

/// Makes a run on both sides and returns the differences, by the name of the comparison. A side that fails
/// differs.
fn compared(runner: &Runner, run: &Run) -> Vec<(&'static str, Vec<String>)> {
    let (old, new) = match runner.both(run) {
        Ok(both) => both,
        Err(failed) => return vec![("", vec![failed])],
    };
    let differences = |new: Result<Made>| new.and_then(|new| runner.differences(&old, &new));
    let or_failed = |differences: Result<Vec<String>>| differences.unwrap_or_else(|failed| vec![failed]);
    let mut all = vec![("", or_failed(differences(Ok(new))))];
    if run.resumed {
        // One that the new programs begin, and one that the old ones did: formats on the disk stay readable.
        for (what, begins, side) in
            [("resumed", runner.new, "new_resumed"), ("old, resumed", runner.old, "old_resumed")]
        {
            let resumed = runner.interrupted_and_resumed(run, begins, side);
            all.push((what, or_failed(differences(resumed))));
        }
    }
    all
}

//! `cargo xtask matrix`: runs the cells of `ci/matrix.yaml`, compares them with golden curves, and stores and
//! shows results.
//!
//! Read in this order: `matrix` reads the file; `hardware` finds this machine's hardware; `cell` runs a cell
//! and judges it by its `curves`; `history` stores results and `report` shows them; `workflow` runs the
//! matrix in CI.

#![forbid(unsafe_code)]

mod cell;
mod curves;
mod hardware;
mod history;
mod matrix;
mod report;
mod workflow;

use std::path::{Path, PathBuf};
use std::process::ExitCode;
use std::{env, fs};

use clap::{Args, Parser, Subcommand};

use cell::Runner;
use hardware::Hardware;
use history::{Entry, Status};
use matrix::{Cell, Matrix};

/// `Result` with a complete error message.
type Result<T, E = String> = std::result::Result<T, E>;

/// Conventional exit code of a test that could not be run.
const NOT_RUN: u8 = 77;

const WORKFLOW: &str = ".github/workflows/matrix.yml";

/// Runs the cells of `ci/matrix.yaml`, and shows their results.
#[derive(Parser)]
#[command(name = "cargo xtask matrix", bin_name = "cargo xtask matrix", after_help = EXAMPLES)]
struct Cli {
    #[command(subcommand)]
    command: Command,
}

const EXAMPLES: &str = "\
Examples:
  ci/run cpu-x2-zero3-fp32-rlvr_sort    one cell; its run folder is kept in runs/matrix
  ci/run --backend cpu                  all cells of a backend
  ci/run --all-here                     all cells for this machine's hardware
  ci/report --html table.html           the latest and earlier results of every cell
  cargo xtask matrix list               the cells' names
  cargo xtask matrix record CELL        records its curves as the golden ones of its backend
  cargo xtask matrix workflow           rewrites .github/workflows/matrix.yml

The exit code of `run` is 0 if every cell that ran passed, 1 if a cell failed, and 77 if this machine has the
hardware for none of the cells, or lacks that of a named cell.";

#[derive(Subcommand)]
enum Command {
    /// Run cells
    Run(Which),
    /// Run a cell and keep its curves as its backend's golden ones
    Record {
        /// The cell's name
        cell: String,
    },
    /// Show the results of all cells
    Report(ReportArgs),
    /// Print the names of the cells
    List,
    /// Write the workflow that runs the matrix in CI
    Workflow,
}

#[derive(Args)]
#[group(required = true, multiple = false)]
struct Which {
    /// Names of cells
    cells: Vec<String>,
    /// All cells of this backend
    #[arg(long)]
    backend: Option<String>,
    /// All cells; those without their hardware are not run
    #[arg(long)]
    all_here: bool,
}

#[derive(Args)]
struct ReportArgs {
    /// Results to show besides those of this checkout
    #[arg(long, value_name = "FILE")]
    history: Vec<PathBuf>,
    /// Also write a page with a badge for each cell
    #[arg(long, value_name = "FILE")]
    html: Option<PathBuf>,
}

fn main() -> ExitCode {
    let ended = env::current_dir()
        .map_err(|error| format!("cannot find the current folder: {error}"))
        .and_then(|root| dispatch(Cli::parse().command, &root));
    ended.map_or_else(
        |message| {
            eprintln!("error: {message}");
            ExitCode::FAILURE
        },
        ExitCode::from,
    )
}

fn dispatch(command: Command, root: &Path) -> Result<u8> {
    let matrix = Matrix::read(root)?;
    match command {
        Command::Run(which) => run(root, &matrix, &which),
        Command::Record { cell } => record(root, &matrix, &cell),
        Command::Report(args) => show(root, &matrix, &args),
        Command::List => {
            matrix.cells.iter().for_each(|cell| println!("{}", cell.name));
            Ok(0)
        }
        Command::Workflow => {
            write(&root.join(WORKFLOW), &workflow::text(&matrix))?;
            println!("{WORKFLOW}");
            Ok(0)
        }
    }
}

fn run(root: &Path, matrix: &Matrix, which: &Which) -> Result<u8> {
    let cells: Vec<&Cell> = match &which.backend {
        Some(name) => matrix.cells_of(name)?,
        None if which.all_here => matrix.cells.iter().collect(),
        None => which.cells.iter().map(|name| matrix.cell(name)).collect::<Result<_>>()?,
    };
    let runner = Runner { root, matrix, hardware: Hardware::ask()? };
    let width = cells.iter().map(|cell| cell.name.len()).max().unwrap_or(0);
    let mut ended = Vec::new();
    for cell in cells {
        let entry = runner.run(cell)?;
        println!("{:width$}  {}", cell.name, entry.line());
        history::append(root, &entry)?;
        ended.push(entry);
    }
    let named = !which.cells.is_empty();
    Ok(exit_code(&ended, named))
}

/// Returns the exit code. A cell that was not run has not passed: if nothing ran, or a named cell did not
/// run, it is no success.
fn exit_code(ended: &[Entry], named: bool) -> u8 {
    let any = |status| ended.iter().any(|entry| entry.status == status);
    if any(Status::Failed) {
        1
    } else if !any(Status::Passed) || named && any(Status::NotRun) {
        NOT_RUN
    } else {
        0
    }
}

fn record(root: &Path, matrix: &Matrix, name: &str) -> Result<u8> {
    let cell = matrix.cell(name)?;
    let own = &matrix.backends[&cell.backend].curves;
    if *own != cell.backend {
        return Err(format!(
            "{} is compared with the curves of {own}: to give it its own, set `curves: {}` in ci/matrix.yaml first",
            cell.backend, cell.backend
        ));
    }
    let path = Runner { root, matrix, hardware: Hardware::ask()? }.record(cell)?;
    println!("{}", path.display());
    Ok(0)
}

fn show(root: &Path, matrix: &Matrix, args: &ReportArgs) -> Result<u8> {
    let mut entries = history::read_own(root)?;
    for path in &args.history {
        entries.extend(history::read(path)?);
    }
    history::sort(&mut entries);
    let rows = report::rows(matrix, &entries);
    print!("{}", report::markdown(&rows));
    if let Some(path) = &args.html {
        write(path, &report::html(&rows))?;
    }
    Ok(0)
}

/// Writes a file under a temporary name first, so that it is never incomplete.
fn write(path: &Path, text: &str) -> Result<()> {
    let mut aside = path.as_os_str().to_owned();
    aside.push(".new");
    let folder = path.parent().filter(|it| !it.as_os_str().is_empty()).map_or(Ok(()), fs::create_dir_all);
    folder
        .and_then(|()| fs::write(&aside, text))
        .and_then(|()| fs::rename(&aside, path))
        .map_err(|error| format!("cannot write {}: {error}", path.display()))
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Returns the root of the checkout.
    pub(crate) fn root() -> &'static Path {
        Path::new(concat!(env!("CARGO_MANIFEST_DIR"), "/../.."))
    }

    #[test]
    fn the_checked_in_workflow_is_what_the_matrix_says() {
        let matrix = Matrix::read(root()).unwrap();
        let checked_in = fs::read_to_string(root().join(WORKFLOW)).unwrap();
        assert!(checked_in == workflow::text(&matrix), "run `cargo xtask matrix workflow`");
    }

    #[test]
    fn what_was_not_run_is_no_success() {
        use Status::{Failed, NotRun, Passed};
        let check = |ended: &[Status], named, expected| {
            let ended: Vec<Entry> = ended.iter().map(|status| Entry::sample("a", *status)).collect();
            assert_eq!(exit_code(&ended, named), expected);
        };
        check(&[Passed, Passed], true, 0);
        check(&[Passed, NotRun], false, 0);
        check(&[Passed, NotRun], true, NOT_RUN);
        check(&[NotRun, NotRun], false, NOT_RUN);
        check(&[Passed, NotRun, Failed], false, 1);
    }
}

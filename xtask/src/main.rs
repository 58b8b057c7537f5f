//! `cargo xtask`: building, running and checking, starting from a fresh clone.

#![forbid(unsafe_code)]

mod book;
mod error;
mod lines;
mod process;
mod python;
mod recipe;
mod setup;
mod venv;
mod view;
mod wheel;

use std::env;
use std::ffi::OsString;
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::{Command, ExitCode};

use error::{Error, Result};
use process::cargo;
use setup::Setup;
use wheel::Wheel;

const HELP: &str = "\
Sets up, builds, runs and tests anyroll. Only Rust, a C++ compiler and Python 3.10 or newer are needed.

Examples:
  cargo xtask run configs/rlvr_sort_cpu.yaml              set up, build, train
  cargo xtask run configs/rlvr_sort_cpu.yaml --set seed=1 the same; what follows the file goes to `anyroll run`
  cargo xtask recipe smollm2_arithmetic                   a published model learns a task, on one GPU
  cargo xtask recipe smollm2_arithmetic --config lora --seed 1
  cargo xtask recipe                                      the list of recipes
  cargo xtask test                                        set up, run every test
  cargo xtask test --package anyroll-models rope          the tests of one crate whose name has `rope`
  cargo xtask check                                       what CI runs: format, lints, docs, tests, wheel, cpu's cells
  cargo xtask matrix run --all-here                       the cells of ci/matrix.yaml whose hardware is here
  cargo xtask matrix help                                 more of the matrix: its report, its workflow
  cargo xtask same main                                   prove that a refactor changes no bit: runs of both, compared
  cargo xtask wheel                                       the Python package with the programs
  cargo xtask wheel --test                                the same, installed and tried in an empty environment
  cargo xtask book                                        the pages of docs as a book with search, by mdBook
  cargo xtask lines                                       how much code each backend has to itself
  cargo xtask setup                                       find libtorch, or install it into .torch
  cargo xtask setup --torch ~/venv                        use the torch of that virtual environment
  cargo xtask setup --gpu                                 install torch with its GPU libraries (2.7 GB)

After one `setup`, plain `cargo build --release`, `cargo test --release` and `target/release/anyroll` work too.
The commands set up by themselves, which takes no time when nothing is missing.
";

fn main() -> ExitCode {
    let args: Vec<OsString> = env::args_os().skip(1).collect();
    match dispatch(&args) {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("{error}");
            ExitCode::from(error.exit_code())
        }
    }
}

fn dispatch(args: &[OsString]) -> Result<()> {
    let Some((command, rest)) = args.split_first() else {
        print!("{HELP}");
        return Ok(());
    };
    match command.to_str() {
        Some("setup") => Setup::parse(rest)?.run(&root()).map(drop),
        Some("run") => run(rest),
        Some("recipe") => recipe::run(&root(), rest),
        Some("test") => test(rest),
        Some("check") => check(rest),
        Some("matrix") => matrix(rest),
        Some("same") => same(rest),
        Some("wheel") => wheel(rest),
        Some("book") => {
            no_arguments("book", rest)?;
            book::build(&root())
        }
        Some("lines") => {
            no_arguments("lines", rest)?;
            lines::print(&root())
        }
        Some("help" | "--help" | "-h") => {
            print!("{HELP}");
            Ok(())
        }
        _ => Err(Error::Usage(format!("no command `{}`\n\n{HELP}", command.display()))),
    }
}

/// Sets up, builds and becomes `anyroll run`, so that signals and the exit code are its own.
fn run(args: &[OsString]) -> Result<()> {
    if args.is_empty() {
        return Err(Error::Usage(
            "`run` needs a config\n\n  cargo xtask run configs/rlvr_sort_cpu.yaml".into(),
        ));
    }
    Setup::default().run(&root())?;
    cargo(&["build", "--release", "--workspace"], &[])?;
    let anyroll = release_folder()?.join("anyroll");
    let error = Command::new(&anyroll).arg("run").args(args).exec();
    Err(Error::Reason(format!("{} did not start: {error}", anyroll.display())))
}

fn test(args: &[OsString]) -> Result<()> {
    Setup::default().run(&root())?;
    // Several tests run at once and share the cores: one more than these, since some wait for others' programs, and each
    // with one thread of its own in libtorch.
    let cores = std::thread::available_parallelism().map_or(1, usize::from);
    let tests = (cores + 1).to_string();
    let asked = [("RUST_TEST_THREADS", tests.as_str()), ("OMP_NUM_THREADS", "1")];
    let variables: Vec<_> = asked.into_iter().filter(|(name, _)| env::var_os(name).is_none()).collect();
    process::cargo_with(&["test", "--release", "--workspace"], args, &variables)
}

/// Builds the wheel; with `--test` installs and tries it, too.
fn wheel(args: &[OsString]) -> Result<()> {
    let is_tested = match args {
        [] => false,
        [test] if test == "--test" => true,
        _ => return Err(Error::Usage("`wheel` takes --test or nothing".into())),
    };
    let torch = Setup::default().run(&root())?;
    cargo(&["build", "--release", "--workspace"], &[])?;
    let wheel = Wheel::new(root(), release_folder()?);
    let built = wheel.build()?;
    if is_tested { wheel.test(&built, &torch) } else { Ok(()) }
}

/// Becomes the matrix's own program, which is built with the programs that it runs.
fn matrix(args: &[OsString]) -> Result<()> {
    let runs = args.first().is_some_and(|command| command == "run" || command == "record");
    let built = if runs {
        Setup::default().run(&root())?;
        ["build", "--release", "--workspace"].as_slice()
    } else {
        &["build", "--release", "--quiet", "--package", "anyroll-matrix"]
    };
    cargo(built, &[])?;
    become_program("anyroll-matrix", args)
}

/// Becomes the program that compares two revisions; it builds both itself.
fn same(args: &[OsString]) -> Result<()> {
    Setup::default().run(&root())?;
    cargo(&["build", "--release", "--quiet", "--package", "anyroll-same"], &[])?;
    become_program("anyroll-same", args)
}

/// Becomes a program of the release profile, in the root of the checkout.
fn become_program(name: &str, args: &[OsString]) -> Result<()> {
    let program = release_folder()?.join(name);
    let error = Command::new(&program).args(args).current_dir(root()).exec();
    Err(Error::Reason(format!("{} did not start: {error}", program.display())))
}

/// Runs the checks of CI, fast steps first. All use the release profile, so that libtorch's bindings compile
/// once.
fn check(args: &[OsString]) -> Result<()> {
    no_arguments("check", args)?;
    cargo(&["fmt", "--all", "--check"], &[])?;
    if book::is_possible() {
        book::build(&root())?;
    }
    Setup::default().run(&root())?;
    cargo(&["clippy", "--release", "--workspace", "--all-targets", "--", "-D", "warnings"], &[])?;
    process::cargo_with(
        &["doc", "--release", "--workspace", "--no-deps", "--document-private-items"],
        &[],
        &[("RUSTDOCFLAGS", "-D warnings")],
    )?;
    test(&[])?;
    wheel(&["--test".into()])?;
    matrix(&["run", "--backend", "cpu"].map(OsString::from))
}

fn no_arguments(command: &str, args: &[OsString]) -> Result<()> {
    args.first().map_or(Ok(()), |extra| {
        Err(Error::Usage(format!("`{command}` takes no arguments, got `{}`", extra.display())))
    })
}

/// Returns the root of the checkout, derived from this package's path in cargo.
fn root() -> PathBuf {
    let package = env::var_os("CARGO_MANIFEST_DIR").unwrap_or_else(|| env!("CARGO_MANIFEST_DIR").into());
    Path::new(&package).parent().unwrap_or(Path::new("/")).to_path_buf()
}

/// Returns the folder of `cargo build --release`: next to this program's profile folder, wherever
/// CARGO_TARGET_DIR or a cargo configuration puts the target folder.
fn release_folder() -> Result<PathBuf> {
    let this = env::current_exe()
        .map_err(|error| Error::Reason(format!("cannot find this program's path: {error}")))?;
    match this.parent().and_then(Path::parent) {
        Some(target) => Ok(target.join("release")),
        None => Err(Error::Reason(format!("{} is not in a target folder", this.display()))),
    }
}

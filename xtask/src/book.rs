//! `cargo xtask book`: the pages of `docs` as a book with search, and a check of its links.

use std::ffi::OsStr;
use std::path::Path;
use std::process::Command;

use crate::error::{Error, Result};
use crate::process::{exit_code, find_program};
use crate::python::find_python;

/// The release that the book is built with.
const MDBOOK: &str = "0.5.4";

/// Folder of the built book.
const BOOK: &str = "target/book";

/// Returns true if mdBook is on `PATH`; otherwise says that the book is not built, and how to get mdBook.
pub fn is_possible() -> bool {
    let found = find_program(OsStr::new("mdbook")).is_some();
    if !found {
        eprintln!("xtask: SKIPPED: no mdbook on PATH, so that the book is not built: {}", install());
    }
    found
}

/// Builds the book into `target/book`, and checks its links.
pub fn build(root: &Path) -> Result<()> {
    let Some(mdbook) = find_program(OsStr::new("mdbook")) else {
        return Err(Error::Reason(format!("no mdbook on PATH\n  {}", install())));
    };
    run(root, Command::new(mdbook).arg("build"))?;
    run(root, Command::new(find_python()?).args(["docs/book.py", "check", BOOK]))?;
    eprintln!("xtask: the book is {BOOK}/index.html");
    Ok(())
}

fn install() -> String {
    format!("cargo install mdbook --locked --version {MDBOOK}")
}

fn run(root: &Path, command: &mut Command) -> Result<()> {
    let line = format!("{command:?}").replace('"', "");
    eprintln!("xtask: {line}");
    match command.current_dir(root).status() {
        Ok(status) if status.success() => Ok(()),
        Ok(status) => Err(Error::Child { command: line, code: exit_code(status) }),
        Err(error) => Err(Error::Reason(format!("{line}: did not start: {error}"))),
    }
}

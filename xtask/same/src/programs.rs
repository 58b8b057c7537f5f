//! Programs of a revision: checked out under `target/same`, built, and stored next to the working tree's.

use std::ffi::OsStr;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::{env, fs};

use crate::Result;

/// Programs that a run needs. `anyroll` looks for the others in its own folder.
const NAMES: [&str; 3] = ["anyroll", "anyroll-engine", "anyroll-sandbox"];

/// Folder of one side's programs.
#[derive(Debug)]
pub struct Programs {
    folder: PathBuf,
}

impl Programs {
    /// Takes the programs in `folder`.
    pub fn new(folder: &Path) -> Self {
        Self { folder: folder.to_owned() }
    }

    /// Returns the path of `anyroll`.
    pub fn anyroll(&self) -> PathBuf {
        self.folder.join("anyroll")
    }
}

/// Builds the programs of `rev` and of the working tree `root`, and returns both. Dependencies are compiled
/// once: both build into the working tree's target folder, and the programs of each are copied before the
/// other's replace them.
pub fn build(root: &Path, folder: &Path, rev: &str) -> Result<(Programs, Programs)> {
    let commit =
        output(root, "git", &["rev-parse", "--verify", "--quiet", &format!("{rev}^{{commit}}")], &[])
            .map_err(|_| format!("`{rev}` is no revision of this repository"))?;
    let checkout = folder.join("checkout");
    check_out(root, &checkout, folder, commit.trim())?;
    let target = release_folder()?;
    let old = built(&checkout, root, &target, &folder.join("old"))?;
    let new = built(root, root, &target, &folder.join("new"))?;
    Ok((old, new))
}

/// Makes `checkout` the tree of `commit`, with an index of its own. Files that are equal keep their times, so
/// that a second comparison rebuilds little.
fn check_out(root: &Path, checkout: &Path, folder: &Path, commit: &str) -> Result<()> {
    fs::create_dir_all(checkout).map_err(|error| format!("cannot create {}: {error}", checkout.display()))?;
    let index = folder.join("index");
    let variables = [("GIT_INDEX_FILE", index.as_os_str()), ("GIT_WORK_TREE", checkout.as_os_str())];
    output(root, "git", &["read-tree", "--reset", "-u", commit], &variables).map(drop)
}

fn built(checkout: &Path, root: &Path, target: &Path, to: &Path) -> Result<Programs> {
    let cargo = env::var("CARGO").unwrap_or_else(|_| "cargo".into());
    // A LIBTORCH of the user's counts; the checkout has none of its own.
    let libtorch = env::var_os("LIBTORCH").unwrap_or_else(|| root.join(".torch/view").into_os_string());
    let folder = target.parent().unwrap_or(target);
    eprintln!("same: building {}", checkout.display());
    // All packages: of fewer, cargo would compile dependencies again with fewer of their features.
    let args = ["build", "--release", "--workspace"];
    output(checkout, &cargo, &args, &[("LIBTORCH", &libtorch), ("CARGO_TARGET_DIR", folder.as_os_str())])?;
    fs::create_dir_all(to).map_err(|error| format!("cannot create {}: {error}", to.display()))?;
    for name in NAMES {
        fs::copy(target.join(name), to.join(name)).map_err(|error| format!("cannot copy {name}: {error}"))?;
    }
    Ok(Programs::new(to))
}

/// Returns the folder of this program, where cargo puts the others.
fn release_folder() -> Result<PathBuf> {
    let this = env::current_exe().map_err(|error| format!("this program has no path: {error}"))?;
    Ok(this.parent().unwrap_or(Path::new("/")).to_owned())
}

/// Runs a program in `folder` and returns its standard output; its standard error is shown only if it fails.
fn output(folder: &Path, program: &str, args: &[&str], variables: &[(&str, &OsStr)]) -> Result<String> {
    let ended = Command::new(program).args(args).envs(variables.iter().copied()).current_dir(folder).output();
    let ended = ended.map_err(|error| format!("{program} did not start: {error}"))?;
    if ended.status.success() {
        return Ok(String::from_utf8_lossy(&ended.stdout).into_owned());
    }
    let said = String::from_utf8_lossy(&ended.stderr);
    Err(format!("{program} {}: {}\n{}", args.join(" "), ended.status, said.trim()))
}

//! `cargo xtask recipe`: installs a recipe's packages, builds, and becomes the script that runs it.

use std::ffi::OsString;
use std::fs;
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::Command;

use crate::error::{Error, Result};
use crate::process::cargo;
use crate::python::find_python;
use crate::release_folder;
use crate::setup::Setup;
use crate::venv::{make_venv, pip_install, write_mark};

/// Runs the recipe that the first argument names. Other arguments go to `recipes/common/run.py`.
pub fn run(root: &Path, args: &[OsString]) -> Result<()> {
    let known = names(&root.join("recipes"))?;
    let Some((name, rest)) = args.split_first() else {
        println!("{}\n\n  cargo xtask recipe NAME; recipes/README.md explains each", known.join("\n"));
        return Ok(());
    };
    let name = known.iter().find(|it| name == it.as_str()).ok_or_else(|| {
        Error::Usage(format!("no recipe `{}`; there are {}", name.display(), known.join(", ")))
    })?;
    Setup::default().run(root)?;
    cargo(&["build", "--release", "--workspace"], &[])?;
    let python = install(root, name)?;
    let mut command = Command::new(&python);
    command.arg("recipes/common/run.py").arg(name).arg("--anyroll").arg(release_folder()?.join("anyroll"));
    let error = command.args(rest).current_dir(root).exec();
    Err(Error::Reason(format!("{} did not start: {error}", python.display())))
}

/// Returns the folders that have data, sorted.
fn names(recipes: &Path) -> Result<Vec<String>> {
    let read = || {
        let mut found = Vec::new();
        for entry in fs::read_dir(recipes)? {
            let entry = entry?;
            if entry.path().join("data.py").is_file() {
                found.push(entry.file_name().display().to_string());
            }
        }
        found.sort();
        Ok(found)
    };
    read().map_err(|error| Error::io("read", recipes, error))
}

/// Installs the packages that all recipes share, and those of this one. Returns the interpreter.
fn install(root: &Path, name: &str) -> Result<PathBuf> {
    let folder = root.join(".recipes/venv");
    let python = folder.join("bin/python");
    let common = root.join("recipes/common/requirements.txt");
    // A marked environment was made whole, and is only extended.
    let made = python.exists() && folder.join("installed.common").exists();
    if !made {
        let parent = root.join(".recipes");
        fs::create_dir_all(&parent).map_err(|error| Error::io("make", &parent, error))?;
        make_venv(&find_python()?, &folder)?;
    }
    install_list(&python, &common, &folder.join("installed.common"), &["--no-deps"])?;
    let own = root.join("recipes").join(name).join("requirements.txt");
    if own.exists() {
        install_list(&python, &own, &folder.join(format!("installed.{name}")), &[])?;
    }
    Ok(python)
}

/// Installs a list of packages unless `mark` says that exactly this list was installed.
fn install_list(python: &Path, list: &Path, mark: &Path, options: &[&str]) -> Result<()> {
    let wanted = fs::read_to_string(list).map_err(|error| Error::io("read", list, error))?;
    if fs::read_to_string(mark).is_ok_and(|it| it == wanted) {
        return Ok(());
    }
    let path = list.display().to_string();
    let arguments = [options, &["--requirement", &path]].concat();
    pip_install(python, &arguments, &format!("the packages of {path}"), "run this again to continue")?;
    write_mark(mark, &wanted)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn recipes_are_folders_with_data() {
        let folder = std::env::temp_dir().join(format!("anyroll-recipes-{}", std::process::id()));
        for name in ["b", "a", "common"] {
            fs::create_dir_all(folder.join(name)).unwrap();
        }
        fs::write(folder.join("a/data.py"), "").unwrap();
        fs::write(folder.join("b/data.py"), "").unwrap();
        let found = names(&folder);
        fs::remove_dir_all(&folder).unwrap();
        assert_eq!(found.unwrap(), ["a", "b"]);
    }
}

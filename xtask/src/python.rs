//! The Python that installs torch, checked before use.

use std::ffi::OsStr;
use std::path::PathBuf;
use std::process::Command;

use crate::error::{Error, Result};
use crate::process::find_program;

/// Oldest Python that torch 2.11.0 has wheels for.
const OLDEST: (u32, u32) = (3, 10);

/// Prints the version, the missing modules, and the interpreter below any virtual environment: a new
/// environment must not depend on one that may be deleted.
const PROBE: &str = "\
import sys, importlib.util
print(*sys.version_info[:2])
print(*[m for m in ('venv', 'ensurepip') if importlib.util.find_spec(m) is None])
print(getattr(sys, '_base_executable', None) or sys.executable)
";

const OR_NAME_ONE: &str = "or use an installed torch: cargo xtask setup --torch PATH";

/// Finds a Python that can create a virtual environment with pip.
pub fn find_python() -> Result<PathBuf> {
    let Some(python) = find_program(OsStr::new("python3")) else {
        return Err(Error::Reason(format!(
            "no python3 on PATH; it is needed to install torch\n  Debian, Ubuntu: sudo apt install python3-venv\n  \
             Fedora: sudo dnf install python3\n  {OR_NAME_ONE}"
        )));
    };
    let broken =
        |why: &dyn std::fmt::Display| Error::Reason(format!("{} does not run: {why}", python.display()));
    let output = Command::new(&python).args(["-c", PROBE]).output().map_err(|error| broken(&error))?;
    let answer = String::from_utf8_lossy(&output.stdout);
    let [version, missing, base] = answer.lines().collect::<Vec<_>>()[..] else {
        return Err(broken(&String::from_utf8_lossy(&output.stderr).trim()));
    };
    let mut numbers = version.split(' ').map_while(|it| it.parse().ok());
    let version = (numbers.next().unwrap_or(0), numbers.next().unwrap_or(0));
    if version < OLDEST {
        return Err(Error::Reason(format!(
            "{} is Python {}.{}, and torch {} needs {}.{} or newer\n  put a newer python3 first on PATH, for \
             example by activating a virtual environment of it\n  {OR_NAME_ONE}",
            python.display(),
            version.0,
            version.1,
            anyroll_libtorch::VERSION,
            OLDEST.0,
            OLDEST.1,
        )));
    }
    if !missing.is_empty() {
        return Err(Error::Reason(format!(
            "{} lacks the module {missing}, so it cannot create a virtual environment\n  Debian, Ubuntu: sudo apt \
             install python3-venv\n  {OR_NAME_ONE}",
            python.display(),
        )));
    }
    Ok(base.into())
}

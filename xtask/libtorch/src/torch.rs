//! A torch installation, found without importing it, since an import takes seconds and needs all
//! dependencies.

use std::fmt;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

use crate::VERSION;

/// An installed torch of the pinned release.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Torch {
    /// Folder of the shared libraries, `torch/lib`.
    pub lib: PathBuf,
    /// Full version, such as `2.11.0+cu130`.
    pub version: String,
}

/// Reason why an installation cannot be used.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Unusable {
    /// There is no torch.
    Absent,
    /// The interpreter could not be run.
    NoInterpreter {
        /// The interpreter.
        python: PathBuf,
        /// The failure.
        reason: String,
    },
    /// There is a torch of another release.
    OtherVersion {
        /// Folder of its libraries.
        lib: PathBuf,
        /// Its version.
        version: String,
    },
    /// The folder does not contain the release number.
    NoVersion {
        /// Folder of libraries whose parent was searched.
        lib: PathBuf,
    },
    /// A library is missing: the installation was interrupted, or is not torch.
    Incomplete {
        /// The missing file.
        missing: PathBuf,
    },
}

impl Torch {
    /// Opens a folder of libraries, `torch/lib` or a link to it.
    ///
    /// # Errors
    /// [`Unusable`] if a library is missing or the release is not [`VERSION`].
    pub fn open(lib: &Path) -> Result<Self, Unusable> {
        if !lib.is_dir() {
            return Err(Unusable::Absent);
        }
        let version = read_version(lib).ok_or_else(|| Unusable::NoVersion { lib: lib.into() })?;
        if version.split('+').next() != Some(VERSION) {
            return Err(Unusable::OtherVersion { lib: lib.into(), version });
        }
        match ["libtorch_cpu.so", "libc10.so"].map(|name| lib.join(name)).into_iter().find(|it| !it.is_file())
        {
            Some(missing) => Err(Unusable::Incomplete { missing }),
            None => Ok(Self { lib: lib.into(), version }),
        }
    }

    /// Opens the torch of a Python virtual environment.
    ///
    /// # Errors
    /// The errors of [`Torch::open`].
    pub fn in_venv(venv: &Path) -> Result<Self, Unusable> {
        let pythons = fs::read_dir(venv.join("lib")).into_iter().flatten().flatten();
        let found = pythons.map(|it| it.path().join("site-packages/torch/lib")).find(|it| it.is_dir());
        Self::open(&found.ok_or(Unusable::Absent)?)
    }

    /// Opens the torch that an interpreter would import.
    ///
    /// # Errors
    /// The errors of [`Torch::open`], and [`Unusable::NoInterpreter`].
    pub fn of_python(python: &Path) -> Result<Self, Unusable> {
        let failed = |reason: String| Unusable::NoInterpreter { python: python.into(), reason };
        let output = Command::new(python)
            .args(["-c", FIND_TORCH])
            .stdin(Stdio::null())
            .output()
            .map_err(|error| failed(error.to_string()))?;
        if !output.status.success() {
            let text = String::from_utf8_lossy(&output.stderr);
            return Err(failed(text.lines().last().unwrap_or("it failed without a message").to_string()));
        }
        match String::from_utf8_lossy(&output.stdout).trim() {
            "" => Err(Unusable::Absent),
            package => Self::open(&Path::new(package).join("lib")),
        }
    }
}

impl fmt::Display for Unusable {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Absent => write!(f, "no torch there"),
            Self::NoInterpreter { python, reason } => write!(f, "{}: {reason}", python.display()),
            Self::OtherVersion { lib, version } => {
                write!(f, "torch {version} in {}, but {VERSION} is needed", lib.display())
            }
            Self::NoVersion { lib } => {
                write!(f, "{}/../version.py does not contain the version of torch", lib.display())
            }
            Self::Incomplete { missing } => write!(f, "{} is missing", missing.display()),
        }
    }
}

/// Prints the folder of the package. The working folder is removed from the search path, since a folder named
/// `torch` in it would be found first.
const FIND_TORCH: &str = "\
import sys, importlib.util
sys.path = [p for p in sys.path if p]
spec = importlib.util.find_spec('torch')
places = spec.submodule_search_locations if spec else None
print(list(places)[0] if places else '')
";

/// Reads the version next to `lib`: a Python package has `version.py`, a C++ distribution `build-version`.
/// The path contains `..` on purpose, so that a link to `torch/lib` leads to the real parent.
fn read_version(lib: &Path) -> Option<String> {
    let parent = lib.join("..");
    if let Ok(text) = fs::read_to_string(parent.join("version.py")) {
        let line = text.lines().find_map(|line| line.strip_prefix("__version__ = "))?;
        return Some(line.trim().trim_matches(['\'', '"']).to_string());
    }
    fs::read_to_string(parent.join("build-version")).ok().map(|text| text.trim().to_string())
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::{PermissionsExt, symlink};

    use super::*;

    fn torch_at(package: &Path, version: &str) -> PathBuf {
        let lib = package.join("lib");
        fs::create_dir_all(&lib).unwrap();
        fs::write(package.join("version.py"), format!("cuda = None\n__version__ = '{version}'\n")).unwrap();
        fs::write(lib.join("libtorch_cpu.so"), "").unwrap();
        fs::write(lib.join("libc10.so"), "").unwrap();
        lib
    }

    #[test]
    fn opens_the_pinned_version_only() {
        let root = tempfile::tempdir().unwrap();
        let check = |version: &str| {
            let package = root.path().join(version);
            Torch::open(&torch_at(&package, version)).map(|torch| torch.version)
        };
        assert_eq!(check("2.11.0"), Ok("2.11.0".into()));
        assert_eq!(check("2.11.0+cu130"), Ok("2.11.0+cu130".into()));
        for other in ["2.11.0a0", "2.11.01", "2.9.1+cpu", "12.11.0"] {
            assert!(matches!(check(other), Err(Unusable::OtherVersion { .. })), "{other}");
        }
        assert_eq!(Torch::open(&root.path().join("nothing")), Err(Unusable::Absent));
    }

    #[test]
    fn says_what_is_missing() {
        let root = tempfile::tempdir().unwrap();
        let lib = torch_at(root.path(), VERSION);
        fs::remove_file(lib.join("libc10.so")).unwrap();
        assert_eq!(Torch::open(&lib), Err(Unusable::Incomplete { missing: lib.join("libc10.so") }));
        fs::remove_file(root.path().join("version.py")).unwrap();
        assert_eq!(Torch::open(&lib), Err(Unusable::NoVersion { lib: lib.clone() }));
        fs::write(root.path().join("build-version"), "2.10.0\n").unwrap();
        assert_eq!(Torch::open(&lib), Err(Unusable::OtherVersion { lib, version: "2.10.0".into() }));
    }

    #[test]
    fn follows_a_link_to_the_folder() {
        let root = tempfile::tempdir().unwrap();
        let lib = torch_at(&root.path().join("real/torch"), VERSION);
        let link = root.path().join("torch-lib");
        symlink(&lib, &link).unwrap();
        assert_eq!(Torch::open(&link), Ok(Torch { lib: link, version: VERSION.into() }));
    }

    #[test]
    fn finds_the_torch_of_a_venv() {
        let venv = tempfile::tempdir().unwrap();
        assert_eq!(Torch::in_venv(venv.path()), Err(Unusable::Absent));
        let lib = torch_at(&venv.path().join("lib/python3.12/site-packages/torch"), VERSION);
        assert_eq!(Torch::in_venv(venv.path()).unwrap().lib, lib);
    }

    #[test]
    fn asks_an_interpreter() {
        let root = tempfile::tempdir().unwrap();
        let lib = torch_at(&root.path().join("torch"), VERSION);
        let python = root.path().join("python");
        let check = |body: &str| {
            fs::write(&python, format!("#!/bin/sh\n{body}\n")).unwrap();
            fs::set_permissions(&python, fs::Permissions::from_mode(0o755)).unwrap();
            Torch::of_python(&python)
        };
        assert_eq!(check(&format!("echo {}", lib.parent().unwrap().display())).unwrap().lib, lib);
        assert_eq!(check("echo"), Err(Unusable::Absent));
        let broken = check("echo one >&2; echo no such module >&2; exit 1");
        assert!(matches!(broken, Err(Unusable::NoInterpreter { reason, .. }) if reason == "no such module"));
        let absent = Torch::of_python(&root.path().join("python9"));
        assert!(matches!(absent, Err(Unusable::NoInterpreter { .. })));
    }
}

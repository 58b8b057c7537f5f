//! `.torch/venv`: the torch that set-up installs if the machine has none.

use std::fs;
use std::io::{self, BufRead, BufReader};
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

use anyroll_libtorch::{Torch, VERSION};

use crate::error::{Error, Result};
use crate::process::exit_code;
use crate::python::find_python;
use crate::view::remove;

/// Packages that the CPU library needs in addition to torch: `libtorch_cpu.so` of the common wheel links two
/// GPU libraries, which load without a GPU. Taken from the wheels of x86-64 and aarch64; tested only on
/// x86-64.
pub const CPU_EXTRAS: [&str; 2] = ["nvidia-cuda-cupti==13.0.85", "nvidia-cuda-runtime==13.0.96"];

/// Size of the torch installation; the larger includes the smaller.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub enum Set {
    /// torch without its dependencies, plus the libraries that its CPU library loads.
    Cpu,
    /// torch with its GPU libraries.
    Gpu,
}

/// The virtual environment that set-up owns.
pub struct Venv {
    folder: PathBuf,
}

impl Venv {
    /// Refers to the environment in `folder`, which need not exist.
    pub fn new(folder: PathBuf) -> Self {
        Self { folder }
    }

    /// Returns true if `torch` belongs to this environment.
    pub fn holds(&self, torch: &Torch) -> bool {
        torch.lib.starts_with(&self.folder)
    }

    /// Returns true if an installation of at least `set` completed, and every library is unchanged since.
    pub fn is_whole(&self, set: Set) -> bool {
        let Ok(mark) = fs::read_to_string(self.mark()) else { return false };
        let whole = |it: Set| it >= set && self.inventory(it).is_ok_and(|now| now == mark);
        self.python().exists() && [Set::Cpu, Set::Gpu].into_iter().any(whole)
    }

    /// Installs `set` unless it is complete.
    pub fn install(&self, set: Set) -> Result<Torch> {
        if !self.is_whole(set) {
            let python = find_python()?;
            // Only a complete environment is extended: pip would take a half-written package for an installed
            // one.
            if !self.is_whole(Set::Cpu) {
                make_venv(&python, &self.folder)?;
            }
            self.pip_install(set)?;
        }
        let torch = Torch::in_venv(&self.folder);
        torch.map_err(|why| Error::Reason(format!("pip succeeded, but {}: {why}", self.folder.display())))
    }

    fn pip_install(&self, set: Set) -> Result<()> {
        let torch = format!("torch=={VERSION}");
        let packages = match set {
            Set::Cpu => vec!["--no-deps", &torch, CPU_EXTRAS[0], CPU_EXTRAS[1]],
            Set::Gpu => vec![&*torch],
        };
        let size = match set {
            Set::Cpu => "0.5 GB to download, 1.3 GB on disk",
            Set::Gpu => "2.7 GB to download, 4.7 GB on disk",
        };
        eprintln!("xtask: installing torch {VERSION} into {} ({size})", self.folder.display());
        // Without its mark the environment counts as broken until pip is done.
        let mark = self.mark();
        fs::remove_file(&mark).or_else(ignore_absent).map_err(|error| Error::io("remove", &mark, error))?;
        let fix = "run this again to continue, or use an installed torch: cargo xtask setup --torch PATH";
        pip_install(&self.python(), &packages, &format!("torch {VERSION}"), fix)?;
        let inventory = self.inventory(set).map_err(|error| Error::io("write", &mark, error))?;
        write_mark(&mark, &inventory)
    }

    fn python(&self) -> PathBuf {
        self.folder.join("bin/python")
    }

    fn mark(&self) -> PathBuf {
        self.folder.join("installed")
    }

    /// Returns the set's name and each library with its size, to compare with a later state. Names have no
    /// folders, since a checkout may be moved.
    fn inventory(&self, set: Set) -> io::Result<String> {
        let torch = Torch::in_venv(&self.folder).map_err(|why| io::Error::other(why.to_string()))?;
        let mut folders = vec![torch.lib.clone()];
        // The packages of torch's dependencies are next to it: nvidia/*/lib.
        if let Ok(entries) = fs::read_dir(torch.lib.join("../../nvidia")) {
            for entry in entries {
                folders.push(entry?.path().join("lib"));
            }
        }
        let mut lines = Vec::new();
        for folder in folders.iter().filter(|it| it.is_dir()) {
            for entry in fs::read_dir(folder)? {
                let entry = entry?;
                lines.push(format!("{} {}", entry.file_name().display(), entry.metadata()?.len()));
            }
        }
        lines.sort();
        let name = match set {
            Set::Cpu => "cpu",
            Set::Gpu => "gpu",
        };
        Ok(format!("{name}\n{}\n", lines.join("\n")))
    }
}

/// Writes what was installed to `mark`, aside first, so that no half of it is taken for the whole.
pub fn write_mark(mark: &Path, installed: &str) -> Result<()> {
    let aside = mark.with_extension("new");
    let written = fs::write(&aside, installed).and_then(|()| fs::rename(&aside, mark));
    written.map_err(|error| Error::io("write", mark, error))
}

/// Makes an empty virtual environment, in place of anything in `folder`.
pub fn make_venv(python: &Path, folder: &Path) -> Result<()> {
    remove(folder).map_err(|error| Error::io("remove", folder, error))?;
    let status = Command::new(python).args(["-m", "venv"]).arg(folder).status();
    match status {
        Ok(status) if status.success() => Ok(()),
        Ok(status) => Err(Error::Child {
            command: format!("{} -m venv {}", python.display(), folder.display()),
            code: exit_code(status),
        }),
        Err(error) => Err(Error::io("run", python, error)),
    }
}

fn ignore_absent(error: io::Error) -> io::Result<()> {
    if error.kind() == io::ErrorKind::NotFound { Ok(()) } else { Err(error) }
}

/// Installs with pip, its progress on the terminal. An error has a one-line reason with the name `what`, and
/// the fix.
pub fn pip_install(python: &Path, arguments: &[&str], what: &str, fix: &str) -> Result<()> {
    let failed = |error| Error::Reason(format!("pip did not start: {error}"));
    let pip = ["-m", "pip", "install", "--disable-pip-version-check", "--no-input"];
    let mut command = Command::new(python);
    let mut pip = command.args(pip).args(arguments).stderr(Stdio::piped()).spawn().map_err(failed)?;
    let mut said = String::new();
    for line in
        pip.stderr.take().into_iter().flat_map(|it| BufReader::new(it).lines()).map_while(io::Result::ok)
    {
        eprintln!("{line}");
        said += &line;
        said.push('\n');
    }
    let status = pip.wait().map_err(failed)?;
    if status.success() {
        return Ok(());
    }
    Err(Error::Reason(format!(
        "{}\n  pip's output is above (exit code {})\n  {fix}",
        pip_reason(&said, what),
        exit_code(status),
    )))
}

/// Returns the reason from pip's output, which ends with `No matching distribution` without a network, too.
fn pip_reason(said: &str, what: &str) -> String {
    let any = |needles: &[&str]| needles.iter().any(|it| said.contains(it));
    if any(&["No space left on device"]) {
        "the disk is full".into()
    } else if any(&["Retrying (", "Max retries", "Connection refused", "timed out", "ProxyError", "SSLError"])
    {
        "no network: pip cannot reach its package index\n  behind a proxy set HTTPS_PROXY, for a mirror set \
         PIP_INDEX_URL"
            .into()
    } else if any(&["No matching distribution"]) {
        format!("the package index has no {what} for this Python and machine")
    } else {
        format!("pip could not install {what}")
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_the_reason_of_pip() {
        let check = |said: &str, reason: &str| {
            let found = pip_reason(said, "torch");
            assert!(found.starts_with(reason), "{said}: {found}");
        };
        check(
            "WARNING: Retrying (Retry(total=4)) after connection broken by 'NewConnectionError'\n\
             ERROR: No matching distribution found for torch==2.11.0",
            "no network",
        );
        check("ERROR: Could not install packages: [Errno 28] No space left on device", "the disk is full");
        check("ERROR: No matching distribution found for torch==2.11.0", "the package index has no torch");
        check("Segmentation fault", "pip could not install");
    }
}

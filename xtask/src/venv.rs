//! `.torch/venv`: the torch that set-up installs when the machine has none.

use std::fs;
use std::io::{self, BufRead, BufReader};
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

use anyroll_libtorch::{Torch, VERSION};

use crate::error::{Error, Result};
use crate::process::exit_code;
use crate::python::find_python;
use crate::view::remove;

/// What the CPU needs beside torch itself: `libtorch_cpu.so` of the common wheel names two GPU libraries, which
/// load without a GPU. Read from the wheels of x86-64 and aarch64; run on x86-64 only.
const CPU_EXTRAS: [&str; 2] = ["nvidia-cuda-cupti==13.0.85", "nvidia-cuda-runtime==13.0.96"];

/// How much of torch is installed; the larger includes the smaller.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub enum Set {
    /// torch without its dependencies, and the little that its CPU library loads.
    Cpu,
    /// torch with its GPU libraries.
    Gpu,
}

/// The virtual environment that set-up owns.
pub struct Venv {
    folder: PathBuf,
}

impl Venv {
    /// The environment in `folder`, which need not exist.
    pub fn new(folder: PathBuf) -> Self {
        Self { folder }
    }

    /// Whether `torch` is the one in here.
    pub fn holds(&self, torch: &Torch) -> bool {
        torch.lib.starts_with(&self.folder)
    }

    /// Whether an installation of at least `set` ran to its end, and every library is still as it was then.
    pub fn is_whole(&self, set: Set) -> bool {
        let Ok(mark) = fs::read_to_string(self.mark()) else { return false };
        let whole = |it: Set| it >= set && self.inventory(it).is_ok_and(|now| now == mark);
        self.python().exists() && [Set::Cpu, Set::Gpu].into_iter().any(whole)
    }

    /// Installs `set` if it is not there whole.
    pub fn install(&self, set: Set) -> Result<Torch> {
        if !self.is_whole(set) {
            let python = find_python()?;
            // Only a whole environment is added to: pip would take a half-written package for an installed one.
            if !self.is_whole(Set::Cpu) {
                self.make(&python)?;
            }
            self.pip_install(set)?;
        }
        let torch = Torch::in_venv(&self.folder);
        torch.map_err(|why| Error::Reason(format!("pip was content, but {}: {why}", self.folder.display())))
    }

    fn make(&self, python: &Path) -> Result<()> {
        remove(&self.folder).map_err(|error| Error::io("remove", &self.folder, error))?;
        let status = Command::new(python).args(["-m", "venv"]).arg(&self.folder).status();
        match status {
            Ok(status) if status.success() => Ok(()),
            Ok(status) => Err(Error::Child {
                command: format!("{} -m venv {}", python.display(), self.folder.display()),
                code: exit_code(status),
            }),
            Err(error) => Err(Error::io("run", python, error)),
        }
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
        let pip = ["-m", "pip", "install", "--disable-pip-version-check", "--no-input"];
        let mut command = Command::new(self.python());
        run_pip(command.args(pip).args(packages))?;
        let write = || {
            let aside = mark.with_extension("new");
            fs::write(&aside, self.inventory(set)?)?;
            fs::rename(&aside, &mark)
        };
        write().map_err(|error| Error::io("write", &mark, error))
    }

    fn python(&self) -> PathBuf {
        self.folder.join("bin/python")
    }

    fn mark(&self) -> PathBuf {
        self.folder.join("installed")
    }

    /// The set's name and each library with its size: what was whole once is compared with what is there. Names
    /// without folders, since a checkout may be moved.
    fn inventory(&self, set: Set) -> io::Result<String> {
        let torch = Torch::in_venv(&self.folder).map_err(|why| io::Error::other(why.to_string()))?;
        let mut folders = vec![torch.lib.clone()];
        // Beside `torch` lie the packages of its dependencies: nvidia/*/lib.
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

fn ignore_absent(error: io::Error) -> io::Result<()> {
    if error.kind() == io::ErrorKind::NotFound { Ok(()) } else { Err(error) }
}

/// Runs pip with its progress on the terminal, and reads along to say in one line what went wrong.
fn run_pip(command: &mut Command) -> Result<()> {
    let failed = |error| Error::Reason(format!("pip did not start: {error}"));
    let mut pip = command.stderr(Stdio::piped()).spawn().map_err(failed)?;
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
        "{}\n  pip's own words are above (exit code {})\n  {}",
        pip_reason(&said),
        exit_code(status),
        "run this again to go on, or name a torch that is there already: cargo xtask setup --torch PATH"
    )))
}

/// The reason in pip's words: it ends with `No matching distribution` for a dead network too.
fn pip_reason(said: &str) -> String {
    let any = |needles: &[&str]| needles.iter().any(|it| said.contains(it));
    if any(&["No space left on device"]) {
        "the disk is full".into()
    } else if any(&["Retrying (", "Max retries", "Connection refused", "timed out", "ProxyError", "SSLError"])
    {
        "no network: pip cannot reach its package index\n  behind a proxy set HTTPS_PROXY, for a mirror set \
         PIP_INDEX_URL"
            .into()
    } else if any(&["No matching distribution"]) {
        format!("the package index has no torch {VERSION} for this Python and machine")
    } else {
        format!("pip could not install torch {VERSION}")
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_the_reason_of_pip() {
        let check = |said: &str, reason: &str| {
            let found = pip_reason(said);
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

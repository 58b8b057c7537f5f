//! `cargo xtask wheel`: the Python package with the built programs, and its test in an empty environment.

use std::env;
use std::fs;
use std::io;
use std::os::unix::fs::symlink;
use std::path::{Path, PathBuf};
use std::process::Command;

use anyroll_libtorch::Torch;

use crate::error::{Error, Result};
use crate::process::exit_code;
use crate::python::find_python;
use crate::venv::{make_venv, pip_install, write_mark};
use crate::view::remove;

/// Packages that build the wheel, the pinned backend of `python/pyproject.toml`, and those that validate the schema.
const BUILDER: [&str; 3] = ["hatchling==1.27.0", "jsonschema==4.26.0", "PyYAML==6.0.3"];

/// Folders of the wheel, below cargo's target folder.
pub struct Wheel {
    root: PathBuf,
    /// Folder of the built programs.
    programs: PathBuf,
    folder: PathBuf,
}

impl Wheel {
    /// Refers to the wheel of the checkout at `root`, with the programs in `programs`.
    pub fn new(root: PathBuf, programs: PathBuf) -> Self {
        let folder = programs.with_file_name("wheel");
        Self { root, programs, folder }
    }

    /// Builds the wheel of the built programs, and returns its path.
    pub fn build(&self) -> Result<PathBuf> {
        let python = self.builder()?;
        let dist = self.folder.join("dist");
        remove(&dist).map_err(|error| Error::io("remove", &dist, error))?;
        let mut command = Command::new(python);
        command.args(["-m", "hatchling", "build", "--target", "wheel", "--directory"]).arg(&dist);
        run(command.current_dir(self.root.join("python")).env("ANYROLL_PROGRAMS", &self.programs))?;
        let wheel = only_wheel(&dist).map_err(|error| Error::io("read", &dist, error))?;
        let size = fs::metadata(&wheel).map_err(|error| Error::io("read", &wheel, error))?.len();
        eprintln!("xtask: {}, {:.1} MB", wheel.display(), size as f64 / 1e6);
        Ok(wheel)
    }

    /// Validates the schema of configs, installs the wheel into an empty environment, with `torch` in place of a
    /// download, and runs `python/tests` there.
    pub fn test(&self, wheel: &Path, torch: &Torch) -> Result<()> {
        let (venv, empty) = (self.folder.join("installed"), self.folder.join("empty"));
        let python = venv.join("bin/python");
        make_venv(&find_python()?, &venv)?;
        let link = || {
            symlink(package_of(torch)?, site_packages(&venv)?.join("torch"))?;
            remove(&empty)?;
            fs::create_dir(&empty)
        };
        link().map_err(|error| Error::io("prepare", &venv, error))?;
        let path = wheel.display().to_string();
        pip_install(&python, &["--no-deps", "--no-index", &path], &path, "build the wheel again")?;
        // Neither a compiler, Rust nor variables of this checkout.
        let mut path = venv.join("bin").into_os_string();
        path.push(":/usr/bin:/bin");
        let discover = ["-m", "unittest", "discover", "--buffer", "--start-directory"];
        let tests = self.root.join("python/tests");
        run(Command::new(self.builder()?).args(discover).arg(tests.join("validator")))?;
        let mut installed = Command::new(&python);
        installed.args(discover).arg(tests);
        installed.current_dir(&empty).env_clear().env("PATH", path).env("HOME", &empty);
        for kept in ["OMP_WAIT_POLICY", "ONEDNN_MAX_CPU_ISA"] {
            installed.envs(env::var_os(kept).map(|value| (kept, value)));
        }
        run(&mut installed)
    }

    /// Returns the Python that has the builder, which is installed once.
    fn builder(&self) -> Result<PathBuf> {
        let venv = self.folder.join("builder");
        let (python, mark) = (venv.join("bin/python"), venv.join("installed"));
        let installed = BUILDER.join("\n");
        if !python.exists() || fs::read_to_string(&mark).ok().as_ref() != Some(&installed) {
            make_venv(&find_python()?, &venv)?;
            pip_install(&python, &BUILDER, "the builder of the wheel", "run this again")?;
            write_mark(&mark, &installed)?;
        }
        Ok(python)
    }
}

/// Returns the folder of a torch as Python has it. Its libraries may be links, as in the view.
fn package_of(torch: &Torch) -> io::Result<PathBuf> {
    let library = torch.lib.join("libtorch_cpu.so").canonicalize()?;
    library.ancestors().nth(2).map(Path::to_path_buf).ok_or_else(|| io::Error::other("torch has no folder"))
}

fn site_packages(venv: &Path) -> io::Result<PathBuf> {
    for entry in fs::read_dir(venv.join("lib"))? {
        let site = entry?.path().join("site-packages");
        if site.is_dir() {
            return Ok(site);
        }
    }
    Err(io::Error::other("there is no site-packages in it"))
}

fn only_wheel(dist: &Path) -> io::Result<PathBuf> {
    for entry in fs::read_dir(dist)? {
        let path = entry?.path();
        if path.extension().is_some_and(|it| it == "whl") {
            return Ok(path);
        }
    }
    Err(io::Error::other("the builder wrote no wheel"))
}

/// Runs a program to its end; an error names the command line and the exit code.
fn run(command: &mut Command) -> Result<()> {
    let parts = [command.get_program()].into_iter().chain(command.get_args());
    let line = parts.map(|it| it.display().to_string()).collect::<Vec<_>>().join(" ");
    eprintln!("xtask: {line}");
    let status =
        command.status().map_err(|error| Error::Reason(format!("`{line}` did not start: {error}")))?;
    if status.success() { Ok(()) } else { Err(Error::Child { command: line, code: exit_code(status) }) }
}

#[cfg(test)]
mod tests {
    use anyroll_libtorch::VERSION;

    use super::*;
    use crate::venv::CPU_EXTRAS;

    /// The wheel and the image are built by others' tools, which cannot read the versions here.
    #[test]
    fn the_wheel_and_the_image_have_the_versions_of_set_up() {
        let read = |path: &str| {
            fs::read_to_string(Path::new(env!("CARGO_MANIFEST_DIR")).join("..").join(path)).unwrap()
        };
        let (wheel, image) = (read("python/pyproject.toml"), read("deploy/Dockerfile"));
        assert!(wheel.contains(&format!("dependencies = [\"torch=={VERSION}\"]")), "{wheel}");
        assert!(wheel.contains(&format!("requires = [\"{}\"]", BUILDER[0])), "{wheel}");
        let cpu = format!("--no-deps torch=={VERSION} {} ;;", CPU_EXTRAS.join(" "));
        assert!(image.contains(&cpu), "no {cpu:?} in {image}");
        assert!(image.contains(&format!("--no-cache-dir torch=={VERSION} ;;")), "{image}");
    }
}

//! `cargo xtask setup`: finds or installs libtorch, and links the view to it.

use std::env;
use std::ffi::{OsStr, OsString};
use std::fs::{self, File};
use std::path::{Path, PathBuf};

use anyroll_libtorch::{Torch, Unusable, VERSION};

use crate::error::{Error, Result};
use crate::process::find_program;
use crate::venv::{Set, Venv};
use crate::view::View;

/// Options of `setup`.
#[derive(Default)]
pub struct Setup {
    /// The torch to use: its package folder, or a virtual environment.
    torch: Option<PathBuf>,
    /// True if an installation includes the GPU libraries.
    gpu: bool,
}

impl Setup {
    /// Parses the arguments after `setup`.
    pub fn parse(args: &[OsString]) -> Result<Self> {
        let mut setup = Self::default();
        let mut args = args.iter();
        while let Some(arg) = args.next() {
            match arg.to_str() {
                Some("--gpu") => setup.gpu = true,
                Some("--torch") => match args.next() {
                    Some(path) => setup.torch = Some(path.into()),
                    None => return Err(Error::Usage("--torch needs a path".into())),
                },
                _ => {
                    return Err(Error::Usage(format!(
                        "`setup` takes --torch PATH and --gpu, got `{}`",
                        arg.display()
                    )));
                }
            }
        }
        Ok(setup)
    }

    /// Sets up the checkout at `root`, and returns its torch. Returns quickly if everything is in place, and repairs it
    /// otherwise.
    pub fn run(&self, root: &Path) -> Result<Torch> {
        check_machine()?;
        let folder = root.join(".torch");
        if let Some(own) = env::var_os("LIBTORCH").filter(|it| *it != *folder.join("view")) {
            return self.accept_own(Path::new(&own));
        }
        let view = View::new(folder.join("view"));
        let venv = Venv::new(folder.join("venv"));
        // The torch in use stays in use, in any shell: a switch would relink everything.
        if let (None, Some(torch)) = (&self.torch, self.torch_in_use(&view, &venv)) {
            say(&torch);
            return Ok(torch);
        }
        let _lock = lock(&folder)?;
        let torch = match &self.torch {
            Some(path) => open_named(path)?,
            None => match find_installed(&venv) {
                Some(torch) => {
                    if self.gpu {
                        eprintln!(
                            "xtask: --gpu applies only to an installation in .torch; this torch is used unchanged"
                        );
                    }
                    torch
                }
                None => venv.install(self.set())?,
            },
        };
        view.write(&torch)?;
        say(&torch);
        Ok(torch)
    }

    /// Checks a LIBTORCH set by the user. Cargo builds against it regardless of `.torch`, so nothing is set
    /// up.
    fn accept_own(&self, own: &Path) -> Result<Torch> {
        if self.torch.is_some() || self.gpu {
            let message = "is set and overrides --torch and --gpu: unset it first";
            return Err(Error::Usage(format!("LIBTORCH={} {message}", own.display())));
        }
        let torch = Torch::open(&own.join("lib")).map_err(|why| {
            Error::Reason(format!(
                "LIBTORCH={} is set and cannot be used: {why}\n  unset LIBTORCH, and set-up finds or installs one",
                own.display()
            ))
        })?;
        say(&torch);
        Ok(torch)
    }

    fn torch_in_use(&self, view: &View, venv: &Venv) -> Option<Torch> {
        let torch = view.torch()?;
        (!venv.holds(&torch) || venv.is_whole(self.set())).then_some(torch)
    }

    fn set(&self) -> Set {
        if self.gpu { Set::Gpu } else { Set::Cpu }
    }
}

/// Fails early for problems that would cause obscure errors minutes later.
fn check_machine() -> Result<()> {
    if !cfg!(all(target_os = "linux", any(target_arch = "x86_64", target_arch = "aarch64"))) {
        return Err(Error::Reason("anyroll builds on Linux, x86-64 or aarch64".into()));
    }
    // CXX may contain a wrapper and flags: its first word is the program.
    let cxx = env::var("CXX").unwrap_or_default();
    let compiler = cxx.split_whitespace().next().unwrap_or("c++");
    if find_program(OsStr::new(compiler)).is_none() {
        return Err(Error::Reason(format!(
            "no C++ compiler: `{compiler}` is not on PATH, and libtorch's bindings are compiled with it\n  \
             Debian, Ubuntu: sudo apt install g++\n  Fedora: sudo dnf install gcc-c++\n  or set CXX to one"
        )));
    }
    Ok(())
}

/// Opens the torch that the user specified.
fn open_named(path: &Path) -> Result<Torch> {
    let path = path.canonicalize().map_err(|error| Error::io("open --torch", path, error))?;
    let lib = path.join("lib");
    let torch = if lib.join("libtorch_cpu.so").exists() { Torch::open(&lib) } else { Torch::in_venv(&path) };
    torch.map_err(|why| {
        let fix = match why {
            Unusable::OtherVersion { .. } => format!("install it there: pip install torch=={VERSION}"),
            _ => "PATH is a virtual environment, or the folder of its torch: .../site-packages/torch".into(),
        };
        Error::Reason(format!("--torch {} cannot be used: {why}\n  {fix}", path.display()))
    })
}

/// Finds the torch of the active virtual environment or of `python3`. One of another version is reported and
/// left alone.
fn find_installed(venv: &Venv) -> Option<Torch> {
    let active = env::var_os("VIRTUAL_ENV").map(|it| ("VIRTUAL_ENV", Torch::in_venv(Path::new(&it))));
    let python = || find_program(OsStr::new("python3")).map(|it| ("python3", Torch::of_python(&it)));
    let places = active.into_iter().chain(std::iter::once_with(python).flatten());
    for (place, torch) in places {
        match torch {
            // Our own environment may be active, too; its completeness is checked elsewhere.
            Ok(torch) if venv.holds(&torch) => {}
            Ok(torch) => return Some(torch),
            Err(why @ (Unusable::OtherVersion { .. } | Unusable::Incomplete { .. })) => {
                eprintln!("xtask: the torch of {place} is not used: {why}");
            }
            Err(Unusable::Absent | Unusable::NoInterpreter { .. } | Unusable::NoVersion { .. }) => {}
        }
    }
    None
}

/// Prevents two set-ups at once, until the file is dropped or the process ends.
fn lock(folder: &Path) -> Result<File> {
    let path = folder.join("lock");
    let open = || {
        fs::create_dir_all(folder)?;
        File::create(&path)
    };
    let file = open().map_err(|error| Error::io("open", &path, error))?;
    match file.try_lock() {
        Ok(()) => Ok(file),
        Err(fs::TryLockError::WouldBlock) => {
            Err(Error::Reason(format!("another set-up holds {}: try again when it is done", path.display())))
        }
        Err(fs::TryLockError::Error(error)) => Err(Error::io("lock", &path, error)),
    }
}

fn say(torch: &Torch) {
    eprintln!("xtask: torch {} in {}", torch.version, torch.lib.display());
}

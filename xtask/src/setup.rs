//! `cargo xtask setup`: libtorch is found or installed, and the link view shows it.

use std::env;
use std::ffi::{OsStr, OsString};
use std::fs::{self, File};
use std::path::{Path, PathBuf};

use anyroll_libtorch::{Torch, Unusable, VERSION};

use crate::error::{Error, Result};
use crate::process::find_program;
use crate::venv::{Set, Venv};
use crate::view::View;

/// What the user asked of `setup`.
#[derive(Default)]
pub struct Setup {
    /// The torch to use: its package folder, or a virtual environment.
    torch: Option<PathBuf>,
    /// Whether an installation includes the GPU libraries.
    gpu: bool,
}

impl Setup {
    /// Reads the arguments after `setup`.
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

    /// Sets up the checkout at `root`. Does nothing, quickly, when all is there; repairs what is not.
    pub fn run(&self, root: &Path) -> Result<()> {
        check_machine()?;
        let folder = root.join(".torch");
        if let Some(own) = env::var_os("LIBTORCH").filter(|it| *it != *folder.join("view")) {
            return self.accept_own(Path::new(&own));
        }
        let view = View::new(folder.join("view"));
        let venv = Venv::new(folder.join("venv"));
        // The torch in use stays in use, whatever shell this runs in: a switch would relink everything.
        if let (None, Some(torch)) = (&self.torch, self.torch_in_use(&view, &venv)) {
            say(&torch);
            return Ok(());
        }
        let _lock = lock(&folder)?;
        let torch = match &self.torch {
            Some(path) => open_named(path)?,
            None => match find_installed(&venv) {
                Some(torch) => {
                    if self.gpu {
                        eprintln!(
                            "xtask: --gpu is for an installation in .torch, and this torch is used as it is"
                        );
                    }
                    torch
                }
                None => venv.install(self.set())?,
            },
        };
        view.write(&torch)?;
        say(&torch);
        Ok(())
    }

    /// Cargo builds against a LIBTORCH of the user's whatever `.torch` holds: nothing is set up, only checked.
    fn accept_own(&self, own: &Path) -> Result<()> {
        if self.torch.is_some() || self.gpu {
            let message = "is set and wins over --torch and --gpu: unset it first";
            return Err(Error::Usage(format!("LIBTORCH={} {message}", own.display())));
        }
        let torch = Torch::open(&own.join("lib")).map_err(|why| {
            Error::Reason(format!(
                "LIBTORCH={} is set and cannot be used: {why}\n  unset LIBTORCH, and set-up finds or installs one",
                own.display()
            ))
        })?;
        say(&torch);
        Ok(())
    }

    fn torch_in_use(&self, view: &View, venv: &Venv) -> Option<Torch> {
        let torch = view.torch()?;
        (!venv.holds(&torch) || venv.is_whole(self.set())).then_some(torch)
    }

    fn set(&self) -> Set {
        if self.gpu { Set::Gpu } else { Set::Cpu }
    }
}

/// Fails early on what would fail minutes later in a worse way.
fn check_machine() -> Result<()> {
    if !cfg!(all(target_os = "linux", any(target_arch = "x86_64", target_arch = "aarch64"))) {
        return Err(Error::Reason("anyroll builds on Linux, x86-64 or aarch64".into()));
    }
    // CXX may carry a wrapper and flags: its first word is the program.
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

/// Opens the torch that the user named.
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

/// The torch of the active virtual environment or of `python3`. One of another version is named and left alone.
fn find_installed(venv: &Venv) -> Option<Torch> {
    let active = env::var_os("VIRTUAL_ENV").map(|it| ("VIRTUAL_ENV", Torch::in_venv(Path::new(&it))));
    let python = || find_program(OsStr::new("python3")).map(|it| ("python3", Torch::of_python(&it)));
    let places = active.into_iter().chain(std::iter::once_with(python).flatten());
    for (place, torch) in places {
        match torch {
            // Our own environment can be active too; whether it is whole is not asked here.
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

/// Keeps two set-ups apart until the file is dropped, or its process ends however it ends.
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

//! The `anyroll` program: finds libtorch, then becomes `anyroll-engine`, which links it.
//!
//! The engine cannot look for libtorch itself: the loader needs the libraries before the first line of its
//! `main`. It finds them where it was built. On a machine where they lie elsewhere this launcher, which needs
//! nothing but the standard library, finds them and says so with `LD_LIBRARY_PATH`.

#![forbid(unsafe_code)]

use std::convert::Infallible;
use std::env;
use std::ffi::{OsStr, OsString};
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::{Command, ExitCode};

use anyroll_libtorch::{Torch, Unusable, VERSION};

/// The folder of libraries that the user names.
const TORCH_LIB: &str = "ANYROLL_TORCH_LIB";
/// The folder of libraries that the engine was built against, which its search path names.
const BUILT: &str = env!("ANYROLL_TORCH_LIB_BUILT");
/// How much libtorch logs. It logs every failed connection with a C++ backtrace; our errors say what it says.
const LOG_LEVEL: &str = "TORCH_CPP_LOG_LEVEL";
/// How libtorch holds the memory of GPUs: under its name of now, and under those of before. Unless it is told, it keeps
/// blocks of the sizes that were asked for, and phases of other shapes need others besides; segments that grow serve all.
const ALLOCATOR: [&str; 3] = ["PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_HIP_ALLOC_CONF"];

fn main() -> ExitCode {
    let Err(message) = start();
    eprintln!("error: {message}");
    ExitCode::FAILURE
}

/// Becomes the engine; only a failure comes back.
fn start() -> Result<Infallible, String> {
    let this = env::current_exe().map_err(|error| format!("the path of this program is unknown: {error}"))?;
    let engine = this.with_file_name("anyroll-engine");
    if !engine.is_file() {
        return Err(format!(
            "{} is missing\n  the programs anyroll and anyroll-engine belong in one folder: copy both, or build both \
             with `cargo build --release`",
            engine.display()
        ));
    }
    let built_in = [this.with_file_name("torch-lib"), BUILT.into()];
    let torch = find_torch(&built_in)?;
    let mut command = Command::new(&engine);
    command.args(env::args_os().skip(1));
    if env::var_os(LOG_LEVEL).is_none() {
        command.env(LOG_LEVEL, "FATAL");
    }
    if ALLOCATOR.iter().all(|name| env::var_os(name).is_none()) {
        command.env(ALLOCATOR[0], "expandable_segments:True");
    }
    if let Some(path) = library_path(&torch.lib, &built_in, env::var_os("LD_LIBRARY_PATH")) {
        command.env("LD_LIBRARY_PATH", path);
    }
    Err(format!("{} did not start: {}", engine.display(), command.exec()))
}

/// The first torch that can be used: the one the user names, those that the engine finds by itself, then those
/// of the active Python environments.
fn find_torch(built_in: &[PathBuf]) -> Result<Torch, String> {
    if let Some(named) = env::var_os(TORCH_LIB) {
        let torch = Torch::open(Path::new(&named));
        return torch.map_err(|why| {
            format!(
                "{TORCH_LIB}={} cannot be used: {why}\n  it names the folder `torch/lib` of torch {VERSION}, or a link \
                 to it",
                named.display()
            )
        });
    }
    let mut tried = vec![format!("{TORCH_LIB}: not set")];
    let mut usable = |place: String, torch: Result<Torch, Unusable>| {
        torch.map_err(|why| tried.push(format!("{place}: {why}"))).ok()
    };
    for lib in built_in {
        if let Some(torch) = usable(lib.display().to_string(), Torch::open(lib)) {
            return Ok(torch);
        }
    }
    let venv = env::var_os("VIRTUAL_ENV").unwrap_or_default();
    if let Some(torch) = usable(format!("VIRTUAL_ENV={}", venv.display()), Torch::in_venv(Path::new(&venv))) {
        return Ok(torch);
    }
    if let Some(torch) = usable("python3".into(), Torch::of_python(Path::new("python3"))) {
        return Ok(torch);
    }
    Err(format!(
        "no torch {VERSION} found, whose libraries anyroll runs on\n  tried:\n    {}\n  do one of these:\n    \
         pip install torch=={VERSION}, in the Python environment you start anyroll from\n    set {TORCH_LIB} to \
         the folder `torch/lib` of one\n    cargo xtask setup, in a checkout of anyroll",
        tried.join("\n    ")
    ))
}

/// The `LD_LIBRARY_PATH` that makes the engine load from `lib`, or nothing if it does so anyway: when its own
/// search path leads there and no folder of the current value, which goes before it, holds another libtorch.
fn library_path(lib: &Path, built_in: &[PathBuf], current: Option<OsString>) -> Option<OsString> {
    let current = current.unwrap_or_default();
    let hidden = env::split_paths(&current).any(|folder| folder.join("libtorch_cpu.so").exists());
    // The engine takes the first that is there, whatever its version.
    let loads = built_in.iter().find(|it| it.join("libtorch_cpu.so").exists());
    if !hidden && loads.is_some_and(|it| it == lib) {
        return None;
    }
    let mut path = lib.as_os_str().to_owned();
    if !current.is_empty() {
        path.push(OsStr::new(":"));
        path.push(current);
    }
    Some(path)
}

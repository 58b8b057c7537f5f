//! The `anyroll` program: finds libtorch, then becomes `anyroll-engine`, which links it.
//!
//! The engine cannot look for libtorch itself, since the loader needs the libraries before `main`. It finds
//! them where it was built. On other machines this launcher, which needs only the standard library, finds
//! them and sets `LD_LIBRARY_PATH`.

#![forbid(unsafe_code)]

use std::convert::Infallible;
use std::env;
use std::ffi::{OsStr, OsString};
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::{Command, ExitCode};

use anyroll_libtorch::{BESIDE, Torch, Unusable, VERSION};

/// Folder of libtorch's libraries, set by the user.
const TORCH_LIB: &str = "ANYROLL_TORCH_LIB";
/// Folder of the libraries that the engine was built against, which is in its search path.
const BUILT: &str = env!("ANYROLL_TORCH_LIB_BUILT");
/// Log level of libtorch, which logs every failed connection with a C++ backtrace. Our errors repeat the
/// cause.
const LOG_LEVEL: &str = "TORCH_CPP_LOG_LEVEL";
/// Settings of libtorch's allocator on GPUs, under its current and its earlier names. By default it keeps
/// blocks of the requested sizes, and phases of other shapes allocate more. Expandable segments serve all
/// sizes.
const ALLOCATOR: [&str; 3] = ["PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_HIP_ALLOC_CONF"];

fn main() -> ExitCode {
    let Err(message) = start();
    eprintln!("error: {message}");
    ExitCode::FAILURE
}

/// Becomes the engine; returns only on failure.
fn start() -> Result<Infallible, String> {
    // libtorch's math library looks for its kernels from there, and ends the process without them.
    env::current_dir().map_err(|error| {
        format!("the current folder cannot be used: {error}\n  change to a folder that exists")
    })?;
    let this = env::current_exe().map_err(|error| format!("the path of this program is unknown: {error}"))?;
    let engine = this.with_file_name("anyroll-engine");
    if !engine.is_file() {
        return Err(format!(
            "{} is missing\n  the programs anyroll and anyroll-engine belong in one folder: copy both, or build both \
             with `cargo build --release`",
            engine.display()
        ));
    }
    let built_in = [this.with_file_name("torch-lib"), this.with_file_name(BESIDE), BUILT.into()];
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

/// The first usable torch: the user's choice, then those that the engine finds by itself, then those of the
/// active Python environments.
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

/// `LD_LIBRARY_PATH` with which the engine loads from `lib`; `None` if it does so anyway. That is the case if
/// its own search path leads to `lib` and no folder in the current value holds another libtorch.
fn library_path(lib: &Path, built_in: &[PathBuf], current: Option<OsString>) -> Option<OsString> {
    let current = current.unwrap_or_default();
    let hidden = env::split_paths(&current).any(|folder| folder.join("libtorch_cpu.so").exists());
    // The engine takes the first one in its path, whatever its version.
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

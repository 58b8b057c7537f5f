//! Output of a build script that makes the crate's programs find libtorch.

use std::env;
use std::path::{Path, PathBuf};

/// Folder of libtorch's libraries, from the folder of the programs, where both are Python packages:
/// `site-packages/anyroll/bin` and `site-packages/torch/lib`.
pub const BESIDE: &str = "../../torch/lib";

/// Sets the run-time search path of every program and test of the crate whose build script calls this. Also
/// sets the compile-time variable `ANYROLL_TORCH_LIB_BUILT`: the folder of libraries that the crate is built
/// against. Cargo does not pass on link arguments from a dependency, so each crate that links libtorch calls
/// this.
///
/// A program searches `torch-lib` in its own folder, then [`BESIDE`], then the folder that it was built
/// against. `LD_LIBRARY_PATH` has priority over all.
///
/// Returns the folder in `LIBTORCH`, whose `include` contains the headers. Without one the build ends with
/// the command that creates it.
#[must_use]
pub fn link() -> PathBuf {
    println!("cargo::rerun-if-env-changed=LIBTORCH");
    let Some(view) = env::var_os("LIBTORCH").map(PathBuf::from) else {
        fail("LIBTORCH is not set: build from inside the checkout, whose .cargo/config.toml sets it")
    };
    let library = view.join("lib/libtorch_cpu.so");
    let Ok(library) = library.canonicalize() else {
        fail(&format!("no libtorch at {}: run `cargo xtask setup` once, then build again", view.display()))
    };
    // Links in a view may point to files older than the last build; this file is written with the view.
    let stamp = view.join("build-version");
    if stamp.exists() {
        println!("cargo::rerun-if-changed={}", stamp.display());
    }
    let lib = library.parent().unwrap_or(Path::new("/")).display();
    println!("cargo::rustc-link-arg=-Wl,-rpath,$ORIGIN/torch-lib");
    println!("cargo::rustc-link-arg=-Wl,-rpath,$ORIGIN/{BESIDE}");
    println!("cargo::rustc-link-arg=-Wl,-rpath,{lib}");
    println!("cargo::rustc-env=ANYROLL_TORCH_LIB_BUILT={lib}");
    view
}

/// Ends the build. Cargo prints the message as an error of its own and stops, at any exit code.
fn fail(message: &str) -> ! {
    println!("cargo::error={message}");
    std::process::exit(0)
}

//! The `anyroll-engine` program, which the `anyroll` launcher starts once it has found libtorch.

#![forbid(unsafe_code)]

fn main() -> ! {
    // Exits without returning: threads of a failed collective may never end, and must not keep the process
    // alive.
    std::process::exit(anyroll_pipelines::cli::main().into())
}

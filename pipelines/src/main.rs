//! The `anyroll-engine` program: what the `anyroll` launcher starts once libtorch is found.

#![forbid(unsafe_code)]

fn main() -> ! {
    // Not by returning: threads of a failed collective may never end, and must not keep the process.
    std::process::exit(anyroll_pipelines::cli::main().into())
}

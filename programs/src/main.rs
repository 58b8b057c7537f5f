//! The `anyroll-engine` program, which the `anyroll` launcher starts once it has found libtorch: the command line and the
//! server, over [`anyroll_pipelines`].

#![forbid(unsafe_code)]

mod cli;
mod serve;

fn main() -> ! {
    // Exits without returning: threads of a failed collective may never end, and must not keep the process
    // alive.
    std::process::exit(cli::main().into())
}

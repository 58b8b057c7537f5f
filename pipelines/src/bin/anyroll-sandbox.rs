//! The `anyroll-sandbox` program: what the `code` reward starts for each program that a policy wrote. It needs no
//! libtorch, so that it starts in a moment.

#![forbid(unsafe_code)]

use std::env;
use std::process::ExitCode;

fn main() -> ExitCode {
    anyroll_sandbox::helper::main(env::args_os().skip(1)).into()
}

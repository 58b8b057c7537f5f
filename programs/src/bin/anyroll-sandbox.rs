//! The `anyroll-sandbox` program, which the `code` reward starts for each program that a policy wrote. It
//! does not link libtorch, so that it starts fast.

#![forbid(unsafe_code)]

use std::env;
use std::process::ExitCode;

fn main() -> ExitCode {
    anyroll_sandbox::helper::main(env::args_os().skip(1)).into()
}

//! Starting programs: finding them, and passing on their exit.

use std::env;
use std::ffi::{OsStr, OsString};
use std::os::unix::fs::PermissionsExt;
use std::os::unix::process::ExitStatusExt;
use std::path::PathBuf;
use std::process::{Command, ExitStatus};
use std::time::Instant;

use crate::error::{Error, Result};

/// Runs the cargo that runs this program; an error names the command line and its exit.
pub fn cargo(args: &[&str], extra: &[OsString]) -> Result<()> {
    cargo_with(args, extra, &[])
}

/// Like [`cargo`], with additional environment variables.
pub fn cargo_with(args: &[&str], extra: &[OsString], variables: &[(&str, &str)]) -> Result<()> {
    let program = env::var_os("CARGO").unwrap_or_else(|| "cargo".into());
    let mut line = vec!["cargo".to_string()];
    line.extend(args.iter().map(|it| it.to_string()));
    line.extend(extra.iter().map(|it| it.display().to_string()));
    let line = line.join(" ");

    let mut command = Command::new(&program);
    command.args(args).args(extra).envs(variables.iter().copied());
    eprintln!("xtask: {line}");
    let start = Instant::now();
    let status = command.status().map_err(|error| {
        Error::Reason(format!(
            "cargo did not start: {}: {error}\n  install Rust with rustup, then open a new shell",
            program.display()
        ))
    })?;
    if !status.success() {
        return Err(Error::Child { command: line, code: exit_code(status) });
    }
    eprintln!("xtask: {line}: passed in {:.1} s", start.elapsed().as_secs_f64());
    Ok(())
}

/// Returns the exit code that a shell would show: 128 + signal for a killed program.
pub fn exit_code(status: ExitStatus) -> u8 {
    let code = status.code().unwrap_or_else(|| 128 + status.signal().unwrap_or(0));
    u8::try_from(code).unwrap_or(1)
}

/// Returns the first program of this name on `PATH`.
pub fn find_program(name: &OsStr) -> Option<PathBuf> {
    let path = env::var_os("PATH")?;
    let executable =
        |file: &PathBuf| file.metadata().is_ok_and(|it| it.is_file() && it.permissions().mode() & 0o111 != 0);
    // A name with a slash is already a path, and joining an absolute path yields that path.
    env::split_paths(&path).map(|folder| folder.join(name)).find(executable)
}

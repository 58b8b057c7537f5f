//! Messages of `anyroll check` for configs with a mistake, of both sides.

use std::fs;
use std::path::Path;
use std::process::Command;

use crate::list::Mistake;
use crate::{Programs, Result};

/// Prints each message that has changed, before and after. Returns true if no message has changed.
pub fn compare(old: &Programs, new: &Programs, mistakes: &[Mistake], folder: &Path) -> Result<bool> {
    let mut changed = 0;
    for mistake in mistakes {
        let path = folder.join("mistake.yaml");
        write(mistake, &path)?;
        let said = |programs: &Programs| said(programs, &path, &mistake.set);
        let (before, after) = (said(old)?, said(new)?);
        if before != after {
            changed += 1;
            println!("--- {} {} {:?}", mistake.config.display(), mistake.set.join(" "), mistake.replace);
            println!("{before}\n+++\n{after}\n");
        }
    }
    println!("{} mistakes, {changed} messages that differ", mistakes.len());
    Ok(changed == 0)
}

fn write(mistake: &Mistake, to: &Path) -> Result<()> {
    let config = &mistake.config;
    let mut text =
        fs::read_to_string(config).map_err(|error| format!("cannot read {}: {error}", config.display()))?;
    for (from, by) in &mistake.replace {
        if !text.contains(from) {
            return Err(format!("{} has no `{from}` to make a mistake of", config.display()));
        }
        text = text.replacen(from, by, 1);
    }
    fs::write(to, text).map_err(|error| format!("cannot write {}: {error}", to.display()))
}

/// Returns the exit code and standard error.
fn said(programs: &Programs, config: &Path, set: &[String]) -> Result<String> {
    let mut command = Command::new(programs.anyroll());
    command.arg("check").arg(config);
    for set in set {
        command.args(["--set", set]);
    }
    let ended = command.output().map_err(|error| format!("anyroll did not start: {error}"))?;
    Ok(format!("{}\n{}", ended.status, String::from_utf8_lossy(&ended.stderr).trim()))
}

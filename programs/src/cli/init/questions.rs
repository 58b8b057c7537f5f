//! Questions on a terminal, for what no option gives.

use std::{
    io::{self, IsTerminal, Write},
    path::{Path, PathBuf},
};

use anyroll_backends::BackendKind;
use anyroll_config::error_chain::one_line;
use anyroll_pipelines::{Result, output_error::OutputError};

use super::{Method, refused};

/// A value that a question shows as its default.
pub(super) trait Shown {
    /// The value as a person would answer it.
    fn shown(&self) -> String;
}

impl Shown for String {
    fn shown(&self) -> String {
        self.clone()
    }
}

impl Shown for usize {
    fn shown(&self) -> String {
        self.to_string()
    }
}

impl Shown for Method {
    fn shown(&self) -> String {
        self.to_string()
    }
}

impl Shown for BackendKind {
    fn shown(&self) -> String {
        self.name().to_owned()
    }
}

/// Asks, or takes defaults.
pub(super) struct Questions {
    /// True if defaults are taken without a question.
    pub takes_defaults: bool,
}

impl Questions {
    /// Returns true if a person can answer.
    pub fn has_terminal(&self) -> bool {
        io::stdin().is_terminal()
    }

    /// Refuses to go on if nobody can answer. An option is its name, true if it is given, and true if it has a default.
    ///
    /// # Errors
    /// The missing options, all at once.
    pub fn need(&self, options: &[(&str, bool, bool)]) -> Result<()> {
        if self.has_terminal() && !self.takes_defaults {
            return Ok(());
        }
        let is_missing = |&&(_, is_given, has_default): &&(&str, bool, bool)| {
            !(is_given || has_default && self.takes_defaults)
        };
        let missing: Vec<&(&str, bool, bool)> = options.iter().filter(is_missing).collect();
        if missing.is_empty() {
            return Ok(());
        }
        let names: Vec<&str> = missing.iter().map(|(name, ..)| *name).collect();
        let have_defaults = missing.iter().any(|(_, _, has_default)| *has_default);
        let more = if have_defaults { ", or `--yes` for the defaults of those that have one" } else { "" };
        let why = if self.takes_defaults { "there is no default" } else { "standard input is no terminal" };
        Err(refused("anyroll init", format!("{why}: pass {}{more}", names.join(", "))))
    }

    /// The given value, the default, or the answer to `question`, which is asked again until `read` takes it.
    ///
    /// # Errors
    /// A terminal that ends, or nobody to ask.
    pub fn answer<T: Clone + Shown>(
        &self,
        given: &Option<T>,
        question: &str,
        default: Option<T>,
        read: impl Fn(&str) -> std::result::Result<T, String>,
    ) -> Result<T> {
        if let Some(given) = given {
            return Ok(given.clone());
        }
        if self.takes_defaults || !self.has_terminal() {
            let problem = || refused("anyroll init", format!("there is no default for the {question}"));
            return default.ok_or_else(problem);
        }
        let shown = default.as_ref().map_or(String::new(), |value| format!(" [{}]", value.shown()));
        ask(&format!("{question}{shown}"), |text| match &default {
            Some(default) if text.is_empty() => Ok(default.clone()),
            _ => read(text),
        })
    }

    /// The given path or name with what `open` finds there, or those of the answer to `question`, which is asked again
    /// until `open` takes it.
    ///
    /// # Errors
    /// A given path that `open` refuses, or a terminal that ends.
    pub fn opened<T>(
        &self,
        given: &Option<PathBuf>,
        question: &str,
        open: impl Fn(&Path) -> Result<T>,
    ) -> Result<(PathBuf, T)> {
        if let Some(given) = given {
            return Ok((given.clone(), open(given)?));
        }
        ask(question, |text| {
            if text.is_empty() {
                return Err("write a path or a name".to_owned());
            }
            open(Path::new(text)).map(|found| (text.into(), found)).map_err(|error| one_line(&error))
        })
    }
}

/// The first answer to `question` that `read` takes.
fn ask<T>(question: &str, read: impl Fn(&str) -> std::result::Result<T, String>) -> Result<T> {
    loop {
        eprint!("{question}: ");
        let _ = io::stderr().flush();
        let mut line = String::new();
        let read_line = io::stdin().read_line(&mut line);
        let count =
            read_line.map_err(|source| OutputError::io("read", Path::new("standard input"), source))?;
        if count == 0 {
            return Err(refused("anyroll init", "standard input ended before the last question".to_owned()));
        }
        match read(line.trim()) {
            Ok(value) => return Ok(value),
            Err(problem) => eprintln!("  {problem}"),
        }
    }
}

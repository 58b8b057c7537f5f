//! The problems of a config, each with its position and its fix.

use std::fmt;
use std::io;
use std::path::{Path, PathBuf};

use super::problem::Problem;

/// A config that cannot be run.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// The file cannot be read, or is not UTF-8.
    #[error("cannot read the config {}{}", path.display(), advice(path, source))]
    Read {
        /// The file.
        path: PathBuf,
        /// The cause.
        source: io::Error,
    },
    /// The file was read and has problems: all of them, in the order of the file.
    #[error("{}", lines(.0))]
    Invalid(Vec<Invalid>),
}

/// Fix of a config that cannot be read.
fn advice(path: &Path, source: &io::Error) -> String {
    match source.kind() {
        io::ErrorKind::NotFound => {
            let found = std::path::absolute(path).unwrap_or_else(|_| path.to_owned());
            format!(", looked for at {}; give the path of a YAML file", found.display())
        }
        io::ErrorKind::IsADirectory => {
            "; give a YAML file, or continue the run of a folder with `anyroll run --resume`".to_owned()
        }
        _ => String::new(),
    }
}

/// A problem of a config.
#[derive(Debug, PartialEq, Eq)]
pub struct Invalid {
    /// Position, such as `configs/sort.yaml:12:5`, or `--set a.b=c` for a value from the command line.
    pub position: String,
    /// Path of the field, such as `pipeline.rlvr.group_size`; empty for an error of the YAML syntax.
    pub field: String,
    /// Description of the problem.
    pub message: String,
    /// The line with a caret below; empty for a value from the command line.
    pub snippet: String,
    /// The fix.
    pub help: String,
}

fn lines(all: &[Invalid]) -> String {
    all.iter().map(Invalid::to_string).collect::<Vec<_>>().join("\n")
}

impl std::error::Error for Invalid {}

impl fmt::Display for Invalid {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}: ", self.position)?;
        if !self.field.is_empty() {
            write!(f, "{}: ", self.field)?;
        }
        writeln!(f, "{}", self.message)?;
        if !self.snippet.is_empty() {
            writeln!(f, "{}", self.snippet)?;
        }
        write!(f, "  help: {}", self.help)
    }
}

/// Position of a key or a value. Positions in the file precede positions in `--set`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Origin {
    /// Line and column in the file, both from 1, the column in characters.
    File { line: usize, column: usize },
    /// Index of the `--set` argument, from 0.
    Set(usize),
}

impl Origin {
    /// Returns true if this position is in a `--set`, and `other` in the file or in an earlier `--set`.
    pub fn is_set_after(self, other: Self) -> bool {
        match (self, other) {
            (Self::Set(own), Self::Set(other)) => own > other,
            (Self::Set(_), Self::File { .. }) => true,
            (Self::File { .. }, _) => false,
        }
    }
}

/// Number of characters of a line that are shown.
const MOST_SHOWN: usize = 160;

/// Number of characters of a line that are shown before the caret.
const MOST_BEFORE: usize = 100;

/// The texts that a config is read from.
#[derive(Clone, Debug)]
pub struct Source {
    /// Path of the file, for messages.
    pub path: PathBuf,
    /// Text of the file.
    pub text: String,
    /// Values of `--set`, in their order.
    pub sets: Vec<String>,
}

impl Source {
    /// Returns the problem as a message for the user.
    pub fn render(&self, problem: Problem) -> Invalid {
        let (position, snippet) = match problem.origin {
            Origin::File { line, column } => {
                (format!("{}:{line}:{column}", self.path.display()), self.snippet(line, column))
            }
            Origin::Set(index) => (format!("--set {}", self.sets[index]), String::new()),
        };
        let Problem { field, message, help, .. } = problem;
        Invalid { position, field, message, snippet, help }
    }

    fn snippet(&self, line: usize, column: usize) -> String {
        // An error at the end of the file may point one line beyond it.
        let text = self.text.lines().nth(line - 1).unwrap_or_default();
        let shown: Vec<char> =
            text.chars().skip(column.saturating_sub(MOST_BEFORE)).take(MOST_SHOWN).collect();
        let caret = (column - 1).min(MOST_BEFORE - 1);
        // A tab stands below a tab, so that the caret stays under its character.
        let indent: String = shown.iter().take(caret).map(|&c| if c == '\t' { '\t' } else { ' ' }).collect();
        let marked = shown.iter().skip(caret).take_while(|c| !" ,]}:#".contains(**c)).count();
        let carets = "^".repeat(marked.max(1));
        let margin = " ".repeat(line.to_string().len());
        let shown: String = shown.into_iter().collect();
        format!(" {margin} |\n {line} | {shown}\n {margin} | {indent}{carets}")
    }
}

/// Returns "did you mean `x`?", or all valid names if none is similar.
pub fn suggestion(wrong: &str, valid: &[&str]) -> String {
    match nearest(wrong, valid) {
        Some(candidate) => format!("did you mean `{candidate}`?"),
        None => format!("choose from {}", list(valid)),
    }
}

/// Returns the valid name that is most similar to a wrong one.
pub(super) fn nearest<'a>(wrong: &str, valid: &[&'a str]) -> Option<&'a str> {
    // A third of the letters may be wrong, but always two.
    let tolerance = (wrong.chars().count() / 3).max(2);
    valid
        .iter()
        .map(|candidate| (strsim::damerau_levenshtein(wrong, candidate), *candidate))
        .filter(|(distance, candidate)| *distance <= tolerance && *distance < candidate.len())
        .min()
        .map(|(_, candidate)| candidate)
}

/// Returns names as `a`, `b`, `c`.
pub fn list(names: &[&str]) -> String {
    names.iter().map(|name| format!("`{name}`")).collect::<Vec<_>>().join(", ")
}

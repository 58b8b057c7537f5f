//! `cargo xtask lines`: lines of code per backend, and how many of them also exist in another backend.
//!
//! Only lines with code count: no blank lines, no comments, and no tests at the end of a file. A line is
//! copied if it belongs to at least [`RUN`] consecutive lines that another folder also has.

use std::collections::HashSet;
use std::fs;
use std::path::Path;

use crate::error::{Error, Result};

/// Shorter runs are equal by chance, or by rustfmt.
const RUN: usize = 6;

/// A folder of `backends/src` with the lines of code of its files.
struct Folder {
    name: String,
    files: Vec<Vec<String>>,
}

/// Prints a table in Markdown.
pub fn print(root: &Path) -> Result<()> {
    print!("{}", table(&read(&root.join("backends/src"))?));
    Ok(())
}

fn table(folders: &[Folder]) -> String {
    let mut text =
        "| folder | lines of Rust, without tests | of them also elsewhere |\n|---|---|---|\n".to_owned();
    for (index, folder) in folders.iter().enumerate() {
        let lines: usize = folder.files.iter().map(Vec::len).sum();
        let others = folders.iter().enumerate().filter(|(other, _)| *other != index).map(|(_, other)| other);
        let copied = copied(folder, others);
        text += &format!("| `backends/src/{}` | {lines} | {copied} |\n", folder.name);
    }
    text
}

/// Counts the lines of `folder` in runs that one of `others` also has.
fn copied<'a>(folder: &Folder, others: impl Iterator<Item = &'a Folder>) -> usize {
    let mut runs: HashSet<&[String]> = HashSet::new();
    for other in others {
        runs.extend(other.files.iter().flat_map(|file| file.windows(RUN)));
    }
    let copied_of = |file: &Vec<String>| {
        let mut is_copied = vec![false; file.len()];
        for (start, run) in file.windows(RUN).enumerate() {
            if runs.contains(run) {
                is_copied[start..start + RUN].fill(true);
            }
        }
        is_copied.into_iter().filter(|it| *it).count()
    };
    folder.files.iter().map(copied_of).sum()
}

/// Reads the subfolders of a folder, sorted by name.
fn read(path: &Path) -> Result<Vec<Folder>> {
    let mut folders = Vec::new();
    for entry in fs::read_dir(path).map_err(|error| Error::io("read", path, error))?.flatten() {
        if entry.path().is_dir() {
            let mut files = Vec::new();
            read_files(&entry.path(), &mut files)?;
            folders.push(Folder { name: entry.file_name().display().to_string(), files });
        }
    }
    folders.sort_by(|a, b| a.name.cmp(&b.name));
    Ok(folders)
}

fn read_files(path: &Path, files: &mut Vec<Vec<String>>) -> Result<()> {
    for entry in fs::read_dir(path).map_err(|error| Error::io("read", path, error))?.flatten() {
        let path = entry.path();
        if path.is_dir() {
            read_files(&path, files)?;
        } else if path.extension().is_some_and(|it| it == "rs") && !path.ends_with("tests.rs") {
            files.push(code(&fs::read_to_string(&path).map_err(|error| Error::io("read", &path, error))?));
        }
    }
    Ok(())
}

/// Returns the lines of code.
fn code(text: &str) -> Vec<String> {
    let before_tests = text.split("#[cfg(test)]\nmod tests {").next().unwrap_or(text);
    let lines = before_tests.lines().map(str::trim);
    lines.filter(|line| !line.is_empty() && !line.starts_with("//")).map(str::to_owned).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn comments_blanks_and_tests_are_no_code() {
        let text =
            "//! Doc.\n\nfn f() {\n    // Why.\n    g();\n}\n\n#[cfg(test)]\nmod tests {\n    fn t() {}\n}\n";
        assert_eq!(code(text), ["fn f() {", "g();", "}"]);
    }

    #[test]
    fn runs_of_lines_that_stand_elsewhere_are_copied() {
        let folder = |name: &str, lines: &[&str]| {
            let file = lines.iter().map(|line| (*line).to_owned()).collect();
            Folder { name: name.into(), files: vec![file] }
        };
        let one = folder("one", &["a", "b", "c", "d", "e", "f", "g", "own"]);
        let two = folder("two", &["other", "a", "b", "c", "d", "e", "f", "g"]);
        let few = folder("few", &["a", "b", "c", "x", "d", "e", "f"]);
        assert_eq!(copied(&one, [&two].into_iter()), 7);
        assert_eq!(copied(&one, [&few].into_iter()), 0);
        assert!(table(&[one, two]).contains("| `backends/src/one` | 8 | 7 |"));
    }

    /// The table of docs/guides/backends.md matches the tree within a tenth, since it shows proportions.
    #[test]
    fn the_documented_lines_are_right() {
        let root = Path::new(concat!(env!("CARGO_MANIFEST_DIR"), "/.."));
        let docs = fs::read_to_string(root.join("docs/guides/backends.md")).unwrap();
        for folder in read(&root.join("backends/src")).unwrap() {
            let row = format!("| `backends/src/{}` | ", folder.name);
            let Some(line) = docs.lines().find_map(|line| line.strip_prefix(&row)) else { continue };
            let documented: usize = line.split(' ').next().and_then(|it| it.parse().ok()).expect("a number");
            let lines: usize = folder.files.iter().map(Vec::len).sum();
            let message =
                format!("docs/guides/backends.md: {row}{documented}, counted {lines}: `cargo xtask lines`");
            assert!(documented.abs_diff(lines) <= 20 + lines / 10, "{message}");
        }
    }
}

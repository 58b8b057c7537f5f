//! Command substitutions that name folders, such as `$(cd "$(dirname "$0")" && pwd)`.

use std::path::{Component, Path, PathBuf};

use super::{Variables, commands, is_expanded};

/// Result of the commands in `$(...)`, if they only name a folder that is known.
pub(super) fn named(inner: &str, variables: &mut Variables) -> Option<String> {
    let known = ["pwd", "cd ", "dirname ", "realpath ", "readlink -f "];
    if !known.iter().any(|start| inner.trim_start().starts_with(start)) {
        return None;
    }
    let commands = commands(inner, variables).ok()?;
    let words: Vec<Vec<&str>> =
        commands.iter().map(|words| words.iter().map(String::as_str).collect()).collect();
    let words: Vec<&[&str]> = words.iter().map(Vec::as_slice).collect();
    let path = match words[..] {
        [["pwd"]] => variables.folder()?,
        [["dirname", path] | ["dirname", "--", path]] if is_expanded(path) => {
            let parent = Path::new(path).parent()?;
            if parent.as_os_str().is_empty() { PathBuf::from(".") } else { parent.to_owned() }
        }
        [["realpath", path] | ["readlink", "-f", path]] | [["cd", path], ["pwd"] | ["pwd", "-P"]]
            if is_expanded(path) =>
        {
            normal(&variables.folder()?.join(path))
        }
        _ => return None,
    };
    Some(path.to_str()?.to_owned())
}

/// `path` without `.` and `..`.
fn normal(path: &Path) -> PathBuf {
    let mut parts = PathBuf::new();
    for part in path.components() {
        match part {
            Component::ParentDir => drop(parts.pop()),
            Component::CurDir => {}
            part => parts.push(part),
        }
    }
    parts
}

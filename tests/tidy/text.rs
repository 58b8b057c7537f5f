//! Rules for text of any kind.

use super::source::Source;

const MAX_LINES: usize = 800;
const COUNTED: [&str; 12] =
    [".rs", ".cpp", ".h", ".hpp", ".cu", ".comp", ".py", ".sh", ".md", ".toml", ".yaml", ".yml"];

/// Parts of registries' host names: the source of packages is up to the machine that builds. Written in
/// halves, so that this file follows its own rule.
const HOSTS: [&str; 4] = [
    concat!("pypi", ".org"),
    concat!("python", "hosted"),
    concat!("crates", ".io"),
    concat!("download.", "pytorch"),
];

/// First folders of paths that exist on only one machine.
const MACHINE_FOLDERS: [&str; 6] = ["work", "root", "home", "Users", "tmp", "scratch"];

const UNFINISHED: [&str; 3] = [concat!("TO", "DO"), concat!("FIX", "ME"), concat!("XX", "X")];

pub fn check(source: &Source, add: &mut dyn FnMut(usize, String)) {
    // Written by cargo, which names its registry and does not limit lines.
    if source.path == "Cargo.lock" {
        return;
    }
    let lines = source.text.lines().count();
    let is_generated = source.path.ends_with(".md") && source.text.contains("\nThis page is generated from ");
    if lines > MAX_LINES && !is_generated && COUNTED.iter().any(|it| source.path.ends_with(it)) {
        add(MAX_LINES + 1, format!("a file has at most {MAX_LINES} lines, this one has {lines}"));
    }
    for (index, line) in source.text.lines().enumerate() {
        if let Some(host) = HOSTS.iter().find(|it| line.contains(**it)) {
            add(index + 1, format!("no registry's host: {host}"));
        }
        if let Some(folder) = MACHINE_FOLDERS.iter().find(|it| names_root_folder(line, it)) {
            add(index + 1, format!("no path of one machine: /{folder}/"));
        }
        if let Some(mark) = UNFINISHED.iter().find(|it| line.contains(**it)) {
            add(index + 1, format!("unfinished: {mark}"));
        }
    }
}

/// Every config has a line in the folder's README, so that users find it.
pub fn check_configs(source: &Source, tree: &[Source], add: &mut dyn FnMut(usize, String)) {
    let Some(name) = source.path.strip_prefix("configs/").filter(|it| it.ends_with(".yaml")) else { return };
    let readme = tree.iter().find(|it| it.path == "configs/README.md");
    if !readme.is_some_and(|it| it.text.contains(name)) {
        add(1, "configs/README.md names every config".into());
    }
}

/// Returns true if the line has a path that starts with this folder, and not one that contains it later.
fn names_root_folder(line: &str, folder: &str) -> bool {
    let path = format!("/{folder}/");
    let starts = |(at, _): (usize, &str)| {
        let before = line[..at].chars().next_back();
        !before.is_some_and(|it| it.is_alphanumeric() || "._-~}$)*/".contains(it))
    };
    line.match_indices(&path).any(starts)
}

#[cfg(test)]
mod tests {
    use super::super::{expect, expect_tree};
    use super::*;

    #[test]
    fn files_are_short() {
        expect("models/src/a.rs", &"\n".repeat(MAX_LINES), &[]);
        expect("models/src/a.rs", &"\n".repeat(MAX_LINES + 1), &[(MAX_LINES + 1, "at most 800 lines")]);
        expect("tests/golden/a.jsonl", &"\n".repeat(MAX_LINES + 1), &[]);
    }

    #[test]
    fn no_machine_is_named() {
        for folder in ["work", "home"] {
            let line = format!("see \"/{folder}/me/x\"");
            expect("docs/a.md", &line, &[(1, "no path of one machine")]);
            for fine in [format!("frame/{folder}/me"), format!("~/{folder}/me"), format!("$HOME/{folder}/me")]
            {
                expect("docs/a.md", &fine, &[]);
            }
        }
        expect("README.md", &format!("\nfrom https://{}/simple", HOSTS[0]), &[(2, "no registry's host")]);
        expect("Cargo.lock", &format!("https://{}", HOSTS[2]), &[]);
    }

    #[test]
    fn nothing_is_left_to_do() {
        expect("docs/a.md", &format!("{}: say more", UNFINISHED[0]), &[(1, "unfinished")]);
    }

    #[test]
    fn configs_are_listed() {
        let (config, readme) = (("configs/a.yaml", ""), "configs/README.md");
        expect_tree(&[config], &[(1, "names every config")]);
        expect_tree(&[config, (readme, "- b.yaml")], &[(1, "names every config")]);
        expect_tree(&[config, (readme, "- a.yaml: sorts")], &[]);
    }
}

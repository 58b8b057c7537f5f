//! Guides for users of other systems: the commands of a page, run on the files that the page shows.
//!
//! A fenced block names its file after its language, as in `yaml run.yaml`. A block whose file no earlier command
//! has written is an input. A `console` block has commands; below an import stands its report.

use std::fmt::Write as _;
use std::fs;
use std::os::unix::fs::symlink;
use std::path::Path;
use std::process::Command;

use super::{ANYROLL, published_model, succeed};

/// The model that the pages name, here a tiny one.
const MODEL: &str = "Qwen/Qwen2.5-0.5B-Instruct";

#[test]
fn the_guide_from_trl_holds() {
    follow("from_trl", 6);
}

#[test]
fn the_guide_from_verl_holds() {
    follow("from_verl", 4);
}

#[test]
fn the_guide_from_openrlhf_holds() {
    follow("from_openrlhf", 6);
}

#[test]
fn the_guide_from_roll_holds() {
    follow("from_roll", 4);
}

/// Asserts that a page's reports and imported configs are what its `count` commands write.
///
/// `ANYROLL_WRITE_DOCS=1 cargo test --release -p anyroll-programs the_guide_from` writes them into the pages.
#[track_caller]
fn follow(page: &str, count: usize) {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join(format!("../docs/guides/{page}.md"));
    let written = fs::read_to_string(&path).unwrap();
    let commands = written.lines().filter(|line| line.starts_with("$ anyroll ")).count();
    assert_eq!(commands, count, "commands of {page}");
    let folder = tempfile::tempdir().unwrap();
    let model = folder.path().join(MODEL);
    fs::create_dir_all(model.parent().unwrap()).unwrap();
    symlink(published_model::model(), model).unwrap();
    let followed = followed(&written, folder.path());
    if std::env::var_os("ANYROLL_WRITE_DOCS").is_some() {
        fs::write(&path, &followed).unwrap();
    }
    let differs = written.lines().zip(followed.lines()).enumerate().find(|(_, (old, new))| old != new);
    if let Some((index, (old, new))) = differs {
        panic!("docs/guides/{page}.md:{}: stale\n  page: {old}\n   now: {new}", index + 1);
    }
    assert_eq!(written.len(), followed.len(), "docs/guides/{page}.md: the end is stale");
}

/// The page with the reports and configs that its commands write in `folder`.
fn followed(page: &str, folder: &Path) -> String {
    let mut text = String::new();
    let mut lines = page.lines();
    while let Some(line) = lines.next() {
        writeln!(text, "{line}").unwrap();
        let Some(head) = line.strip_prefix("```") else { continue };
        let body: Vec<&str> = lines.by_ref().take_while(|line| *line != "```").collect();
        match head.split_once(' ') {
            None if head == "console" => text.push_str(&console(&body, folder)),
            None => text.push_str(&joined(&body)),
            Some((_, file)) => text.push_str(&contents(&folder.join(file), &body)),
        }
        text.push_str("```\n");
    }
    text
}

/// The text of a file that a command has written, or writes the block's lines to it.
fn contents(file: &Path, body: &[&str]) -> String {
    if !file.exists() {
        fs::create_dir_all(file.parent().unwrap()).unwrap();
        fs::write(file, joined(body)).unwrap();
    }
    fs::read_to_string(file).unwrap()
}

/// Runs the commands of a block. Returns them, with the report below each import.
fn console(body: &[&str], folder: &Path) -> String {
    let mut text = String::new();
    let mut lines = body.iter();
    while let Some(line) = lines.next() {
        let Some(first) = line.strip_prefix("$ ") else { continue };
        let mut command = first.to_owned();
        while command.ends_with('\\') {
            command = format!("{command}\n{}", lines.next().expect("a line after the backslash"));
        }
        let stdout = succeed(shell(&command, folder)).stdout;
        writeln!(text, "$ {command}").unwrap();
        if command.starts_with("anyroll import") {
            text.push_str(&stdout);
        }
    }
    text
}

/// A command line as a user types it in `folder`, with the tested programs first on the path.
fn shell(line: &str, folder: &Path) -> Command {
    let programs = Path::new(ANYROLL).parent().unwrap().display();
    let path = format!("{programs}:{}", std::env::var("PATH").unwrap());
    let mut command = Command::new("sh");
    command.args(["-c", line]).current_dir(folder).env("PATH", path);
    for variable in ["RANK", "WORLD_SIZE", "LOCAL_RANK", "ANYROLL_LOG"] {
        command.env_remove(variable);
    }
    command
}

fn joined(lines: &[&str]) -> String {
    lines.iter().map(|line| format!("{line}\n")).collect()
}

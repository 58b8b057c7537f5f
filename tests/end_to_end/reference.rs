//! `docs/reference/cli.md` against what the program says of itself.

use std::collections::BTreeSet;
use std::fs;

use super::{anyroll, succeed};

/// The page's section of a command names each of its options, and no other.
#[test]
fn the_command_line_page_has_every_option() {
    let page = concat!(env!("CARGO_MANIFEST_DIR"), "/../docs/reference/cli.md");
    let page = fs::read_to_string(page).unwrap();
    let commands = commands(&succeed(anyroll(["--help"])).stdout);
    let sections = page.split("\n## ").skip(1).filter_map(|it| it.split_once('\n'));
    let sections: Vec<(&str, &str)> = sections
        .filter_map(|(title, text)| Some((title.strip_prefix('`')?.strip_suffix('`')?, text)))
        .collect();
    let documented: BTreeSet<&str> = sections.iter().map(|it| it.0).collect();
    assert_eq!(documented, commands.iter().map(String::as_str).collect());
    for (command, text) in sections {
        let help = succeed(anyroll([command, "--help"])).stdout;
        // Other options are named in the descriptions.
        let defined = help.lines().filter(|line| line.trim_start().starts_with("--"));
        let expected: BTreeSet<String> = defined.filter_map(|line| options(line).next()).collect();
        assert_eq!(options(text).collect::<BTreeSet<String>>(), expected, "`{command}`");
    }
}

/// The commands of the list in the program's help.
fn commands(help: &str) -> BTreeSet<String> {
    let list =
        help.lines().skip_while(|line| *line != "Commands:").skip(1).take_while(|line| !line.is_empty());
    let names = list.filter_map(|line| line.split_whitespace().next());
    names.filter(|name| *name != "help").map(str::to_owned).collect()
}

/// The long options that a text names, in its order.
fn options(text: &str) -> impl Iterator<Item = String> {
    let starts = text.match_indices("--").filter(|(at, _)| !text[..*at].ends_with(['-', '|']));
    let names = starts.map(|(at, _)| {
        let rest = &text[at..];
        let end = rest.find(|it: char| !(it.is_ascii_alphanumeric() || it == '-'));
        rest[..end.unwrap_or(rest.len())].to_owned()
    });
    names.filter(|name| name.len() > "--".len())
}

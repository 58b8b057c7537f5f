//! The page of a newcomer's first evening, with its own commands and files, on a tiny model.

use std::io::{self, Write};
use std::process::Command;
use std::time::Duration;

use super::{ANYROLL, Process, anyroll, published_model};

#[test]
fn every_command_and_file_of_the_page_works() {
    if Command::new("curl").arg("--version").output().is_err() {
        // Past the harness, which hides the output of passing tests.
        io::stderr().write_all(b"SKIPPED: docs/first_model.md: it needs curl\n").unwrap();
        return;
    }
    let mut command = Command::new("python3");
    command.current_dir(anyroll([""; 0]).get_current_dir().unwrap());
    command.args(["tests/python/run_page.py", "--anyroll", ANYROLL, "--model"]);
    command.arg(published_model::model()).args(["--replace", "steps: 30=steps: 2"]);
    let ended = Process::start(command).finish_within(Duration::from_secs(300));
    assert_eq!(ended.code, Some(0), "{ended:#?}");
    assert!(ended.stdout.ends_with("first_model.md: 15 blocks\n"), "{ended:#?}");
}

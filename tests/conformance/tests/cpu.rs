//! The cpu backend holds its contracts, and so does the example of `docs/adding_a_backend.md`.

mod common;
#[path = "../../../backends/examples/host_memory/mod.rs"]
mod host_memory;

use anyroll_backends::Backend;
use anyroll_conformance::{Counts, Outcome, collective_suite, device_suite, failure_suite, table};
use common::{cpu, on_ranks};

#[test]
fn device() {
    assert_passed(&device_suite(&cpu().open(0).unwrap(), None), 0);
}

#[test]
fn one_rank() {
    // Six rules are about other ranks.
    ranks(cpu(), 1, 6);
}

/// The matrix has cells of 1, 2 and 4 ranks, each a process.
#[test]
fn three_ranks() {
    ranks(cpu(), 3, 0);
}

#[test]
fn the_example() {
    let example = &host_memory::BACKEND;
    assert_passed(&device_suite(&example.open(0).unwrap(), None), 0);
    ranks(example, 2, 0);
}

#[test]
fn the_example_has_the_lines_of_code_that_its_text_says() {
    let code = include_str!("../../../backends/examples/host_memory/mod.rs");
    let is_code = |line: &&str| !line.trim().is_empty() && !line.trim().starts_with("//");
    let words = format!("{} lines of code", code.lines().filter(is_code).count());
    let text = include_str!("../../../docs/adding_a_backend.md");
    assert!(text.contains(&words), "docs/adding_a_backend.md does not say that the example has {words}");
}

fn ranks(backend: &dyn Backend, world_size: usize, skipped: usize) {
    let outcomes = on_ranks(backend, world_size, |peers| {
        let mut outcomes = collective_suite(&peers, None);
        outcomes.extend(failure_suite(&peers, None));
        outcomes
    });
    assert_passed(&outcomes, skipped);
}

/// Asserts that every rule passed, except `skipped` that cannot apply.
fn assert_passed(outcomes: &[Outcome], skipped: usize) {
    println!("{}", table(outcomes));
    let counts = Counts::of(outcomes);
    assert!(counts.failed == 0 && counts.skipped == skipped && counts.passed > 0, "{}", table(outcomes));
}

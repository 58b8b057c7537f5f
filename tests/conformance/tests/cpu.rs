//! The cpu backend holds its contracts, and so does the example of `docs/adding_a_backend.md`.

mod common;
#[path = "../../../backends/examples/host_memory/mod.rs"]
mod host_memory;

use std::sync::Arc;

use anyroll_backends::Device;
use anyroll_conformance::{Counts, Outcome, collective_suite, device_suite, failure_suite, table};
use common::{cpu, on_ranks_of};
use host_memory::HostMemory;

#[test]
fn device() {
    assert_passed(&device_suite(&cpu(0), None), 0);
}

#[test]
fn one_rank() {
    // Five rules are about other ranks.
    ranks(1, cpu, 5);
}

#[test]
fn two_ranks() {
    ranks(2, cpu, 0);
}

#[test]
fn three_ranks() {
    ranks(3, cpu, 0);
}

#[test]
fn four_ranks() {
    ranks(4, cpu, 0);
}

#[test]
fn the_example() {
    assert_passed(&device_suite(&HostMemory::open(0), None), 0);
    ranks(2, HostMemory::open, 0);
}

#[test]
fn the_example_is_as_short_as_it_says() {
    let text = include_str!("../../../backends/examples/host_memory/mod.rs");
    let is_code = |line: &&str| !line.trim().is_empty() && !line.trim().starts_with("//");
    let lines = text.lines().filter(is_code).count();
    assert!(lines < 150, "{lines} lines of code");
}

fn ranks(world_size: usize, open: fn(usize) -> Arc<dyn Device>, skipped: usize) {
    let outcomes = on_ranks_of(&open, world_size, |peers| {
        let mut outcomes = collective_suite(&peers, None);
        outcomes.extend(failure_suite(&peers, None));
        outcomes
    });
    assert_passed(&outcomes, skipped);
}

/// Every rule passed, but for as many as cannot apply.
fn assert_passed(outcomes: &[Outcome], skipped: usize) {
    println!("{}", table(outcomes));
    let counts = Counts::of(outcomes);
    assert!(counts.failed == 0 && counts.skipped == skipped && counts.passed > 0, "{}", table(outcomes));
}

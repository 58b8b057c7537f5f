//! The cpu backend holds its contracts.

mod common;

use anyroll_conformance::{Counts, Outcome, collective_suite, device_suite, failure_suite, table};
use common::{cpu, on_ranks};

#[test]
fn device() {
    assert_passed(&device_suite(&cpu(0), None), 0);
}

#[test]
fn one_rank() {
    // Four rules are about other ranks.
    ranks(1, 4);
}

#[test]
fn two_ranks() {
    ranks(2, 0);
}

#[test]
fn three_ranks() {
    ranks(3, 0);
}

#[test]
fn four_ranks() {
    ranks(4, 0);
}

fn ranks(world_size: usize, skipped: usize) {
    let outcomes = on_ranks(world_size, |peers| {
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

//! The vulkan backend holds its contracts, on whatever device is there: on lavapipe, where there is no GPU.

mod common;

use std::{io::Write, sync::Arc};

use anyroll_backends::{Backend, Device, Error, backend};
use anyroll_conformance::{Counts, Outcome, Status, collective_suite, device_suite, failure_suite, table};
use common::on_ranks;

fn under_test() -> &'static dyn Backend {
    backend("vulkan".parse().expect("the name of a backend")).expect("it is in the list")
}

/// The first device. Without a driver reports past the harness, which keeps the output of passing tests.
fn first() -> Option<Arc<dyn Device>> {
    match under_test().open(0) {
        Ok(device) => Some(device),
        Err(error @ Error::Unavailable { .. }) => {
            let _ = writeln!(std::io::stderr(), "SKIPPED: {error}");
            None
        }
        Err(error) => panic!("{error}"),
    }
}

/// One test, since the suite counts the device's memory, which tests that run at once would share. More ranks are
/// processes: `anyroll conformance --backend vulkan` starts them.
#[test]
fn device_and_collectives_of_one_rank() {
    let Some(device) = first() else { return };
    assert_passed(&device_suite(&device, None));
    assert_passed(&on_ranks(under_test(), 1, |peers| {
        let mut outcomes = collective_suite(&peers, None);
        outcomes.extend(failure_suite(&peers, None));
        outcomes
    }));
}

/// Every rule passed, but for those about libtorch, which does not compute on it, and about other ranks.
fn assert_passed(outcomes: &[Outcome]) {
    println!("{}", table(outcomes));
    let counts = Counts::of(outcomes);
    assert!(counts.failed == 0 && counts.passed > 100, "{}", table(outcomes));
    for outcome in outcomes {
        if let Status::Skipped(reason) = &outcome.status {
            let is_known =
                ["libtorch does not compute", "needs two ranks"].iter().any(|it| reason.contains(it));
            assert!(is_known, "{}: {reason}", outcome.name);
        }
    }
}

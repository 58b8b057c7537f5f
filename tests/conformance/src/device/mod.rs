//! The rules of [`Device`], checked in one process.

mod arenas;
mod memory;
mod streams;
mod tensors;

use std::{sync::Arc, time::Duration};

use anyroll_backends::{Device, faults::Delayed};

use crate::{
    Outcome,
    host::leaves_no_memory,
    runner::{Case, Verdict},
};

/// Time that a case may take. Ordinary ones take milliseconds.
const DEADLINE: Duration = Duration::from_secs(60);

/// Longest delay of work in the second round.
const DELAY: Duration = Duration::from_millis(1);

type Check = fn(&Arc<dyn Device>) -> Verdict;

/// Checks the rules of [`Device`]: as it is, and again with work that starts late at random, which finds the waits
/// that are missing. Only cases whose name contains `filter`.
pub fn device_suite(device: &Arc<dyn Device>, filter: Option<&str>) -> Vec<Outcome> {
    let mut outcomes = round("device", device, filter);
    for seed in 1..=3 {
        let delayed = Delayed::wrap(device.clone(), seed, DELAY);
        outcomes.extend(round(&format!("device, delayed by seed {seed}"), &delayed, filter));
    }
    outcomes
}

fn round(group: &str, device: &Arc<dyn Device>, filter: Option<&str>) -> Vec<Outcome> {
    let rules = [memory::RULES, arenas::RULES, streams::RULES, tensors::RULES].into_iter().flatten();
    rules
        .filter(|(name, _)| name.contains(filter.unwrap_or_default()))
        .map(|(name, check)| Case::new(*name, |device| leaves_no_memory(device, || check(device))))
        .map(|case| case.run(group, device.clone(), DEADLINE))
        .collect()
}

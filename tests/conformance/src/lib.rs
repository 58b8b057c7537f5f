//! The contracts of [`Device`] and [`Collective`] as code: one suite for every backend.
//!
//! A rule that stands in the doc comments of those traits has a case here, and a backend is done when every case
//! passes. [`device_suite`] needs one process. [`collective_suite`] and [`failure_suite`] are called by every rank
//! of a job, in the same order; the verdicts of all ranks are merged, so that each returns the whole table. Run
//! them at several world sizes, with `anyroll conformance` or from a test.
//!
//! Read in this order: [`Outcome`] is what a case ends with; `runner` runs one with a deadline; `host` and `values`
//! move and make data; `device` and `collective` hold the cases.
//!
//! [`Device`]: anyroll_backends::Device
//! [`Collective`]: anyroll_backends::Collective

#![forbid(unsafe_code)]

mod collective;
mod device;
mod host;
mod outcome;
mod runner;
mod values;

pub use collective::{Peers, collective_suite, failure_suite};
pub use device::device_suite;
pub use outcome::{Counts, Outcome, Status, table};

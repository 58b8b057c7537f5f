//! Signals that ask a job to end.

use std::thread;
use std::time::{Duration, Instant};

use signal_hook::consts::{SIGHUP, SIGINT, SIGTERM};
use signal_hook::iterator::Signals;

use super::{Error, POLL_INTERVAL};

/// Ctrl-C, SIGTERM and SIGHUP, which the process itself ignores once they are caught.
#[derive(Debug)]
pub struct Interrupts(Signals);

impl Interrupts {
    /// Catches the signals from now on.
    ///
    /// # Errors
    /// If the system refuses.
    pub fn catch() -> Result<Self, Error> {
        let signals = Signals::new([SIGINT, SIGTERM, SIGHUP]);
        signals.map(Self).map_err(|source| Error::Prepare { action: "catch signals", source })
    }

    /// Signals that arrived since the last call.
    pub(super) fn pending(&mut self) -> impl Iterator<Item = i32> {
        self.0.pending()
    }

    /// Waits so long, or until a signal arrives; returns true for a signal.
    pub fn arrives_within(&mut self, time: Duration) -> bool {
        let end = Instant::now() + time;
        loop {
            if self.pending().next().is_some() {
                return true;
            }
            if Instant::now() >= end {
                return false;
            }
            thread::sleep(POLL_INTERVAL);
        }
    }
}

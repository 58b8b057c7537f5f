//! [`Traffic`]: the rows that a rank sends to others, measured without a wait of the host.

use std::{
    sync::{Mutex, MutexGuard, PoisonError},
    time::Duration,
};

use anyroll_backends::{Event, Stream};
use anyroll_models as models;

use crate::{Result, copy_thread::wait_for};

/// Rows that a rank sent to the experts of others.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Exchanged {
    /// Bytes that this rank sent to other ranks.
    pub sent_bytes: usize,
    /// Time that compute stood still for exchanges: for the slowest rank, and for the rows themselves.
    pub waited: Duration,
}

/// Measures exchanges from [`Self::start`] to [`Self::finish`], and none at other times.
#[derive(Debug, Default)]
pub(crate) struct Traffic(Mutex<Option<Measured>>);

#[derive(Debug, Default)]
struct Measured {
    sent_bytes: usize,
    /// Events on the compute stream before and after each exchange.
    waits: Vec<[Event; 2]>,
}

impl Traffic {
    /// Begins anew.
    pub fn start(&self) {
        *self.measured() = Some(Measured::default());
    }

    /// Returns what was measured since [`Self::start`]. Waits for the last exchange.
    pub fn finish(&self, compute: &Stream) -> Result<Exchanged> {
        let Measured { sent_bytes, waits } = self.measured().take().unwrap_or_default();
        if let Some([_, after]) = waits.last() {
            wait_for(after, compute.device())?;
        }
        let mut waited = Duration::ZERO;
        for [before, after] in &waits {
            waited += before.elapsed(after)?;
        }
        Ok(Exchanged { sent_bytes, waited })
    }

    /// Runs `exchange`, for which `compute` waits, and in which this rank sends `sent_bytes` to others.
    pub fn measure(
        &self,
        sent_bytes: usize,
        compute: &Stream,
        exchange: impl FnOnce() -> models::Result<()>,
    ) -> models::Result<()> {
        if self.measured().is_none() {
            return exchange();
        }
        let before = compute.record_timed()?;
        exchange()?;
        let after = compute.record_timed()?;
        if let Some(measured) = &mut *self.measured() {
            measured.sent_bytes += sent_bytes;
            measured.waits.push([before, after]);
        }
        Ok(())
    }

    fn measured(&self) -> MutexGuard<'_, Option<Measured>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

//! The host memory that is pinned for a device.

use std::{collections::BTreeMap, sync::Mutex};

use crate::{DeviceId, Result, device::unsupported};

/// Lengths in bytes, by address.
#[derive(Debug, Default)]
pub(crate) struct PinnedRanges(Mutex<BTreeMap<usize, usize>>);

impl PinnedRanges {
    /// All of them together.
    pub(crate) fn bytes(&self) -> usize {
        self.0.lock().unwrap().values().sum()
    }

    pub(crate) fn add(&self, address: usize, len: usize) {
        self.0.lock().unwrap().insert(address, len);
    }

    pub(crate) fn remove(&self, address: usize) {
        self.0.lock().unwrap().remove(&address);
    }

    /// Offset of a range within the pinned one that contains it; an error if none does, since vendors' libraries copy other
    /// memory without an error.
    pub(crate) fn offset_of(&self, device: DeviceId, address: usize, len: usize) -> Result<usize> {
        let ranges = self.0.lock().unwrap();
        match ranges.range(..=address).next_back() {
            Some((base, size)) if address - base + len <= *size => Ok(address - base),
            _ => unsupported(device, format!("copies of host memory at {address:#x}, which is not pinned")),
        }
    }
}

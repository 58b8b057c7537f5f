//! Page-locked host memory: ordinary pages, touched by several threads, then registered in pieces. 16 GiB take
//! 0.6 s so, where the driver's own allocation takes 4.6 s (docs/results/hardware.md).

use std::{ffi::c_ulong, fs, ops::Range, thread};

use super::{context::Context, facts};
use crate::{
    Error, Result,
    ffi::library::Failed,
    host::{memory, pinned_ranges::PinnedRanges},
    safe::stream::report,
};

/// One registration covers at most this much. A copy must not cross from one into the next.
const PIECE_BYTES: usize = 1 << 30;
/// Threads that touch fresh pages; more gain nothing.
const TOUCHING_THREADS: usize = 8;
/// Below this a thread costs more than it saves.
const BYTES_OF_A_THREAD: usize = 64 << 20;

/// The pinned memory of one device.
#[derive(Debug, Default)]
pub(super) struct Pinned(PinnedRanges);

impl Pinned {
    pub(super) fn bytes(&self) -> usize {
        self.0.bytes()
    }

    /// `len` zeroed bytes on the device's own NUMA node.
    pub(super) fn alloc(&self, context: &Context, len: usize) -> Result<*mut u8> {
        let _entered = context.enter()?;
        let out_of_memory = || Error::OutOfMemory {
            device: context.id,
            requested_bytes: len,
            free_bytes: memory::host().map_or(0, |(free, _)| free),
        };
        let address = memory::map(len, memory::Access::ReadWrite).ok_or_else(out_of_memory)?;
        // SAFETY: a fresh mapping of our own.
        unsafe { prepare(context, address, len) };
        let mut registered = 0;
        for piece in pieces(0..len) {
            // SAFETY: the piece lies in the mapping, and is unregistered before that goes away.
            let outcome =
                unsafe { context.driver.host_register(address.add(piece.start).cast(), piece.len(), 0) };
            if let Err(failed) = outcome {
                // SAFETY: nobody else knows of the memory.
                report(unsafe { release(context, address, len, registered) });
                return Err(context.memory_error(failed, len));
            }
            registered = piece.end;
        }
        self.0.add(address as usize, len);
        Ok(address)
    }

    /// # Safety
    /// `address` came from `alloc` with this `len`, and no copy uses it.
    pub(super) unsafe fn free(&self, context: &Context, address: *mut u8, len: usize) -> Result<()> {
        let _entered = context.enter()?;
        self.0.remove(address as usize);
        // SAFETY: the caller's promise.
        unsafe { release(context, address, len, len) }
    }

    /// Offsets from `address` at which a copy of `len` bytes has to be cut.
    pub(super) fn cut(&self, context: &Context, address: usize, len: usize) -> Result<Vec<Range<usize>>> {
        let start = self.0.offset_of(context.id, address, len)?;
        Ok(pieces(start..start + len).map(|piece| piece.start - start..piece.end - start).collect())
    }
}

/// `range` of an allocation, cut where its registrations meet.
fn pieces(range: Range<usize>) -> impl Iterator<Item = Range<usize>> {
    let first = range.start / PIECE_BYTES;
    let end = range.end.div_ceil(PIECE_BYTES);
    (first..end)
        .map(move |piece| range.start.max(piece * PIECE_BYTES)..range.end.min((piece + 1) * PIECE_BYTES))
}

/// Makes the kernel put real pages behind the addresses: to register untouched ones does that on one thread.
///
/// # Safety
/// The range is a fresh mapping.
unsafe fn prepare(context: &Context, address: *mut u8, len: usize) {
    // SAFETY: advice on the caller's mapping; where the kernel declines, small pages do too.
    unsafe { libc::madvise(address.cast(), len, libc::MADV_HUGEPAGE) };
    if let Some(node) = numa_node(context) {
        prefer_node(address, len, node);
    }
    let threads = (len / BYTES_OF_A_THREAD).clamp(1, TOUCHING_THREADS);
    let share = len.div_ceil(threads).next_multiple_of(memory::page_bytes());
    let base = address as usize;
    thread::scope(|scope| {
        for start in (0..len).step_by(share) {
            let range = base + start..base + len.min(start + share);
            scope.spawn(move || {
                for page in range.step_by(memory::page_bytes()) {
                    // SAFETY: in the caller's mapping, which no one else uses. Zero is what is there already.
                    unsafe { (page as *mut u8).write_volatile(0) };
                }
            });
        }
    });
}

/// The NUMA node next to the device, where the machine has more than one.
fn numa_node(context: &Context) -> Option<u32> {
    let id = facts::pci_bus_id(context.driver, context.device).ok()?;
    // -1 where there is only one.
    fs::read_to_string(format!("/sys/bus/pci/devices/{id}/numa_node")).ok()?.trim().parse().ok()
}

/// Asks for pages of a node. Only speed depends on it, so that a refusal is worth a line in the log.
fn prefer_node(address: *mut u8, len: usize, node: u32) {
    const MPOL_PREFERRED: libc::c_int = 1;
    let Some(mask): Option<c_ulong> = (1 as c_ulong).checked_shl(node) else { return };
    // SAFETY: a policy for the caller's mapping; `mask` is read during the call only.
    let code = unsafe {
        libc::syscall(
            libc::SYS_mbind,
            address,
            len,
            MPOL_PREFERRED,
            &raw const mask,
            u64::from(c_ulong::BITS),
            0,
        )
    };
    if code != 0 {
        tracing::debug!("pinned memory is not on NUMA node {node}: {}", std::io::Error::last_os_error());
    }
}

/// Unregisters the first `registered` bytes and unmaps all.
///
/// # Safety
/// The range is a mapping registered so far, which nothing uses.
unsafe fn release(context: &Context, address: *mut u8, len: usize, registered: usize) -> Result<()> {
    let outcome = pieces(0..registered)
        // SAFETY: the caller's promise.
        .map(|piece| unsafe { context.driver.host_unregister(address.add(piece.start).cast()) })
        .fold(Ok(()), Result::<(), Failed>::and);
    // SAFETY: as above; the driver has let go of it, or reports below that it has not.
    unsafe { memory::unmap(address, len) };
    outcome.map_err(|failed| context.error(failed))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn copies_are_cut_where_registrations_meet() {
        let check = |range: Range<usize>, ends: &[usize]| {
            let cut: Vec<_> = pieces(range.clone()).collect();
            assert_eq!(cut.iter().map(|piece| piece.end).collect::<Vec<_>>(), ends, "{range:?}");
            let starts = std::iter::once(&range.start).chain(ends);
            assert!(cut.iter().map(|piece| &piece.start).eq(starts.take(ends.len())), "{range:?}: {cut:?}");
        };
        const GIB: usize = 1 << 30;
        check(0..0, &[]);
        check(0..1, &[1]);
        check(5..GIB, &[GIB]);
        check(0..GIB + 1, &[GIB, GIB + 1]);
        check(GIB - 1..GIB + 1, &[GIB, GIB + 1]);
        check(GIB..2 * GIB, &[2 * GIB]);
        check(7..2 * GIB + 7, &[GIB, 2 * GIB, 2 * GIB + 7]);
    }
}

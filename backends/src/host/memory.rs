//! Memory from the kernel: whole pages, so that giving them back shows at once and an arena keeps its address.

use std::{fs, io, ptr};

pub(crate) enum Access {
    None,
    ReadWrite,
}

impl Access {
    const fn flags(&self) -> libc::c_int {
        match self {
            Self::None => libc::PROT_NONE,
            Self::ReadWrite => libc::PROT_READ | libc::PROT_WRITE,
        }
    }
}

/// `len` bytes of fresh, zeroed pages, or of bare addresses; `None` when there is no room.
pub(crate) fn map(len: usize, access: Access) -> Option<*mut u8> {
    let flags = libc::MAP_PRIVATE | libc::MAP_ANONYMOUS;
    // SAFETY: an anonymous mapping at an address of the kernel's choice touches nothing that exists.
    let address = unsafe { libc::mmap(ptr::null_mut(), len, access.flags(), flags, -1, 0) };
    (address != libc::MAP_FAILED).then_some(address.cast())
}

/// Gives a mapping back.
///
/// # Safety
/// `address` and `len` are those of a live mapping that nothing uses any more.
pub(crate) unsafe fn unmap(address: *mut u8, len: usize) {
    // SAFETY: the caller's promise. With a whole mapping munmap has no way to fail.
    unsafe { libc::munmap(address.cast(), len) };
}

/// Makes reserved pages usable; `false` when there is no room.
///
/// # Safety
/// The range is a live reservation.
pub(crate) unsafe fn commit(address: *mut u8, len: usize) -> bool {
    // SAFETY: the caller's promise.
    unsafe { libc::mprotect(address.cast(), len, Access::ReadWrite.flags()) == 0 }
}

/// Gives the pages back to the kernel and makes every later access a fault.
///
/// # Safety
/// The range is a live reservation that nothing uses.
pub(crate) unsafe fn decommit(address: *mut u8, len: usize) {
    // SAFETY: the caller's promise.
    unsafe {
        libc::madvise(address.cast(), len, libc::MADV_DONTNEED);
        libc::mprotect(address.cast(), len, Access::None.flags());
    }
}

pub(crate) fn page_bytes() -> usize {
    // SAFETY: reads a constant of the kernel.
    usize::try_from(unsafe { libc::sysconf(libc::_SC_PAGESIZE) }).unwrap_or(4096)
}

/// Free and total bytes: the machine's, or the control group's where that is less.
pub(crate) fn host() -> io::Result<(usize, usize)> {
    let text = fs::read_to_string("/proc/meminfo")?;
    let field = |name: &str| {
        let kib =
            text.lines().find_map(|line| line.strip_prefix(name)?.split_whitespace().next()?.parse().ok());
        kib.map(|kib: usize| kib * 1024)
            .ok_or_else(|| io::Error::new(io::ErrorKind::InvalidData, format!("/proc/meminfo has no {name}")))
    };
    let (free, total) = (field("MemAvailable:")?, field("MemTotal:")?);
    let group = |file: &str| -> Option<usize> {
        fs::read_to_string(format!("/sys/fs/cgroup/{file}")).ok()?.trim().parse().ok()
    };
    match (group("memory.max"), group("memory.current")) {
        (Some(limit), Some(used)) if limit < total => Ok((free.min(limit.saturating_sub(used)), limit)),
        _ => Ok((free, total)),
    }
}

/// Lets libtorch's activations, which are freed and allocated anew in every pass, stay with the process: by itself
/// glibc gives them back to the kernel each time, and the page faults cost a tenth of a small model's pass.
pub(crate) fn keep_freed_memory() {
    const KEPT_BYTES: libc::c_int = 1 << 30;
    const LARGEST_KEPT_BYTES: libc::c_int = 32 << 20; // glibc's own bound for M_MMAP_THRESHOLD
    #[cfg(target_env = "gnu")]
    // SAFETY: sets two numbers of the allocator, under its own lock.
    unsafe {
        libc::mallopt(libc::M_TRIM_THRESHOLD, KEPT_BYTES);
        libc::mallopt(libc::M_MMAP_THRESHOLD, LARGEST_KEPT_BYTES);
    }
}

/// Gives this process's freed memory back to the kernel, for the end of large work that is not repeated in every pass. The
/// CPU backend otherwise keeps up to 1 GiB for each of the allocator's arenas, of which every thread may have one.
pub fn give_back_freed_memory() {
    #[cfg(target_env = "gnu")]
    // SAFETY: releases pages without live allocations, under the allocator's own locks.
    unsafe {
        libc::malloc_trim(0);
    }
}

pub(crate) fn processor_name() -> String {
    let text = fs::read_to_string("/proc/cpuinfo").unwrap_or_default();
    let model = text.lines().find_map(|line| line.strip_prefix("model name")?.split(": ").nth(1));
    model.unwrap_or(std::env::consts::ARCH).trim().to_owned()
}

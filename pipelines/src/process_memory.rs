//! Memory of this process, as the kernel reports it.

use std::{fs, io};

/// Bytes of a size of `/proc/self/status`: `VmRSS`, in host memory, or `VmSize`, addressed.
///
/// # Errors
/// If the kernel has no such file, or no such size in it.
pub fn size_bytes(name: &str) -> io::Result<u64> {
    let status = fs::read_to_string("/proc/self/status")?;
    size_in(&status, name).ok_or_else(|| io::Error::other(format!("/proc/self/status has no {name}")))
}

fn size_in(status: &str, name: &str) -> Option<u64> {
    let text = status.lines().find_map(|line| line.strip_prefix(name)?.strip_prefix(':'))?;
    let kib: u64 = text.trim().strip_suffix("kB")?.trim().parse().ok()?;
    Some(kib << 10)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sizes_are_read_in_bytes() {
        let status = "Name:\tx\nVmSize:\t  9 kB\nVmRSS:\t    1234 kB\n";
        assert_eq!(size_in(status, "VmRSS"), Some(1234 * 1024));
        assert_eq!(size_in(status, "VmSize"), Some(9 * 1024));
        assert_eq!(size_in("Name:\tx\n", "VmRSS"), None);
        assert!(size_bytes("VmNone").unwrap_err().to_string().contains("has no VmNone"));
        // This test's own memory, with a buffer that is written.
        let before = size_bytes("VmRSS").unwrap();
        let buffer = vec![1u8; 64 << 20];
        let after = size_bytes("VmRSS").unwrap();
        assert!(buffer.iter().all(|byte| *byte == 1) && after > before + (48 << 20), "{before} {after}");
    }
}

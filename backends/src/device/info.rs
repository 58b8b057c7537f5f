//! Reports about a device: its memory, and the facts that `doctor` shows.

use super::kind::DeviceId;

/// Memory of a device, in bytes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct MemoryInfo {
    /// Free on the whole device, whichever process uses the rest.
    pub free_bytes: usize,
    /// Total of the device.
    pub total_bytes: usize,
    /// Held by this process through this [`crate::Device`]: buffers and mapped arenas.
    pub allocated_bytes: usize,
    /// Pinned host memory held by this process through this [`crate::Device`].
    pub pinned_bytes: usize,
}

/// Use of a device by all processes, as its driver reports it.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct DeviceLoad {
    /// Memory in use now.
    pub used_bytes: usize,
    /// Total of the device.
    pub total_bytes: usize,
    /// Share of the time in which it was busy, from 0 to 1, since the last call of this process or over the driver's own
    /// period; `None` if the driver does not report it.
    pub busy: Option<f64>,
}

/// Facts about a device that are quick to read.
#[derive(Clone, Debug)]
pub struct DeviceInfo {
    /// The device.
    pub id: DeviceId,
    /// The vendor's name of the product.
    pub name: String,
    /// Total memory, if it is known without opening the device.
    pub total_bytes: Option<usize>,
    /// Further facts, as name and value.
    pub details: Vec<(String, String)>,
}

/// Facts about a device that take a while to find out.
#[derive(Clone, Debug, Default)]
pub struct Diagnosis {
    /// Further facts, as name and value.
    pub details: Vec<(String, String)>,
    /// The hardware's peak rates.
    pub limits: Limits,
}

/// Peak rates of the hardware, by its own statement; `None` where it makes none.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Limits {
    /// Bytes a second that its memory reads and writes, together.
    pub memory_bytes_per_s: Option<f64>,
    /// Bytes a second over its link to the host, one way.
    pub host_bytes_per_s: Option<f64>,
    /// Bytes a second over its links to other devices, one way.
    pub peer_bytes_per_s: Option<f64>,
    /// Operations a second in products of dense bf16 matrices.
    pub bf16_flops: Option<f64>,
}

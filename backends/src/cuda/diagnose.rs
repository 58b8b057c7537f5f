//! Facts that only `doctor` reads: versions of libraries, links, and the hardware's peak rates.

use std::ffi::{c_int, c_uint};

use super::{COMPUTE_CAPABILITY_MAJOR, COMPUTE_CAPABILITY_MINOR, NCCL, VENDOR, nvml::Nvml};
use crate::{Diagnosis, Limits, ffi::library::Failed, gpu::Driver, nccl};

/// `CUdevice_attribute`
const CLOCK_KHZ: c_int = 13;
/// See above.
const MEMORY_CLOCK_KHZ: c_int = 36;
/// See above.
const MEMORY_BUS_BITS: c_int = 37;

/// See [`crate::gpu::Dialect::diagnose`].
pub(super) fn diagnose(
    driver: &Driver,
    device: c_int,
    ordinal: usize,
    addresses: &[String],
) -> Result<Diagnosis, Failed> {
    let nvml = Nvml::open();
    let mut details = Vec::new();
    let mut tell = |name: &str, value: Option<String>| {
        details.push((name.to_owned(), value.unwrap_or_else(|| "not found".into())));
    };
    tell("NVIDIA driver", nvml.as_ref().and_then(Nvml::driver));
    tell("NCCL", nccl::version(&NCCL));

    let mut limits = Limits {
        memory_bytes_per_s: Some(memory_bytes_per_s(driver, device)?),
        bf16_flops: bf16_flops(driver, device)?,
        ..Limits::default()
    };
    let Some(nvml) = nvml else { return Ok(Diagnosis { details, limits }) };
    let Some(handle) = nvml.at(&addresses[ordinal]) else { return Ok(Diagnosis { details, limits }) };
    if let Some((generation, lanes)) = nvml.pcie(handle) {
        limits.host_bytes_per_s = pcie_bytes_per_s(generation).map(|lane| lane * f64::from(lanes));
        let link = format!("{lanes} lanes, generation {generation}");
        tell("PCIe link", Some(with_rate(link, limits.host_bytes_per_s)));
    }
    if let Some((links, version)) = nvml.links(handle) {
        let (name, rate) = nvlink(version);
        limits.peer_bytes_per_s = rate.map(|link| link * links as f64);
        let links = format!("{links} links, version {name}");
        tell("NVLink", Some(with_rate(links, limits.peer_bytes_per_s)));
    }
    for (other, address) in addresses.iter().enumerate().filter(|(other, _)| *other != ordinal) {
        let between = nvml.at(address).and_then(|peer| nvml.between(handle, peer));
        tell(&format!("to {}:{other}", VENDOR.backend), between.map(Into::into));
    }
    Ok(Diagnosis { details, limits })
}

fn with_rate(text: String, bytes_per_s: Option<f64>) -> String {
    match bytes_per_s {
        Some(rate) => format!("{text}, {:.0} GB/s each way", rate / 1e9),
        None => text,
    }
}

/// Two transfers a cycle of the memory's clock over the whole bus.
fn memory_bytes_per_s(driver: &Driver, device: c_int) -> Result<f64, Failed> {
    let kilohertz = driver.attribute(device, MEMORY_CLOCK_KHZ)?;
    let bits = driver.attribute(device, MEMORY_BUS_BITS)?;
    Ok(2.0 * f64::from(kilohertz) * 1e3 * f64::from(bits) / 8.0)
}

/// Dense bf16 products with fp32 sums at the highest clock. Operations a cycle and multiprocessor are from the
/// architecture papers of A100, H100 and B200; `None` for other architectures.
fn bf16_flops(driver: &Driver, device: c_int) -> Result<Option<f64>, Failed> {
    let major = driver.attribute(device, COMPUTE_CAPABILITY_MAJOR)?;
    let minor = driver.attribute(device, COMPUTE_CAPABILITY_MINOR)?;
    let per_cycle = match (major, minor) {
        (8, 0) => 2048.0,
        (9, 0) => 4096.0,
        (10, 0) => 8192.0,
        _ => return Ok(None),
    };
    let kilohertz = driver.attribute(device, CLOCK_KHZ)?;
    let multiprocessors = driver.attribute(device, VENDOR.multiprocessors)?;
    Ok(Some(per_cycle * f64::from(kilohertz) * 1e3 * f64::from(multiprocessors)))
}

/// Rate of one lane, one way, after its line code (PCI Express base specification).
fn pcie_bytes_per_s(generation: c_uint) -> Option<f64> {
    let (gigatransfers, code) = match generation {
        1 => (2.5, 8.0 / 10.0),
        2 => (5.0, 8.0 / 10.0),
        3 => (8.0, 128.0 / 130.0),
        4 => (16.0, 128.0 / 130.0),
        5 => (32.0, 128.0 / 130.0),
        6 => (64.0, 242.0 / 256.0),
        _ => return None,
    };
    Some(gigatransfers * code * 1e9 / 8.0)
}

/// A version by `nvmlNvlinkVersion_t`, and the bytes a second of one link, one way.
fn nvlink(version: c_uint) -> (&'static str, Option<f64>) {
    match version {
        1 => ("1.0", Some(20e9)),
        2 => ("2.0", Some(25e9)),
        3 => ("2.2", Some(25e9)),
        4 => ("3.0", Some(25e9)),
        5 => ("3.1", Some(25e9)),
        6 => ("4.0", Some(25e9)),
        7 => ("5.0", Some(50e9)),
        _ => ("unknown", None),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::ffi::abi::{assert_says, fact};

    #[test]
    fn attributes_have_the_numbers_of_the_header() {
        let facts = [
            fact("value", "CU_DEVICE_ATTRIBUTE_CLOCK_RATE", CLOCK_KHZ),
            fact("value", "CU_DEVICE_ATTRIBUTE_MEMORY_CLOCK_RATE", MEMORY_CLOCK_KHZ),
            fact("value", "CU_DEVICE_ATTRIBUTE_GLOBAL_MEMORY_BUS_WIDTH", MEMORY_BUS_BITS),
        ];
        assert_says("cuda_13.0", &facts);
    }

    #[test]
    fn links_have_the_rates_of_their_specifications() {
        let gigabytes = |rate: Option<f64>| rate.map(|rate| (rate / 1e8).round() / 10.0);
        let lanes = |generation| gigabytes(pcie_bytes_per_s(generation).map(|lane| 16.0 * lane));
        assert_eq!([1, 3, 4, 5].map(lanes), [Some(4.0), Some(15.8), Some(31.5), Some(63.0)]);
        assert_eq!(lanes(99), None);
        assert_eq!(gigabytes(nvlink(6).1.map(|link| 18.0 * link)), Some(450.0)); // H100: 900 GB/s both ways
        assert_eq!(nvlink(99), ("unknown", None));
    }
}

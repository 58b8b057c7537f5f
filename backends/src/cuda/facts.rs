//! What can be said of the devices without a context on any: `doctor` reads it.

use std::ffi::{CStr, c_char, c_int, c_uint};

use super::{
    driver::{Driver, attribute},
    nvml::Nvml,
    nvrtc,
};
use crate::{BackendKind, DeviceId, DeviceInfo, Diagnosis, Error, Limits, Result, library::Failed, nccl};

/// The driver's number of a device. [`Error::Unavailable`] when there are not so many.
pub(super) fn device(driver: &Driver, ordinal: usize) -> Result<c_int> {
    let id = DeviceId { backend: BackendKind::Cuda, ordinal };
    let count = count(driver)?;
    if ordinal >= count {
        let reason = format!("{id} was asked for, and this process sees {count} devices");
        return Err(Error::Unavailable {
            backend: id.backend,
            tried: vec!["cuDeviceGetCount".into()],
            reason,
        });
    }
    let mut device = 0;
    // SAFETY: a number of our own.
    unsafe { driver.device_get(&mut device, ordinal as c_int) }.map_err(|failed| driver.error(id, failed))?;
    Ok(device)
}

/// How many devices this process sees.
pub(super) fn count(driver: &Driver) -> Result<usize> {
    let mut count = 0;
    // SAFETY: a number of our own.
    let outcome = unsafe { driver.device_count(&mut count) };
    outcome.map_err(|failed| driver.error(DeviceId { backend: BackendKind::Cuda, ordinal: 0 }, failed))?;
    Ok(usize::try_from(count).unwrap_or(0))
}

/// What `doctor` shows of a device.
pub(super) fn info(driver: &Driver, ordinal: usize) -> Result<DeviceInfo> {
    let id = DeviceId { backend: BackendKind::Cuda, ordinal };
    let number = device(driver, ordinal)?;
    let facts = read(driver, number).map_err(|failed| driver.error(id, failed))?;
    let mut peers = Vec::new();
    for other in (0..count(driver)?).filter(|other| *other != ordinal) {
        let peer = device(driver, other)?;
        let mut can = 0;
        // SAFETY: a number of our own.
        unsafe { driver.device_can_access_peer(&mut can, number, peer) }
            .map_err(|failed| driver.error(id, failed))?;
        if can != 0 {
            peers.push(format!("cuda:{other}"));
        }
    }
    let peers = if peers.is_empty() { "none".into() } else { peers.join(" ") };
    let (major, minor) = facts.compute_capability;
    let details = [
        ("driver", format!("CUDA {}.{}", facts.version / 1000, facts.version % 1000 / 10)),
        ("memory", format!("{:.1} GiB", facts.total_bytes as f64 / f64::from(1 << 30))),
        ("compute capability", format!("{major}.{minor}")),
        ("multiprocessors", facts.multiprocessors.to_string()),
        ("PCIe", facts.pci_bus_id),
        ("peer access", peers),
    ];
    let details = details.map(|(name, value)| (name.to_owned(), value)).to_vec();
    Ok(DeviceInfo { id, name: facts.name, details })
}

/// What takes a while to find out: versions of libraries, links, and what the hardware can do at most.
pub(super) fn diagnose(driver: &Driver, ordinal: usize) -> Result<Diagnosis> {
    let id = DeviceId { backend: BackendKind::Cuda, ordinal };
    let failed = |failed| driver.error(id, failed);
    let number = device(driver, ordinal)?;
    let nvml = Nvml::open();
    let mut details = Vec::new();
    let mut tell = |name: &str, value: Option<String>| {
        details.push((name.to_owned(), value.unwrap_or_else(|| "not found".into())));
    };
    tell("NVIDIA driver", nvml.as_ref().and_then(Nvml::driver));
    tell("NCCL", nccl::version());
    tell("NVRTC", nvrtc::version());

    let mut limits = Limits {
        memory_bytes_per_s: Some(memory_bytes_per_s(driver, number).map_err(failed)?),
        bf16_flops: bf16_flops(driver, number).map_err(failed)?,
        ..Limits::default()
    };
    let Some(nvml) = nvml else { return Ok(Diagnosis { details, limits }) };
    let at = |device| nvml.at(&pci_bus_id(driver, device).ok()?);
    let Some(handle) = at(number) else { return Ok(Diagnosis { details, limits }) };
    if let Some((generation, lanes)) = nvml.pcie(handle) {
        limits.host_bytes_per_s = pcie_bytes_per_s(generation).map(|lane| lane * f64::from(lanes));
        tell(
            "PCIe link",
            Some(with_rate(format!("{lanes} lanes, generation {generation}"), limits.host_bytes_per_s)),
        );
    }
    if let Some((links, version)) = nvml.links(handle) {
        let (name, rate) = nvlink(version);
        limits.peer_bytes_per_s = rate.map(|link| link * links as f64);
        tell("NVLink", Some(with_rate(format!("{links} links, version {name}"), limits.peer_bytes_per_s)));
    }
    for other in (0..count(driver)?).filter(|other| *other != ordinal) {
        let peer = at(device(driver, other)?);
        let between = peer.and_then(|peer| nvml.between(handle, peer)).map(Into::into);
        tell(&format!("to cuda:{other}"), between);
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
    let kilohertz = attribute(driver, device, attribute::MEMORY_CLOCK_KHZ)?;
    let bits = attribute(driver, device, attribute::MEMORY_BUS_BITS)?;
    Ok(2.0 * f64::from(kilohertz) * 1e3 * f64::from(bits) / 8.0)
}

/// Dense bf16 products with fp32 sums at the highest clock. Operations a cycle and multiprocessor are from the
/// architecture papers of A100, H100 and B200; `None` for other architectures.
fn bf16_flops(driver: &Driver, device: c_int) -> Result<Option<f64>, Failed> {
    let per_cycle = match compute_capability(driver, device)? {
        (8, 0) => 2048.0,
        (9, 0) => 4096.0,
        (10, 0) => 8192.0,
        _ => return Ok(None),
    };
    let kilohertz = attribute(driver, device, attribute::CLOCK_KHZ)?;
    let multiprocessors = attribute(driver, device, attribute::MULTIPROCESSORS)?;
    Ok(Some(per_cycle * f64::from(kilohertz) * 1e3 * f64::from(multiprocessors)))
}

/// Of one lane, one way, after its line code (PCI Express base specification).
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

/// Major and minor version of what the device's code is compiled for.
pub(super) fn compute_capability(driver: &Driver, device: c_int) -> Result<(c_int, c_int), Failed> {
    Ok((
        attribute(driver, device, attribute::COMPUTE_CAPABILITY_MAJOR)?,
        attribute(driver, device, attribute::COMPUTE_CAPABILITY_MINOR)?,
    ))
}

/// The PCIe address of a device as the kernel writes it, in lower case.
pub(super) fn pci_bus_id(driver: &Driver, device: c_int) -> Result<String, Failed> {
    // SAFETY: `text` passes a buffer of the length that it passes.
    let id = text(|buffer, len| unsafe { driver.device_pci_bus_id(buffer, len, device) })?;
    Ok(id.to_lowercase())
}

struct Facts {
    name: String,
    version: c_int,
    total_bytes: usize,
    compute_capability: (c_int, c_int),
    multiprocessors: c_int,
    pci_bus_id: String,
}

fn read(driver: &Driver, device: c_int) -> Result<Facts, Failed> {
    let (mut version, mut total_bytes) = (0, 0);
    // SAFETY: numbers of our own.
    unsafe {
        driver.driver_version(&mut version)?;
        driver.device_total_memory(&mut total_bytes, device)?;
    }
    Ok(Facts {
        // SAFETY: `text` passes a buffer of the length that it passes.
        name: text(|buffer, len| unsafe { driver.device_name(buffer, len, device) })?,
        version,
        total_bytes,
        compute_capability: compute_capability(driver, device)?,
        multiprocessors: attribute(driver, device, attribute::MULTIPROCESSORS)?,
        pci_bus_id: pci_bus_id(driver, device)?,
    })
}

fn attribute(driver: &Driver, device: c_int, attribute: c_int) -> Result<c_int, Failed> {
    let mut value = 0;
    // SAFETY: a number of our own.
    unsafe { driver.device_attribute(&mut value, attribute, device)? };
    Ok(value)
}

fn text(read: impl FnOnce(*mut c_char, c_int) -> Result<(), Failed>) -> Result<String, Failed> {
    let mut buffer = [0u8; 256];
    read(buffer.as_mut_ptr().cast(), buffer.len() as c_int)?;
    let text = CStr::from_bytes_until_nul(&buffer).unwrap_or_default();
    Ok(text.to_string_lossy().into_owned())
}

#[cfg(test)]
mod tests {
    use super::*;

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

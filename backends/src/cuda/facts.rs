//! What can be said of the devices without a context on any: `doctor` reads it.

use std::ffi::{CStr, c_char, c_int};

use super::driver::{Driver, attribute};
use crate::{BackendKind, DeviceId, DeviceInfo, Error, Result, library::Failed};

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

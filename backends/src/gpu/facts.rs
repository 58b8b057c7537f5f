//! Facts about devices that need no context: `doctor` reads them.

use std::ffi::{CStr, c_char, c_int};

use super::driver::Driver;
use crate::{DeviceId, DeviceInfo, Result, ffi::library::Failed};

/// The driver's number of a device. [`crate::Error::Unavailable`] if there are fewer devices.
pub(super) fn device(driver: &Driver, ordinal: usize) -> Result<c_int> {
    let id = DeviceId { backend: driver.vendor.backend, ordinal };
    let count = count(driver)?;
    if ordinal >= count {
        let reason = format!("{id} was asked for, and this process sees {count} devices");
        return Err(driver.vendor.unavailable(driver.vendor.driver_files, reason));
    }
    let mut device = 0;
    // SAFETY: a number of our own.
    unsafe { driver.device_get(&mut device, ordinal as c_int) }.map_err(|failed| driver.error(id, failed))?;
    Ok(device)
}

/// Number of devices that this process sees.
pub(super) fn count(driver: &Driver) -> Result<usize> {
    let mut count = 0;
    // SAFETY: a number of our own.
    let outcome = unsafe { driver.device_count(&mut count) };
    outcome
        .map_err(|failed| driver.error(DeviceId { backend: driver.vendor.backend, ordinal: 0 }, failed))?;
    Ok(usize::try_from(count).unwrap_or(0))
}

/// Facts that `doctor` shows of a device.
pub(super) fn info(driver: &Driver, ordinal: usize) -> Result<DeviceInfo> {
    let id = DeviceId { backend: driver.vendor.backend, ordinal };
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
            peers.push(DeviceId { ordinal: other, ..id }.to_string());
        }
    }
    let peers = if peers.is_empty() { "none".into() } else { peers.join(" ") };
    let details = [
        ("driver", driver.version.clone()),
        ("memory", format!("{:.1} GiB", facts.total_bytes as f64 / f64::from(1 << 30))),
        ("architecture", facts.architecture),
        ("multiprocessors", facts.multiprocessors.to_string()),
        ("PCIe", facts.pci_bus_id),
        ("peer access", peers),
    ];
    let details = details.map(|(name, value)| (name.to_owned(), value)).to_vec();
    Ok(DeviceInfo { id, name: facts.name, total_bytes: Some(facts.total_bytes), details })
}

/// The PCIe address of a device as the kernel writes it, in lower case.
pub(super) fn pci_bus_id(driver: &Driver, device: c_int) -> Result<String, Failed> {
    // SAFETY: `text` passes a buffer of the length that it passes.
    let id = text(|buffer, len| unsafe { driver.device_pci_bus_id(buffer, len, device) })?;
    Ok(id.to_lowercase())
}

struct Facts {
    name: String,
    total_bytes: usize,
    architecture: String,
    multiprocessors: c_int,
    pci_bus_id: String,
}

fn read(driver: &Driver, device: c_int) -> Result<Facts, Failed> {
    let mut total_bytes = 0;
    // SAFETY: a number of our own.
    unsafe { driver.device_total_memory(&mut total_bytes, device)? };
    Ok(Facts {
        // SAFETY: `text` passes a buffer of the length that it passes.
        name: text(|buffer, len| unsafe { driver.device_name(buffer, len, device) })?,
        total_bytes,
        architecture: driver.dialect.architecture(driver, device)?,
        multiprocessors: driver.attribute(device, driver.vendor.multiprocessors)?,
        pci_bus_id: pci_bus_id(driver, device)?,
    })
}

fn text(read: impl FnOnce(*mut c_char, c_int) -> Result<(), Failed>) -> Result<String, Failed> {
    let mut buffer = [0u8; 256];
    read(buffer.as_mut_ptr().cast(), buffer.len() as c_int)?;
    let text = CStr::from_bytes_until_nul(&buffer).unwrap_or_default();
    Ok(text.to_string_lossy().into_owned())
}

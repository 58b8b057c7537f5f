//! The ROCm backend: AMD's HIP runtime, 6.0 or newer, and its run-time compiler. HIP has the driver interface of CUDA
//! under names of its own, so that nearly all of the backend is [`crate::gpu`], and RCCL is NCCL's table.
//!
//! libtorch's build for ROCm presents itself as `cuda`, with the same device type. A device is made current by its
//! number: HIP's context calls are deprecated, and its pop leaves the pushed device current.

use std::{
    ffi::{CStr, c_int, c_void},
    fs,
    path::Path,
};

use crate::{
    BackendKind, BackendTraits, Diagnosis, Limits, Result,
    ffi::library::{Failed, table},
    gpu::{Dialect, Driver, Handle, Opened, Vendor, VendorBackend},
    nccl::{self, Installation},
};

impl BackendKind {
    /// AMD.
    pub const ROCM: Self =
        Self::new(&BackendTraits { adds_by_rows: true, ..BackendTraits::accelerator("rocm") });
}

/// The entry of the list in `lib.rs`.
pub(crate) static BACKEND: VendorBackend = VendorBackend(&VENDOR);

/// RCCL.
pub(crate) static RCCL: Installation = Installation::new(
    BackendKind::ROCM,
    &["librccl.so.1", "librccl.so", "/opt/rocm/lib/librccl.so"],
    "it comes with ROCm",
);

/// AMD's names and numbers.
pub(crate) static VENDOR: Vendor = Vendor {
    backend: BackendKind::ROCM,
    column: 1,
    driver_files: &[
        "libamdhip64.so.7",
        "libamdhip64.so.6",
        "libamdhip64.so",
        "/opt/rocm/lib/libamdhip64.so",
        // Opened only to say that it is too old.
        "libamdhip64.so.5",
    ],
    driver_hint: "it comes with ROCm: install that, or give this container /dev/kfd and /dev/dri",
    version_call: "hipRuntimeGetVersion",
    version,
    // Up to HIP 6 the compiler is also in the runtime itself.
    compiler_files: &[
        "libhiprtc.so.7",
        "libhiprtc.so.6",
        "libhiprtc.so",
        "/opt/rocm/lib/libhiprtc.so",
        "libamdhip64.so.6",
    ],
    compiler_hint: "it comes with ROCm",
    compiler_builtins: "libhiprtc-builtins.so",
    compiler_architecture: "--offload-arch=",
    compiler_options: &["-ffp-contract=off", "-std=c++17"],
    libtorch_file: "libtorch_hip.so",
    collectives: &RCCL,
    rank_environment: &[],
    multiprocessors: 63,
    // SAFETY: the caller's promise; the signatures are those of hip_runtime_api.h.
    dialect: |library| unsafe { Ok(Box::new(Calls::load(library, 0)?)) },
    opened: Opened::nothing(),
};

/// `hipDeviceProp_tR0600::gcnArchName`: its offset, and the size of the whole struct.
const ARCHITECTURE_OFFSET: usize = 1160;
/// See above.
const PROPERTIES_BYTES: usize = 1472;

table! {
    /// Functions that HIP names in its own way. The properties have a suffix: under the bare name the library still exports
    /// the function that writes the older, shorter struct.
    Calls {
        device_current = "hipGetDevice"(device: *mut c_int);
        device_set = "hipSetDevice"(device: c_int);
        properties = "hipGetDevicePropertiesR0600"(properties: *mut c_void, device: c_int);
    }
}

/// Folder of the kernel's devices by PCIe address, where the driver `amdgpu` has a file with the percentage.
const PCI_DEVICES: &str = "/sys/bus/pci/devices";

/// Enumerations were renumbered in 6.0, and the struct of properties has another layout from then on.
fn version(version: c_int) -> Result<String, String> {
    let (major, minor) = (version / 10_000_000, version / 100_000 % 100);
    if major < 6 {
        return Err(format!(
            "it is HIP {major}.{minor}, and 6.0 is the oldest that works: install a newer ROCm"
        ));
    }
    Ok(format!("HIP {major}.{minor}"))
}

/// See [`Dialect::busy`], in a folder as [`PCI_DEVICES`].
fn busy_in(devices: &Path, pci_bus_id: &str) -> Option<f64> {
    let percent = fs::read_to_string(devices.join(pci_bus_id).join("gpu_busy_percent")).ok()?;
    percent
        .trim()
        .parse::<u32>()
        .ok()
        .filter(|percent| *percent <= 100)
        .map(|percent| f64::from(percent) / 100.0)
}

impl Dialect for Calls {
    fn retain(&self, device: c_int) -> Result<Handle, Failed> {
        Ok(device as Handle)
    }

    fn release(&self, _device: c_int) -> Result<(), Failed> {
        Ok(())
    }

    fn enter(&self, retained: Handle) -> Result<Handle, Failed> {
        let mut previous = 0;
        // SAFETY: a number of our own, and one of a device.
        unsafe {
            self.device_current(&mut previous)?;
            self.device_set(retained as c_int)?;
        }
        Ok(previous as Handle)
    }

    fn leave(&self, previous: Handle) -> Result<(), Failed> {
        // SAFETY: the number of a device.
        unsafe { self.device_set(previous as c_int) }
    }

    fn load_function(&self, _function: Handle) -> Result<(), Failed> {
        Ok(()) // a module is loaded whole
    }

    /// Such as `gfx942:sramecc+:xnack-`.
    fn architecture(&self, _driver: &Driver, device: c_int) -> Result<String, Failed> {
        // Later releases may append fields.
        let mut properties = [0u8; 2 * PROPERTIES_BYTES];
        // SAFETY: a buffer larger than the struct.
        unsafe { self.properties(properties.as_mut_ptr().cast(), device)? };
        let name = CStr::from_bytes_until_nul(&properties[ARCHITECTURE_OFFSET..]).unwrap_or_default();
        Ok(name.to_string_lossy().into_owned())
    }

    fn busy(&self, pci_bus_id: &str) -> Option<f64> {
        busy_in(Path::new(PCI_DEVICES), pci_bus_id)
    }

    fn diagnose(
        &self,
        _driver: &Driver,
        _device: c_int,
        _ordinal: usize,
        _addresses: &[String],
    ) -> Result<Diagnosis, Failed> {
        let version = nccl::version(&RCCL).unwrap_or_else(|| "not found".into());
        Ok(Diagnosis { details: vec![("RCCL".into(), version)], limits: Limits::default() })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::ffi::abi::{assert_says, fact};

    #[test]
    fn the_table_says_what_the_headers_say() {
        let mut facts = Calls::signatures(0);
        facts.extend([
            fact("size", "hipDeviceProp_tR0600", PROPERTIES_BYTES),
            fact("offset", "hipDeviceProp_tR0600.gcnArchName", ARCHITECTURE_OFFSET),
            fact("value", "hipDeviceAttributeMultiprocessorCount", VENDOR.multiprocessors),
        ]);
        for release in ["hip_6.4", "hip_7.2"] {
            assert_says(release, &facts);
        }
    }

    #[test]
    fn the_driver_tells_how_busy_a_device_is() {
        let devices = tempfile::tempdir().unwrap();
        let address = "0000:c1:00.0";
        assert_eq!(busy_in(devices.path(), address), None);
        fs::create_dir(devices.path().join(address)).unwrap();
        for (text, expected) in [("37\n", Some(0.37)), ("0\n", Some(0.0)), ("101\n", None), ("\n", None)] {
            fs::write(devices.path().join(address).join("gpu_busy_percent"), text).unwrap();
            assert_eq!(busy_in(devices.path(), address), expected, "{text:?}");
        }
    }

    #[test]
    fn releases_before_6_are_refused() {
        assert_eq!(version(60_443_484), Ok("HIP 6.4".into()));
        assert_eq!(version(70_253_211), Ok("HIP 7.2".into()));
        assert!(version(50_732_831).unwrap_err().starts_with("it is HIP 5.7, and 6.0"));
    }
}

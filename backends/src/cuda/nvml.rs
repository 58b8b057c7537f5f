//! NVIDIA's management library, which comes with the driver: what a device is connected with. Only `doctor` asks.

use std::ffi::{CStr, CString, c_char, c_int, c_uint};

use crate::{
    BackendKind,
    ffi::library::{self, table},
    gpu::Handle,
};

/// `NVML_NVLINK_MAX_LINKS`
const MOST_LINKS: c_uint = 18;
/// `NVML_P2P_CAPS_INDEX_NVLINK`
const OVER_NVLINK: c_int = 2;

table! {
    /// The library's table.
    Nvml {
        init = "nvmlInit_v2"();
        driver_version = "nvmlSystemGetDriverVersion"(text: *mut c_char, capacity: c_uint);
        device = "nvmlDeviceGetHandleByPciBusId_v2"(id: *const c_char, device: *mut Handle);
        pcie_generation = "nvmlDeviceGetMaxPcieLinkGeneration"(device: Handle, generation: *mut c_uint);
        pcie_width = "nvmlDeviceGetMaxPcieLinkWidth"(device: Handle, lanes: *mut c_uint);
        link_state = "nvmlDeviceGetNvLinkState"(device: Handle, link: c_uint, is_active: *mut c_uint);
        link_version = "nvmlDeviceGetNvLinkVersion"(device: Handle, link: c_uint, version: *mut c_uint);
        peer_status = "nvmlDeviceGetP2PStatus"(device: Handle, peer: Handle, over: c_int, status: *mut c_int);
        common_ancestor = "nvmlDeviceGetTopologyCommonAncestor"(device: Handle, peer: Handle, level: *mut c_int);
    }
}

impl Nvml {
    /// The library, started; `None` where there is none, or where it does not answer.
    pub(super) fn open() -> Option<Self> {
        let library = library::open(BackendKind::CUDA, &["libnvidia-ml.so.1"], "").ok()?;
        // SAFETY: the signatures are those of nvml.h, and `open` never closes a library.
        let nvml = unsafe { Self::load(library, 0) }.ok()?;
        // SAFETY: takes nothing, and may be called more than once.
        unsafe { nvml.init() }.ok()?;
        Some(nvml)
    }

    pub(super) fn driver(&self) -> Option<String> {
        let mut text: [c_char; 96] = [0; 96];
        // SAFETY: a buffer of the length that is told, which the library ends with NUL.
        unsafe { self.driver_version(text.as_mut_ptr(), 96) }.ok()?;
        // SAFETY: as above.
        Some(unsafe { CStr::from_ptr(text.as_ptr()) }.to_string_lossy().into_owned())
    }

    /// The device at a PCIe address.
    pub(super) fn at(&self, pci_bus_id: &str) -> Option<Handle> {
        let id = CString::new(pci_bus_id).ok()?;
        let mut device = 0;
        // SAFETY: a string that lives through the call, and a number of our own.
        unsafe { self.device(id.as_ptr(), &mut device) }.ok()?;
        Some(device)
    }

    /// Generation and lanes of the link to the host.
    pub(super) fn pcie(&self, device: Handle) -> Option<(c_uint, c_uint)> {
        let (mut generation, mut lanes) = (0, 0);
        // SAFETY: numbers of our own; the device is the library's.
        unsafe {
            self.pcie_generation(device, &mut generation).ok()?;
            self.pcie_width(device, &mut lanes).ok()?;
        }
        Some((generation, lanes))
    }

    /// Number of active links to peers, and the library's number of their version; `None` if there are none.
    pub(super) fn links(&self, device: Handle) -> Option<(usize, c_uint)> {
        let is_up = |link: &c_uint| {
            let mut state = 0;
            // SAFETY: as in `pcie`. A link that the device does not have is an error.
            unsafe { self.link_state(device, *link, &mut state) }.is_ok() && state == 1
        };
        let up: Vec<c_uint> = (0..MOST_LINKS).filter(is_up).collect();
        let mut version = 0;
        // SAFETY: as above.
        unsafe { self.link_version(device, *up.first()?, &mut version) }.ok()?;
        Some((up.len(), version))
    }

    /// The connection between two devices.
    pub(super) fn between(&self, device: Handle, peer: Handle) -> Option<&'static str> {
        let (mut status, mut level) = (0, 0);
        // SAFETY: numbers of our own; the devices are the library's.
        unsafe {
            if self.peer_status(device, peer, OVER_NVLINK, &mut status).is_ok() && status == 0 {
                return Some("NVLink");
            }
            self.common_ancestor(device, peer, &mut level).ok()?;
        }
        Some(match level {
            0 => "one board",
            10 => "one PCIe switch",
            20 => "PCIe switches",
            30 => "one host bridge",
            40 => "one NUMA node",
            _ => "the link between NUMA nodes",
        })
    }
}

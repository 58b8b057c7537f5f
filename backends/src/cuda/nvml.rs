//! NVIDIA's management library, which comes with the driver: what a device is connected with, and how busy it is.

use std::{
    collections::BTreeMap,
    ffi::{CStr, CString, c_char, c_int, c_uint},
    ptr,
    sync::{Mutex, OnceLock, PoisonError},
};

use crate::{
    BackendKind,
    ffi::library::{self, table},
    gpu::Handle,
};

/// `NVML_NVLINK_MAX_LINKS`
const MOST_LINKS: c_uint = 18;
/// `NVML_P2P_CAPS_INDEX_NVLINK`
const OVER_NVLINK: c_int = 2;
/// `NVML_GPU_UTILIZATION_SAMPLES`
const UTILIZATION_SAMPLES: c_int = 1;

/// `nvmlSample_t`
#[repr(C)]
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Sample {
    time_us: u64,
    /// A union of eight bytes, with a type of `nvmlValueType_t`.
    bits: u64,
}

/// `nvmlUtilization_t`, in percent.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Utilization {
    busy: c_uint,
    memory: c_uint,
}

/// The library of this process, opened by the first that asks how busy a device is.
static OPENED: OnceLock<Option<Nvml>> = OnceLock::new();
/// Time of the newest sample that was read of a device, by PCIe address.
static NEWEST: Mutex<BTreeMap<String, u64>> = Mutex::new(BTreeMap::new());

/// Share of the time in which a kernel ran on a device: the mean of the driver's samples since the last call. Without new
/// ones it is that of the driver's last period.
pub(super) fn busy(pci_bus_id: &str) -> Option<f64> {
    let nvml = OPENED.get_or_init(Nvml::open).as_ref()?;
    let device = nvml.at(pci_bus_id)?;
    let mut newest = NEWEST.lock().unwrap_or_else(PoisonError::into_inner);
    let last = newest.get(pci_bus_id).copied();
    let (kind, samples) = nvml.utilization_since(device, last.unwrap_or(0)).unwrap_or_default();
    let last_now = samples.iter().map(|sample| sample.time_us).max();
    newest.extend(last_now.map(|time| (pci_bus_id.to_owned(), time)));
    // The first samples are from before the run.
    let since_last_call = last.and_then(|_| mean_share(kind, &samples));
    since_last_call.or_else(|| nvml.utilization_now(device))
}

/// Mean of samples in percent, as a share; `None` without any, or if their type is not known.
fn mean_share(kind: c_int, samples: &[Sample]) -> Option<f64> {
    let percent = |sample: &Sample| match kind {
        0 => Some(f64::from_bits(sample.bits)),
        1 => Some(f64::from(sample.bits as c_uint)),
        2 | 3 => Some(sample.bits as f64),
        _ => None,
    };
    let sum = samples.iter().map(percent).sum::<Option<f64>>()?;
    let share = sum / 100.0 / samples.len() as f64;
    (0.0..=1.0).contains(&share).then_some(share)
}

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
        utilization = "nvmlDeviceGetUtilizationRates"(device: Handle, rates: *mut Utilization);
        samples = "nvmlDeviceGetSamples"(
            device: Handle, of: c_int, after_us: u64, kind: *mut c_int, count: *mut c_uint, samples: *mut Sample
        );
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

    /// Samples of the utilization after a time, and the type of their values.
    fn utilization_since(&self, device: Handle, after_us: u64) -> Option<(c_int, Vec<Sample>)> {
        let (mut kind, mut count) = (0, 0);
        let of = UTILIZATION_SAMPLES;
        // SAFETY: numbers of our own; without a place for samples their number is returned.
        unsafe { self.samples(device, of, after_us, &mut kind, &mut count, ptr::null_mut()) }.ok()?;
        let mut samples = vec![Sample::default(); count as usize];
        // SAFETY: as above, with a place for as many samples as are told.
        unsafe { self.samples(device, of, after_us, &mut kind, &mut count, samples.as_mut_ptr()) }.ok()?;
        samples.truncate(count as usize);
        Some((kind, samples))
    }

    /// Utilization over the driver's last period, of up to a second.
    fn utilization_now(&self, device: Handle) -> Option<f64> {
        let mut rates = Utilization::default();
        // SAFETY: a struct of our own; the device is the library's.
        unsafe { self.utilization(device, &mut rates) }.ok()?;
        (rates.busy <= 100).then(|| f64::from(rates.busy) / 100.0)
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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn samples_are_read_by_their_type() {
        let samples = |bits: [u64; 2]| bits.map(|bits| Sample { time_us: 0, bits });
        let garbage = 7 << 32; // the unused half of the union
        assert_eq!(mean_share(1, &samples([garbage | 100, 50])), Some(0.75));
        assert_eq!(mean_share(3, &samples([20, 40])), Some(0.3));
        assert_eq!(mean_share(0, &samples([50.0, 0.0].map(f64::to_bits))), Some(0.25));
        assert_eq!(mean_share(1, &[]), None);
        assert_eq!(mean_share(9, &samples([1, 1])), None);
        assert_eq!(mean_share(3, &samples([u64::MAX, 0])), None);
        assert_eq!((size_of::<Sample>(), size_of::<Utilization>()), (16, 8));
    }
}

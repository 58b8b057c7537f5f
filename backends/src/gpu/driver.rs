//! [`Driver`]: the functions that we call, and the structs and numbers that they take. AMD's are NVIDIA's but for
//! the names: `crate::ffi::abi` compares both with the vendors' headers.

use std::{
    ffi::{CStr, c_char, c_int, c_uint, c_ulonglong, c_ushort, c_void},
    ptr,
};

use super::vendor::{Dialect, Vendor};
use crate::{
    DeviceId, Error, Result,
    ffi::library::{self, Failed, table},
    host::work::HostCallback,
};

/// A context, stream, event, pool, module or function.
pub(crate) type Handle = usize;
/// An address in the device's memory.
pub(super) type Address = u64;

/// `CUDA_ERROR_OUT_OF_MEMORY`
pub(super) const OUT_OF_MEMORY: c_int = 2;
/// `CUDA_ERROR_NOT_READY`
const NOT_READY: c_int = 600;
/// `CU_STREAM_NON_BLOCKING`: in no order with libtorch's default stream.
pub(super) const NON_BLOCKING: c_uint = 1;
/// `CU_EVENT_DISABLE_TIMING`
pub(super) const WITHOUT_TIME: c_uint = 2;
/// `CU_MEM_LOCATION_TYPE_DEVICE`
const LOCATION_DEVICE: c_int = 1;
/// `CU_MEM_ALLOCATION_TYPE_PINNED`: physical memory that stays where it is.
const ALLOCATION_PINNED: c_int = 1;
/// `CU_MEM_ACCESS_FLAGS_PROT_READWRITE`
const READ_WRITE: c_int = 3;

/// `CUmemPool_attribute`: whether memory whose release is still pending may be handed out again, with a wait.
pub(super) const REUSE_ALLOW_INTERNAL_DEPENDENCIES: c_int = 3;
/// `CU_MEM_ALLOC_GRANULARITY_RECOMMENDED`
pub(super) const GRANULARITY_RECOMMENDED: c_int = 1;

/// `CUmemLocation`
#[repr(C)]
pub(super) struct Location {
    kind: c_int,
    device: c_int,
}

impl Location {
    fn device(device: c_int) -> Self {
        Self { kind: LOCATION_DEVICE, device }
    }
}

/// `CUmemAllocationProp`
#[repr(C)]
pub(crate) struct AllocationProperties {
    kind: c_int,
    handle_types: c_int,
    location: Location,
    win32: *mut c_void,
    flags: [u8; 8],
}

impl AllocationProperties {
    pub(super) fn on(device: c_int) -> Self {
        let location = Location::device(device);
        Self { kind: ALLOCATION_PINNED, handle_types: 0, location, win32: ptr::null_mut(), flags: [0; 8] }
    }
}

/// `CUmemAccessDesc`
#[repr(C)]
pub(crate) struct AccessDescription {
    location: Location,
    flags: c_int,
}

impl AccessDescription {
    pub(super) fn by(device: c_int) -> Self {
        Self { location: Location::device(device), flags: READ_WRITE }
    }
}

/// `CUmemPoolProps`
#[repr(C)]
pub(crate) struct PoolProperties {
    kind: c_int,
    handle_types: c_int,
    location: Location,
    win32: *mut c_void,
    max_bytes: usize,
    usage: c_ushort,
    reserved: [u8; 54],
}

impl PoolProperties {
    pub(super) fn on(device: c_int) -> Self {
        Self {
            kind: ALLOCATION_PINNED,
            handle_types: 0,
            location: Location::device(device),
            win32: ptr::null_mut(),
            max_bytes: 0, // the device's own limit
            usage: 0,
            reserved: [0; 54],
        }
    }
}

table! {
    /// The functions that both drivers have: by NVIDIA's names, and by AMD's.
    Calls {
        init = "cuInit" | "hipInit"(flags: c_uint);
        error_name = "cuGetErrorName" | "hipDrvGetErrorName"(code: c_int, text: *mut *const c_char);
        error_string = "cuGetErrorString" | "hipDrvGetErrorString"(code: c_int, text: *mut *const c_char);
        device_count = "cuDeviceGetCount" | "hipGetDeviceCount"(count: *mut c_int);
        device_get = "cuDeviceGet" | "hipDeviceGet"(device: *mut c_int, ordinal: c_int);
        device_name = "cuDeviceGetName" | "hipDeviceGetName"(name: *mut c_char, capacity: c_int, device: c_int);
        device_total_memory = "cuDeviceTotalMem_v2" | "hipDeviceTotalMem"(bytes: *mut usize, device: c_int);
        device_attribute = "cuDeviceGetAttribute" | "hipDeviceGetAttribute"(value: *mut c_int, attribute: c_int, device: c_int);
        device_pci_bus_id = "cuDeviceGetPCIBusId" | "hipDeviceGetPCIBusId"(id: *mut c_char, capacity: c_int, device: c_int);
        device_can_access_peer = "cuDeviceCanAccessPeer" | "hipDeviceCanAccessPeer"(can: *mut c_int, device: c_int, peer: c_int);
        context_synchronize = "cuCtxSynchronize" | "hipDeviceSynchronize"();
        memory_info = "cuMemGetInfo_v2" | "hipMemGetInfo"(free: *mut usize, total: *mut usize);
        pool_create = "cuMemPoolCreate" | "hipMemPoolCreate"(pool: *mut Handle, properties: *const PoolProperties);
        pool_destroy = "cuMemPoolDestroy" | "hipMemPoolDestroy"(pool: Handle);
        pool_set_attribute = "cuMemPoolSetAttribute" | "hipMemPoolSetAttribute"(pool: Handle, attribute: c_int, value: *mut c_void);
        pool_trim = "cuMemPoolTrimTo" | "hipMemPoolTrimTo"(pool: Handle, keep_bytes: usize);
        alloc_from_pool = "cuMemAllocFromPoolAsync" | "hipMallocFromPoolAsync"(address: *mut Address, len: usize, pool: Handle, stream: Handle);
        free_async = "cuMemFreeAsync" | "hipFreeAsync"(address: Address, stream: Handle);
        address_reserve = "cuMemAddressReserve" | "hipMemAddressReserve"(
            address: *mut Address, len: usize, alignment: usize, wish: Address, flags: c_ulonglong
        );
        address_free = "cuMemAddressFree" | "hipMemAddressFree"(address: Address, len: usize);
        physical_create = "cuMemCreate" | "hipMemCreate"(
            physical: *mut c_ulonglong, len: usize, properties: *const AllocationProperties, flags: c_ulonglong
        );
        physical_release = "cuMemRelease" | "hipMemRelease"(physical: c_ulonglong);
        physical_granularity = "cuMemGetAllocationGranularity" | "hipMemGetAllocationGranularity"(
            bytes: *mut usize, properties: *const AllocationProperties, option: c_int
        );
        map = "cuMemMap" | "hipMemMap"(address: Address, len: usize, offset: usize, physical: c_ulonglong, flags: c_ulonglong);
        unmap = "cuMemUnmap" | "hipMemUnmap"(address: Address, len: usize);
        set_access = "cuMemSetAccess" | "hipMemSetAccess"(
            address: Address, len: usize, access: *const AccessDescription, count: usize
        );
        host_register = "cuMemHostRegister_v2" | "hipHostRegister"(address: *mut c_void, len: usize, flags: c_uint);
        host_unregister = "cuMemHostUnregister" | "hipHostUnregister"(address: *mut c_void);
        fill = "cuMemsetD8Async" | "hipMemsetD8Async"(dst: Address, byte: u8, len: usize, stream: Handle);
        copy_h2d = "cuMemcpyHtoDAsync_v2" | "hipMemcpyHtoDAsync"(dst: Address, src: *const c_void, len: usize, stream: Handle);
        copy_d2h = "cuMemcpyDtoHAsync_v2" | "hipMemcpyDtoHAsync"(dst: *mut c_void, src: Address, len: usize, stream: Handle);
        copy_d2d = "cuMemcpyDtoDAsync_v2" | "hipMemcpyDtoDAsync"(dst: Address, src: Address, len: usize, stream: Handle);
        stream_create = "cuStreamCreate" | "hipStreamCreateWithFlags"(stream: *mut Handle, flags: c_uint);
        stream_destroy = "cuStreamDestroy_v2" | "hipStreamDestroy"(stream: Handle);
        stream_synchronize = "cuStreamSynchronize" | "hipStreamSynchronize"(stream: Handle);
        stream_wait_event = "cuStreamWaitEvent" | "hipStreamWaitEvent"(stream: Handle, event: Handle, flags: c_uint);
        launch_host_function = "cuLaunchHostFunc" | "hipLaunchHostFunc"(stream: Handle, callback: HostCallback, data: *mut c_void);
        event_create = "cuEventCreate" | "hipEventCreateWithFlags"(event: *mut Handle, flags: c_uint);
        event_destroy = "cuEventDestroy_v2" | "hipEventDestroy"(event: Handle);
        event_record = "cuEventRecord" | "hipEventRecord"(event: Handle, stream: Handle);
        event_query = "cuEventQuery" | "hipEventQuery"(event: Handle);
        event_elapsed = "cuEventElapsedTime" | "hipEventElapsedTime"(elapsed_ms: *mut f32, start: Handle, end: Handle);
        module_load = "cuModuleLoadData" | "hipModuleLoadData"(module: *mut Handle, image: *const c_void);
        module_unload = "cuModuleUnload" | "hipModuleUnload"(module: Handle);
        module_function = "cuModuleGetFunction" | "hipModuleGetFunction"(function: *mut Handle, module: Handle, name: *const c_char);
        launch = "cuLaunchKernel" | "hipModuleLaunchKernel"(
            function: Handle,
            grid_x: c_uint, grid_y: c_uint, grid_z: c_uint,
            block_x: c_uint, block_y: c_uint, block_z: c_uint,
            shared_bytes: c_uint, stream: Handle, arguments: *mut *mut c_void, extra: *mut *mut c_void
        );
    }
}

/// A vendor's driver, opened and started.
#[derive(Debug)]
pub(crate) struct Driver {
    pub(super) vendor: &'static Vendor,
    pub(super) dialect: Box<dyn Dialect>,
    /// Its version in words.
    pub(super) version: String,
    calls: Calls,
}

/// The functions are called on the driver itself.
impl std::ops::Deref for Driver {
    type Target = Calls;

    fn deref(&self) -> &Calls {
        &self.calls
    }
}

impl Driver {
    /// The driver, opened and started once. [`Error::Unavailable`] where there is none.
    pub(super) fn of(vendor: &'static Vendor) -> Result<&'static Self> {
        vendor.opened.driver.get_or_init(|| Self::open(vendor)).as_ref().map_err(Clone::clone)
    }

    fn open(vendor: &'static Vendor) -> Result<Self> {
        let library = library::open(vendor.backend, vendor.driver_files, vendor.driver_hint)?;
        let refused = |reason| vendor.unavailable(vendor.driver_files, reason);
        // First of all, since what is too old may lack the other functions.
        let version = version(vendor, library).map_err(refused)?;
        // SAFETY: the signatures are those of the vendor's header, and `open` never closes a library.
        let driver = unsafe {
            let dialect = (vendor.dialect)(library).map_err(refused)?;
            let calls = Calls::load(library, vendor.column).map_err(refused)?;
            Self { vendor, dialect, version, calls }
        };
        // SAFETY: the first call, with the only flags there are.
        unsafe { driver.init(0) }
            .map_err(|failed| vendor.unavailable(&[failed.call], driver.text(failed.code)))?;
        Ok(driver)
    }

    /// The value of a device attribute, by the vendor's number.
    pub(crate) fn attribute(&self, device: c_int, attribute: c_int) -> Result<c_int, Failed> {
        let mut value = 0;
        // SAFETY: a number of our own.
        unsafe { self.device_attribute(&mut value, attribute, device)? };
        Ok(value)
    }

    /// The error that a failed call becomes.
    pub(super) fn error(&self, device: DeviceId, failed: Failed) -> Error {
        let Failed { call, code } = failed;
        Error::Driver { device, call, code: code.into(), message: self.text(code) }
    }

    /// The driver's name and words for a code.
    fn text(&self, code: c_int) -> String {
        let read = |outcome: Result<(), Failed>, text: *const c_char| {
            // SAFETY: the driver has answered with the address of a constant string.
            outcome.is_ok().then(|| unsafe { CStr::from_ptr(text) }.to_string_lossy())
        };
        let (mut name, mut words) = (ptr::null(), ptr::null());
        // SAFETY: addresses of our own.
        let (named, worded) =
            unsafe { (self.error_name(code, &mut name), self.error_string(code, &mut words)) };
        match (read(named, name), read(worded, words)) {
            (Some(name), Some(words)) => format!("{name}: {words}"),
            _ => "a code that this driver has no words for".into(),
        }
    }
}

/// Returns true if an event is reached, from the result of the query.
pub(super) fn reached(outcome: Result<(), Failed>) -> Result<bool, Failed> {
    match outcome {
        Ok(()) => Ok(true),
        Err(Failed { code: NOT_READY, .. }) => Ok(false),
        Err(failed) => Err(failed),
    }
}

/// The driver's version in words, or why it is of no use. Needs no device.
fn version(vendor: &Vendor, library: &library::Library) -> Result<String, String> {
    type GetVersion = unsafe extern "C" fn(*mut c_int) -> c_int;
    let mut version = 0;
    // SAFETY: both vendors have this signature, and the number is our own.
    let code = unsafe { library::symbol::<GetVersion>(library, vendor.version_call)?(&mut version) };
    match code {
        0 => (vendor.version)(version),
        code => Err(format!("{} returned {code}", vendor.version_call)),
    }
}

#[cfg(test)]
mod tests {
    use std::mem::offset_of;

    use super::*;
    use crate::ffi::abi::{assert_says, fact};

    /// `names` are a vendor's for: out of memory, not ready, non-blocking, without time, device, pinned, read-write, recommended,
    /// reuse, and the structs of a pool, of an allocation and of an access.
    fn facts(column: usize, names: [&str; 12]) -> Vec<String> {
        let [
            oom,
            not_ready,
            non_blocking,
            without_time,
            device,
            pinned,
            read_write,
            recommended,
            reuse,
            pool,
            allocation,
            access,
        ] = names;
        let mut facts = Calls::signatures(column);
        facts.extend([
            fact("value", oom, OUT_OF_MEMORY),
            fact("value", not_ready, NOT_READY),
            fact("value", non_blocking, NON_BLOCKING),
            fact("value", without_time, WITHOUT_TIME),
            fact("value", device, LOCATION_DEVICE),
            fact("value", pinned, ALLOCATION_PINNED),
            fact("value", read_write, READ_WRITE),
            fact("value", recommended, GRANULARITY_RECOMMENDED),
            fact("value", reuse, REUSE_ALLOW_INTERNAL_DEPENDENCIES),
            fact("size", pool, size_of::<PoolProperties>()),
            fact("size", allocation, size_of::<AllocationProperties>()),
            fact("size", access, size_of::<AccessDescription>()),
            fact("offset", &format!("{pool}.location"), offset_of!(PoolProperties, location)),
            fact("offset", &format!("{pool}.maxSize"), offset_of!(PoolProperties, max_bytes)),
            fact("offset", &format!("{allocation}.location"), offset_of!(AllocationProperties, location)),
        ]);
        facts
    }

    #[test]
    fn the_tables_say_what_the_headers_say() {
        let nvidia = facts(
            0,
            [
                "CUDA_ERROR_OUT_OF_MEMORY",
                "CUDA_ERROR_NOT_READY",
                "CU_STREAM_NON_BLOCKING",
                "CU_EVENT_DISABLE_TIMING",
                "CU_MEM_LOCATION_TYPE_DEVICE",
                "CU_MEM_ALLOCATION_TYPE_PINNED",
                "CU_MEM_ACCESS_FLAGS_PROT_READWRITE",
                "CU_MEM_ALLOC_GRANULARITY_RECOMMENDED",
                "CU_MEMPOOL_ATTR_REUSE_ALLOW_INTERNAL_DEPENDENCIES",
                "CUmemPoolProps",
                "CUmemAllocationProp",
                "CUmemAccessDesc",
            ],
        );
        assert_says("cuda_13.0", &nvidia);
        let amd = facts(
            1,
            [
                "hipErrorOutOfMemory",
                "hipErrorNotReady",
                "hipStreamNonBlocking",
                "hipEventDisableTiming",
                "hipMemLocationTypeDevice",
                "hipMemAllocationTypePinned",
                "hipMemAccessFlagsProtReadWrite",
                "hipMemAllocationGranularityRecommended",
                "hipMemPoolReuseAllowInternalDependencies",
                "hipMemPoolProps",
                "hipMemAllocationProp",
                "hipMemAccessDesc",
            ],
        );
        for release in ["hip_6.4", "hip_7.2"] {
            assert_says(release, &amd);
        }
    }

    #[test]
    fn an_event_that_is_not_reached_is_no_error() {
        let failed = |code| Failed::check("cuEventQuery", code);
        assert_eq!(reached(failed(0)), Ok(true));
        assert_eq!(reached(failed(600)), Ok(false));
        assert_eq!(reached(failed(700)), Err(Failed { call: "cuEventQuery", code: 700 }));
    }
}
